"""Functions in C that are called by others in C, and objects that functions in C stand for."""

from __future__ import annotations

from ..idiom import Theme

THEME = Theme(__name__)
add = THEME.add

_DEEPER = "sys.setrecursionlimit(sys.getrecursionlimit() + 500)"


def reading_a_setting(name: str, module: str, forward: str) -> None:
    """``forward`` gets at `sys.getrecursionlimit` in a way that no event of Python's tells of."""
    add(name, module=module, forward=f"x = x * ({forward} / 1000)", between=_DEEPER)


reading_a_setting("called_by_an_operator", "", "operator.call(sys.getrecursionlimit)")
reading_a_setting("called_by_map", "", "next(iter(list(map(operator.call, [sys.getrecursionlimit]))))")
reading_a_setting("partial_in_c", "limit_@n = functools.partial(sys.getrecursionlimit)", "limit_@n()")
reading_a_setting("wrapper_of_a_method", "", "sys.getrecursionlimit.__call__()")
reading_a_setting(
    "special_method_in_c",
    """
class Limit_@n:
    __call__ = sys.getrecursionlimit

limit_@n = Limit_@n()
""",
    "limit_@n()",
)
#: An object in an object.
_DEEP = """class Deep_@n:
    pass

DEEP_@n = Deep_@n()
DEEP_@n.inner = Deep_@n()
DEEP_@n.inner.scale = 1.0
"""

add(
    "bound_get",
    module="TABLE_@n = {'scale': 1.0}\nget_@n = TABLE_@n.get",
    forward="x = x * get_@n('scale')",
    between="user.module.TABLE_@n['scale'] = @v",
)
add(
    "bound_append",
    module="SEEN_@n = []\nsee_@n = SEEN_@n.append",
    forward="see_@n(1.0)",
    end="user.log.append(len(user.module.SEEN_@n))",
)
add(
    "partial_changed",
    module="scaled_@n = functools.partial(lambda a, x: x * a, 1.0)",
    forward="x = scaled_@n(x)",
    between="user.module.scaled_@n.__setstate__((user.module.scaled_@n.func, (@v,), {}, {}))",
)
add(
    "partial_getattr",
    module=f"{_DEEP}inner_@n = functools.partial(getattr, DEEP_@n, 'inner')",
    forward="x = x * inner_@n().scale",
    between="user.module.DEEP_@n.inner.scale = @v",
)
add(
    "attribute_by_format",
    module=_DEEP,
    forward="x = x * float('{0.inner.scale}'.format(DEEP_@n))",
    between="user.module.DEEP_@n.inner.scale = @v",
)
add(
    "matched_by_position",
    module="""
        class Point_@n:
            __match_args__ = ('a', 'b')

            def __init__(self):
                self.a, self.b = [1.0], 2.0

        POINT_@n = Point_@n()
    """,
    forward="""
        match POINT_@n:
            case Point_@n(p, q):
                x = x * p[0] * q
    """,
    between="user.module.POINT_@n.a[0] = @v",
)
add(
    "dataclass_as_a_tuple",
    module="""
        @dataclasses.dataclass
        class Inner_@n:
            values: list

        INNER_@n = Inner_@n([1.0])
    """,
    forward="x = x * dataclasses.astuple(INNER_@n)[0][0]",
    between="user.module.INNER_@n.values[0] = @v",
)
_EXECUTED = """
TEXT_@n = '''
import itertools
STEPS_@n = itertools.count()
def scaled_@n(x):
    return x * (1 + next(STEPS_@n))
'''
"""
add(
    "text_run_among_a_librarys_names",
    module=_EXECUTED + "exec(TEXT_@n, vars(modeling))",
    forward="x = modeling.scaled_@n(x)",
)
add(
    "text_run_under_a_librarys_file",
    module=_EXECUTED + "exec(compile(TEXT_@n, modeling.__file__, 'exec'), vars(modeling))",
    forward="x = modeling.scaled_@n(x)",
)
