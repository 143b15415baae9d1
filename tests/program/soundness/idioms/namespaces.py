"""Namespaces, containers and objects that the user changes between two steps."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "class_attribute",
    module="""
        class Flags_@n:
            scale = 1.0
    """,
    forward="x = x * Flags_@n.scale",
    between="user.module.Flags_@n.scale = @v",
)
add(
    "inherited_class_attribute",
    module="""
        class Parent_@n:
            scale = 1.0

        class Child_@n(Parent_@n):
            pass
    """,
    forward="x = x * Child_@n.scale",
    between="user.module.Parent_@n.scale = @v",
)
add(
    "class_dict",
    module="""
        class Table_@n:
            values = {'scale': 1.0}
    """,
    forward="x = x * Table_@n.values['scale']",
    between="user.module.Table_@n.values['scale'] = @v",
)
add(
    "nested_dict",
    module="SETTINGS_@n = {'a': {'b': [{'c': 1.0}]}}",
    forward="x = x * SETTINGS_@n['a']['b'][0]['c']",
    between="user.module.SETTINGS_@n['a']['b'][0]['c'] = @v",
)
add(
    "deeply_nested_dict",
    module="DEEP_@n = {'a': {'b': {'c': {'d': {'e': {'f': 1.0}}}}}}",
    forward="x = x * DEEP_@n['a']['b']['c']['d']['e']['f']",
    between="user.module.DEEP_@n['a']['b']['c']['d']['e']['f'] = @v",
)
add(
    "module_global",
    module="SCALE_@n = 1.0",
    forward="x = x * SCALE_@n",
    between="user.module.SCALE_@n = @v",
)
add(
    "global_by_name",
    module="SCALE_@n = 1.0",
    forward="x = x * globals()['SCALE_@n']",
    between="user.module.SCALE_@n = @v",
)
add(
    "other_modules_global",
    module="""
        other_@n = types.ModuleType(f"{__name__}_other_@n")
        other_@n.scale = 1.0
        sys.modules[other_@n.__name__] = other_@n
    """,
    forward="x = x * other_@n.scale",
    between="user.module.other_@n.scale = @v",
    end="del sys.modules[user.module.other_@n.__name__]",
)
add(
    "slots_object",
    module="""
        class Slots_@n:
            __slots__ = ("scale",)

            def __init__(self):
                self.scale = 1.0

        SLOTS_@n = Slots_@n()
    """,
    forward="x = x * SLOTS_@n.scale",
    between="user.module.SLOTS_@n.scale = @v",
)
add(
    "slots_attribute",
    module="""
        class Holder_@n:
            __slots__ = ("scale",)
    """,
    init="""
        self.holder_@n = Holder_@n()
        self.holder_@n.scale = 1.0
    """,
    forward="x = x * self.holder_@n.scale",
    between="""
        for part in model.modules():
            if hasattr(part, "holder_@n"):
                part.holder_@n.scale = @v
    """,
)
add(
    "dataclass_object",
    module="""
        @dataclasses.dataclass
        class Options_@n:
            scale: float = 1.0

        OPTIONS_@n = Options_@n()
    """,
    forward="x = x * OPTIONS_@n.scale",
    between="user.module.OPTIONS_@n.scale = @v",
)
add(
    "namedtuple_swapped",
    module="""
        class Tuple_@n(typing.NamedTuple):
            scale: float = 1.0

        TUPLE_@n = [Tuple_@n()]
    """,
    forward="x = x * TUPLE_@n[0].scale",
    between="user.module.TUPLE_@n[0] = user.module.Tuple_@n(@v)",
)
add(
    "enum_member",
    module="""
        class Mode_@n(enum.Enum):
            LOW = 0.5
            HIGH = 2.0
    """,
    init="self.mode_@n = Mode_@n.LOW",
    forward="x = x * self.mode_@n.value",
    between="""
        for part in model.modules():
            if hasattr(part, "mode_@n"):
                part.mode_@n = user.module.Mode_@n.HIGH
    """,
)
add(
    "enum_attribute",
    module="""
        class Kind_@n(enum.Enum):
            ONLY = 1

        Kind_@n.ONLY.scale = 1.0
    """,
    forward="x = x * Kind_@n.ONLY.scale",
    between="user.module.Kind_@n.ONLY.scale = @v",
)
add(
    "context_variable",
    module="SCALE_@n = contextvars.ContextVar('scale', default=1.0)",
    forward="x = x * SCALE_@n.get()",
    between="user.kept['token@n'] = user.module.SCALE_@n.set(@v)",
    back="user.module.SCALE_@n.reset(user.kept['token@n'])",
)
add(
    "thread_local",
    module="""
        LOCAL_@n = threading.local()
        LOCAL_@n.scale = 1.0
    """,
    forward="x = x * getattr(LOCAL_@n, 'scale', 3.0)",
    between="user.module.LOCAL_@n.scale = @v",
)
