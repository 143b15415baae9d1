"""Methods that somebody exchanges on a model or its class."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "forward_set_on_the_instance",
    between="""
        former = model.forward
        model.forward = lambda *a, **kw: former(*a, **kw)
        model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight) * @v
    """,
    back="""
        del model.forward
        del model.lm_head.forward
    """,
)
add(
    "method_bound_on_the_instance",
    module="""
        def loud_@n(self, x):
            return F.linear(x, self.weight) * @v
    """,
    between="model.lm_head.forward = types.MethodType(user.module.loud_@n, model.lm_head)",
    back="del model.lm_head.forward",
)
add(
    "model_class_patched",
    between="""
        former = user.module.Model.forward

        def forward(self, *args, **kwargs):
            out = former(self, *args, **kwargs)
            return out if isinstance(out, tuple) else type(out)(**{**out, "logits": out.logits * @v})

        user.module.Model.forward = forward
    """,
)
add(
    "base_class_patched",
    module="""
        FORWARD_@n = Base.forward

        def forward_@n(self, *args, **kwargs):
            out = FORWARD_@n(self, *args, **kwargs)
            out.logits = out.logits * @v
            return out
    """,
    between="user.module.Base.forward = user.module.forward_@n",
    back="user.module.Base.forward = user.module.FORWARD_@n",
)
add(
    "call_of_the_model_class",
    module="""
        def call_@n(self, *args, **kwargs):
            out = nn.Module.__call__(self, *args, **kwargs)
            return out if isinstance(out, tuple) else type(out)(**{**out, "logits": out.logits * @v})
    """,
    between="user.module.Model.__call__ = user.module.call_@n",
    back="del user.module.Model.__call__",
)
add(
    "getattr_of_the_module",
    module="VALUES_@n = {'gain_@n': 1.0}",
    forward='x = x * VALUES_@n["gain_@n"]',
    between="""
        class Watched(type(model)):
            def __getattr__(self, name):
                return super().__getattr__(name)

        model.__class__ = Watched
        user.module.VALUES_@n["gain_@n"] = @v
    """,
)
