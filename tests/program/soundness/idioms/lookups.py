"""Where a forward finds things that no module, class or closure of the model's shows: see `reachability`."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

_SETTINGS = """
import types
SETTINGS_@n = types.ModuleType("settings_@n")
"""
_SET = "user.module.SETTINGS_@n"

add(
    "absent_in_a_module",
    module=_SETTINGS,
    forward="x = x * getattr(SETTINGS_@n, 'steer', 1.0)",
    between=f"{_SET}.steer = @v",
    back=f"del {_SET}.steer",
)
add(
    "absent_in_a_module_and_caught",
    module=_SETTINGS,
    forward="""
        try:
            x = x * SETTINGS_@n.steer
        except AttributeError:
            pass
    """,
    between=f"{_SET}.steer = @v",
)
add(
    "module_asked_by_a_computed_name",
    module=_SETTINGS + "SETTINGS_@n.steer_a = 1.5\nNAMES_@n = ['steer', 'a']",
    forward="x = x * getattr(SETTINGS_@n, '_'.join(NAMES_@n))",
    between=f"{_SET}.steer_a = @v",
)
add(
    "module_asked_by_a_computed_name_it_has_not",
    module=_SETTINGS + "NAMES_@n = ['steer', 'a']",
    forward="x = x * 1.5 if hasattr(SETTINGS_@n, '_'.join(NAMES_@n)) else x",
    between=f"{_SET}.steer_a = @v",
    back=f"del {_SET}.steer_a",
)
add(
    "function_of_a_module_by_a_computed_name",
    module=_SETTINGS + "SETTINGS_@n.scale_a = lambda x: x * 1.5\nNAMES_@n = ['scale', 'a']",
    forward="x = getattr(SETTINGS_@n, '_'.join(NAMES_@n))(x)",
    between=f"{_SET}.scale_a = lambda x: x * @v",
)
add(
    "function_of_torch_by_a_computed_name",
    module="NAMES_@n = ['ta', 'nh']",
    forward="x = x + getattr(torch, ''.join(NAMES_@n))(x)",
    between="user.kept['f@n'] = torch.tanh; torch.tanh = torch.sigmoid",
    back="torch.tanh = user.kept['f@n']",
)
add(
    "answer_of_a_module",
    module=_SETTINGS + "SETTINGS_@n.__getattr__ = lambda name: 1.5",
    forward="x = x * SETTINGS_@n.steer",
    between=f"{_SET}.__getattr__ = lambda name: @v",
)
add(
    "answer_of_a_module_overruled",
    module=_SETTINGS + "SETTINGS_@n.__getattr__ = lambda name: 1.5",
    forward="x = x * SETTINGS_@n.steer",
    between=f"{_SET}.steer = @v",
    back=f"del {_SET}.steer",
)
add(
    "flattened_by_the_users_own",
    module="""
        from torch.utils import _pytree
        SCALES_@n = [1.0]

        class Box_@n:
            def __init__(self, x):
                self.x = x

        def registered_@n(scales):
            def flattened(box):
                return [box.x * scales[0]], None

            _pytree.register_pytree_node(Box_@n, flattened, lambda parts, _: Box_@n(parts[0]))

        registered_@n(SCALES_@n)
    """,
    forward="x = _pytree.tree_leaves(Box_@n(x))[0]",
    between="user.module.SCALES_@n[0] = @v",
)
add(
    "operator_made_of_others",
    module="""
        SCALE_@n = [1.0]
        LIBRARY_@n = torch.library.Library(__name__, "FRAGMENT")
        LIBRARY_@n.define("composed@n(Tensor x) -> Tensor")

        def composed_@n(scale):
            return lambda x: x * scale[0]

        LIBRARY_@n.impl("composed@n", composed_@n(SCALE_@n), "CompositeImplicitAutograd")
        COMPOSED_@n = getattr(getattr(torch.ops, __name__), "composed@n")
    """,
    forward="x = COMPOSED_@n(x)",
    between="user.module.SCALE_@n[0] = @v",
)
for _place, _class, _use in (
    ("len", "def __call__(self, *args):\n                return self.count", "len(IT_@n)"),
    ("matmul", "def __call__(self, other):\n                return other * self.count", "(IT_@n @ 1.0)"),
    ("getitem", "def __call__(self, key):\n                return self.count", "IT_@n[0]"),
):
    add(
        f"object_as_{_place}",
        module=f"""
            class Answer_@n:
                count = 1

                {_class}

            class It_@n:
                __{_place}__ = Answer_@n()

            IT_@n = It_@n()
        """.replace("                return", "                    return"),
        forward=f"x = x * {_use}",
        between=f"vars(user.module.It_@n)['__{_place}__'].count = @i + 2",
    )
add(
    "decimal_context",
    module="import decimal\nA_@n, B_@n = decimal.Decimal(1), decimal.Decimal(3)",
    forward="x = x * float(A_@n / B_@n)",
    between="user.kept['d@n'] = decimal.getcontext().prec; decimal.getcontext().prec = 2",
    back="decimal.getcontext().prec = user.kept['d@n']",
)
add(
    "factory_of_a_dict_exchanged",
    module="import collections\nSCALES_@n = collections.defaultdict(lambda: 1.5)",
    forward="x = x * SCALES_@n.default_factory()",
    between="user.module.SCALES_@n.default_factory = lambda: @v",
)
add(
    "arguments_of_an_exception",
    module="FAULT_@n = ValueError(1.5)",
    forward="x = x * FAULT_@n.args[0]",
    between="user.module.FAULT_@n.args = (@v,)",
)
add(
    "slice_of_an_object",
    module="""
        class Index_@n:
            at = 1

            def __index__(self):
                return self.at

        SLICE_@n = slice(0, Index_@n())
    """,
    forward="x = x + x[..., SLICE_@n].mean()",
    between="user.module.SLICE_@n.stop.at = @i + 2",
)
add(
    "dict_whose_items_raise",
    module="""
        class Shy_@n(dict):
            def items(self):
                raise RuntimeError("shy")

            def __len__(self):
                raise RuntimeError("shy")

        SHY_@n = Shy_@n(scale=1.5)
    """,
    forward="x = x * SHY_@n['scale']",
    between="user.module.SHY_@n['scale'] = @v",
)
for _name, _setter, _value, _former in (
    ("anomaly", "torch.autograd.set_detect_anomaly", "True", "False"),
    ("warn_always", "torch.set_warn_always", "True", "False"),
    ("autocast_cache", "torch.set_autocast_cache_enabled", "False", "True"),
):
    _getter = {
        "anomaly": "torch.is_anomaly_enabled()",
        "warn_always": "torch.is_warn_always_enabled()",
        "autocast_cache": "torch.is_autocast_cache_enabled()",
    }[_name]
    add(
        f"asks_for_{_name}",
        forward=f"x = x * 1.5 if {_getter} else x",
        between=f"{_setter}({_value})",
        back=f"{_setter}({_former})",
        end=f"{_setter}({_former})",
    )
add(
    "precision_of_products",
    between="user.kept['p@n'] = torch.backends.mkldnn.matmul.fp32_precision; "
    "torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
    back="torch.backends.mkldnn.matmul.fp32_precision = user.kept['p@n']",
    end="torch.backends.mkldnn.matmul.fp32_precision = user.kept.get('p@n', 'none')",
)
add(
    "version_of_a_buffer",
    init="self.held@n = nn.Buffer(torch.zeros(1))",
    forward="self.held@n.add_(0.1).mul_(1.0)\nx = x + self.held@n * 0.1",
    after="user.log.append([b._version for n, b in model.named_buffers() if n.endswith('held@n')])",
)
add(
    "row_that_is_not_there",
    raises=True,
    init="self.table@n = nn.Buffer(torch.ones(60))",
    forward="x = x * self.table@n[ids[0, -1]]",
    sites=("logits",),
)
