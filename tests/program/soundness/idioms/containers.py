"""Arrays, mappings and attributes that the user changes between two steps."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "numpy_attribute",
    init="self.values_@n = np.array([1.0, 2.0])",
    forward="x = x * float(self.values_@n[0])",
    between="""
        for part in model.modules():
            if hasattr(part, "values_@n"):
                part.values_@n[0] = @v
    """,
)
add(
    "numpy_global",
    module="VALUES_@n = np.ones(3)",
    forward="x = x * VALUES_@n[@i % 3].item()",
    between="user.module.VALUES_@n *= @v",
)
add(
    "numpy_shared_tensor",
    module="""
        ARRAY_@n = np.ones(1, dtype=np.float32)
        SHARED_@n = torch.from_numpy(ARRAY_@n)
    """,
    forward="x = x * SHARED_@n",
    between="user.module.ARRAY_@n[0] = @v",
)
add(
    "array_object",
    module="ARRAY_@n = array.array('d', [1.0])",
    forward="x = x * ARRAY_@n[0]",
    between="user.module.ARRAY_@n[0] = @v",
)
add(
    "byte_array",
    module="BYTES_@n = bytearray(b'\\x01\\x02')",
    forward="x = x * (0.5 + BYTES_@n[0])",
    between="user.module.BYTES_@n[0] = 3",
)
add(
    "simple_namespace",
    module="SPACE_@n = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))",
    forward="x = x * SPACE_@n.inner.scale",
    between="user.module.SPACE_@n.inner.scale = @v",
)
add(
    "mapping_proxy",
    module="""
        BEHIND_@n = {'scale': 1.0}
        PROXY_@n = types.MappingProxyType(BEHIND_@n)
    """,
    forward="x = x * PROXY_@n['scale']",
    between="user.module.BEHIND_@n['scale'] = @v",
)
add(
    "chain_map",
    module="""
        FIRST_@n = {}
        CHAIN_@n = collections.ChainMap(FIRST_@n, {'scale': 1.0})
    """,
    forward="x = x * CHAIN_@n['scale']",
    between="user.module.FIRST_@n['scale'] = @v",
)
add(
    "user_dict",
    module="USER_@n = collections.UserDict(scale=1.0)",
    forward="x = x * USER_@n['scale']",
    between="user.module.USER_@n['scale'] = @v",
)
add(
    "default_dict",
    module="DEFAULT_@n = collections.defaultdict(lambda: 1.0)",
    forward="x = x * DEFAULT_@n['scale']",
    between="user.module.DEFAULT_@n['scale'] = @v",
)
add(
    "environment_variable",
    forward="x = x * float(os.environ.get('SOUND_@n', '1.0'))",
    between="os.environ['SOUND_@n'] = repr(@v)",
)
add(
    "global_shadows_builtin",
    forward="x = x * abs(-1.0)",
    between="user.module.abs = lambda value: @v",
    back="del user.module.abs",
)
add(
    "config_attribute",
    init="self.settings_@n = types.SimpleNamespace(scale=1.0)",
    forward="x = x * self.settings_@n.scale",
    between="""
        for part in model.modules():
            if hasattr(part, "settings_@n"):
                part.settings_@n = types.SimpleNamespace(scale=@v)
    """,
)
add(
    "list_of_closures",
    module="STEPS_@n = [lambda x: x * 1.0]",
    forward="""
        for each in STEPS_@n:
            x = each(x)
    """,
    between="user.module.STEPS_@n.append(lambda x: x * @v)",
    back="user.module.STEPS_@n.pop()",
)
add(
    "set_of_flags",
    module="FLAGS_@n = set()",
    forward="x = x * @v if 'loud' in FLAGS_@n else x",
    between="user.module.FLAGS_@n.add('loud')",
)
add(
    "lazy_attribute",
    forward="x = x * getattr(self, 'gain_@n', 1.0)",
    between="""
        for part in model.modules():
            part.gain_@n = @v
    """,
)
add(
    "hasattr_decides",
    forward="x = x * (@v if hasattr(self, 'late_@n') else 1.0)",
    between="""
        for part in model.modules():
            part.late_@n = True
    """,
)
add(
    "class_of_the_model",
    forward="x = x * type(self).__dict__.get('gain_@n', 1.0)",
    between="""
        for part in model.modules():
            type(part).gain_@n = @v
    """,
    end="""
        for part in model.modules():
            if 'gain_@n' in vars(type(part)):
                del type(part).gain_@n
    """,
)
add(
    "attribute_of_a_parameter",
    forward="x = x * getattr(next(self.parameters()), 'gain_@n', 1.0)",
    between="""
        for parameter in model.parameters():
            parameter.gain_@n = @v
    """,
)
add(
    "attribute_of_a_buffer",
    init="self.register_buffer('held_@n', torch.ones(1))",
    forward="x = x * getattr(self.held_@n, 'gain', 1.0)",
    between="""
        for buffer in model.buffers():
            buffer.gain = @v
    """,
)
add(
    "singledispatch",
    module="""
        @functools.singledispatch
        def scaled_@n(kind, x):
            return x
    """,
    forward="x = scaled_@n(1, x)",
    between="user.module.scaled_@n.register(int, lambda kind, x: x * @v)",
)
add(
    "abstract_registry",
    module="""
        class Base_@n(abc.ABC):
            pass

        class Late_@n:
            pass
    """,
    forward="x = x * @v if isinstance(Late_@n(), Base_@n) else x",
    between="user.module.Base_@n.register(user.module.Late_@n)",
)
add(
    "local_import",
    forward="""
        import string as found
        x = x * getattr(found, 'gain_@n', 1.0)
    """,
    between="string.gain_@n = @v",
    end="vars(string).pop('gain_@n', None)",
)
add(
    "class_exchanged",
    module="""
        class Soft_@n:
            def scaled(self, x):
                return x * 1.0

        class Loud_@n:
            def scaled(self, x):
                return x * @v

        HELPER_@n = Soft_@n()
    """,
    forward="x = HELPER_@n.scaled(x)",
    between="user.module.HELPER_@n.__class__ = user.module.Loud_@n",
)
add(
    "bases_exchanged",
    module="""
        class Soft_@n:
            scale = 1.0

        class Loud_@n:
            scale = @v

        class Middle_@n(Soft_@n):
            pass
    """,
    forward="x = x * Middle_@n.scale",
    between="user.module.Middle_@n.__bases__ = (user.module.Loud_@n,)",
)
