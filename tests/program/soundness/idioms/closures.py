"""Closures, functions and helper objects that the user changes between two steps."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "closure_cell",
    module="""
        def made_@n():
            scale = 1.0

            def get():
                return scale

            def put(value):
                nonlocal scale
                scale = value

            return get, put

        GET_@n, PUT_@n = made_@n()
    """,
    forward="x = x * GET_@n()",
    between="user.module.PUT_@n(@v)",
)
add(
    "closure_contents",
    module="""
        def made_@n():
            values = {"scale": 1.0}
            return (lambda: values["scale"]), values

        GET_@n, VALUES_@n = made_@n()
    """,
    forward="x = x * GET_@n()",
    between="user.module.VALUES_@n['scale'] = @v",
)
add(
    "cell_contents_set",
    module="""
        def made_@n():
            scale = 1.0
            return lambda: scale

        GET_@n = made_@n()
    """,
    forward="x = x * GET_@n()",
    between="user.module.GET_@n.__closure__[0].cell_contents = @v",
)
add(
    "function_attribute",
    module="""
        def scaled_@n(x):
            return x * scaled_@n.scale

        scaled_@n.scale = 1.0
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.scale = @v",
)
add(
    "default_argument",
    module="""
        def scaled_@n(x, scale=1.0):
            return x * scale
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.__defaults__ = (@v,)",
)
add(
    "keyword_default",
    module="""
        def scaled_@n(x, *, scale=1.0):
            return x * scale
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.__kwdefaults__['scale'] = @v",
)
add(
    "default_argument_contents",
    module="""
        def scaled_@n(x, scale=[1.0]):
            return x * scale[0]
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.__defaults__[0][0] = @v",
)
add(
    "code_exchanged",
    module="""
        def scaled_@n(x):
            return x * 1.0

        def other_@n(x):
            return x * @v
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.__code__ = user.module.other_@n.__code__",
)
add(
    "helper_replaced",
    module="""
        def scaled_@n(x):
            return x * 1.0
    """,
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n = lambda x: x * @v",
)
add(
    "partial_object",
    module="""
        SCALE_@n = [1.0]
        SCALED_@n = functools.partial(lambda scale, x: x * scale[0], SCALE_@n)
    """,
    forward="x = SCALED_@n(x)",
    between="user.module.SCALE_@n[0] = @v",
)
add(
    "cached_function",
    module="""
        VALUE_@n = [1.0]

        @functools.lru_cache
        def scale_@n(kind):
            return VALUE_@n[0]
    """,
    forward="x = x * scale_@n(@i)",
    between="user.module.VALUE_@n[0] = @v",
    back="user.module.scale_@n.cache_clear()",
)
add(
    "property_of_a_helper",
    module="""
        class Scaled_@n:
            _scale = 1.0

            @property
            def scale(self):
                return self._scale

        HELPER_@n = Scaled_@n()
    """,
    forward="x = x * HELPER_@n.scale",
    between="type(user.module.HELPER_@n)._scale = @v",
)
add(
    "descriptor",
    module="""
        class Described_@n:
            value = 1.0

            def __get__(self, instance, owner):
                return self.value

        class Has_@n:
            scale = Described_@n()

        HAS_@n = Has_@n()
    """,
    forward="x = x * HAS_@n.scale",
    between="vars(user.module.Has_@n)['scale'].value = @v",
)
add(
    "getattr_hook",
    module="""
        VALUES_@n = {"scale": 1.0}

        class Dynamic_@n:
            def __getattr__(self, name):
                return VALUES_@n[name]

        DYNAMIC_@n = Dynamic_@n()
    """,
    forward="x = x * DYNAMIC_@n.scale",
    between="user.module.VALUES_@n['scale'] = @v",
)
add(
    "metaclass_attribute",
    module="""
        class Meta_@n(type):
            scale = 1.0

        class Under_@n(metaclass=Meta_@n):
            pass
    """,
    forward="x = x * Under_@n.scale",
    between="user.module.Meta_@n.scale = @v",
)
add(
    "helper_method_patched",
    module="""
        class Helper_@n:
            def scaled(self, x):
                return x * 1.0

        HELPER_@n = Helper_@n()
    """,
    forward="x = HELPER_@n.scaled(x)",
    between="user.module.Helper_@n.scaled = lambda self, x: x * @v",
)
add(
    "helper_instance_patched",
    module="""
        class Helper_@n:
            def scaled(self, x):
                return x * 1.0
    """,
    init="self.helper_@n = Helper_@n()",
    forward="x = self.helper_@n.scaled(x)",
    between="""
        for part in model.modules():
            if hasattr(part, "helper_@n"):
                part.helper_@n.scaled = lambda x: x * @v
    """,
)
add(
    "weak_reference",
    module="""
        class Target_@n:
            scale = 1.0

        TARGET_@n = Target_@n()
        REF_@n = weakref.ref(TARGET_@n)
    """,
    forward="x = x * REF_@n().scale if REF_@n() is not None else x * @v",
    between="""
        del user.module.TARGET_@n
        gc.collect()
    """,
)
