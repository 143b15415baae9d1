"""From a function object to its syntax tree, but only when the tree is what the function executes."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Held while text becomes a tree: CPython 3.11 counts the nesting of trees under construction in one place
#: for all threads, and two at a time fail with a SystemError.
parsing = threading.RLock()
# Held through a fork: one that another thread holds at that moment would never be released in the child.
os.register_at_fork(before=parsing.acquire, after_in_parent=parsing.release, after_in_child=parsing.release)


class SourceUnavailable(Exception):
    """The source of a function cannot be had, or is not what runs. The message says why."""


@dataclass(frozen=True)
class Source:
    """A function's definition as parsed.

    Attributes:
        function: The innermost function, behind any ``functools.wraps`` chain.
        node: Its definition, with line numbers of the file.
    """

    function: types.FunctionType
    node: ast.FunctionDef


def innermost(function: Any) -> types.FunctionType:
    """The plain Python function behind ``function``.

    Types are compared, here and elsewhere in the engine, where ``isinstance`` would believe a proxy:
    wrapt's wrappers say that they are functions, and equal what they wrap.

    Raises:
        SourceUnavailable: It is not a plain function (a builtin, a callable object, another patcher's proxy).
    """
    seen = function
    while hasattr(seen, "__wrapped__"):
        seen = seen.__wrapped__
    if type(seen) is not types.FunctionType:
        raise SourceUnavailable(f"is a {type(seen).__name__}, not a plain function")
    return seen


def wrapper_chain(function: Any) -> list[types.FunctionType]:
    """The functions around the innermost one, outermost first.

    Raises:
        SourceUnavailable: One of them is not a plain function.
    """
    chain: list[types.FunctionType] = []
    while hasattr(function, "__wrapped__"):
        if type(function) is not types.FunctionType:
            raise SourceUnavailable(f"is wrapped by a {type(function).__name__}")
        chain.append(function)
        function = vars(function)["__wrapped__"]
    return chain


def tree_of(text: str) -> ast.Module:
    """The tree of a text, made by one thread at a time.

    Raises:
        SyntaxError: It is no Python.
    """
    with parsing:
        return ast.parse(text)


def parse(function: types.FunctionType) -> Source:
    """Parse a plain function and prove that the text is what it runs.

    ``inspect.getsource`` reads the file as it is now; code that was edited since, or put into the
    function by hand, is found out by compiling the text again and comparing the bytecode.

    Raises:
        SourceUnavailable: No source, not a simple ``def``, or text and bytecode differ.
    """
    return Source(function, _definition(_ById(function.__code__)))


class _ById:
    """A code object as a key: its own comparison ignores the file, and is by value."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.code is other.code


# Of code, not of functions: closures that are made anew each time a model is bound share theirs, and are not
# kept alive by it; a function that was given other code is not taken for what it was.
@functools.lru_cache(maxsize=4096)
def _definition(key: _ById) -> ast.FunctionDef:
    """The definition that the code was compiled from; raises as `parse`."""
    code = key.code
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError) as fault:
        raise SourceUnavailable("has no source text") from fault
    # An indented definition is parsed under an `if`: taking its indentation away would change docstrings.
    is_indented = lines[0][:1].isspace()
    try:
        tree = tree_of(("if True:\n" if is_indented else "") + "".join(lines))
    except SyntaxError as fault:
        raise SourceUnavailable("has source text that does not parse by itself") from fault
    outer = tree.body[0]
    body = outer.body if is_indented and isinstance(outer, ast.If) else tree.body
    node = body[0] if len(body) == 1 else None
    if not isinstance(node, ast.FunctionDef):
        raise SourceUnavailable("is not defined by a plain def statement")
    ast.increment_lineno(tree, first - (2 if is_indented else 1))
    if not _is_what_runs(node, code):
        raise SourceUnavailable("runs code that differs from its source text")
    return node


def _is_what_runs(node: ast.FunctionDef, code: types.CodeType) -> bool:
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "decorator_list": []})
    ast.copy_location(bare, node)
    try:
        rebuilt = compile_in_factory(bare, code, ())
    except (SyntaxError, ValueError, SourceUnavailable):
        return False
    return _same_code(rebuilt, code)


def _same_code(left: types.CodeType, right: types.CodeType) -> bool:
    plain = (
        left.co_code == right.co_code
        and left.co_names == right.co_names
        and left.co_varnames == right.co_varnames
        and left.co_freevars == right.co_freevars
        and len(left.co_consts) == len(right.co_consts)
    )
    return plain and all(
        _same_code(a, b)
        if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
        else _same_constant(a, b)
        for a, b in zip(left.co_consts, right.co_consts, strict=True)
    )


def _same_constant(left: Any, right: Any) -> bool:
    # repr tells 1 from 1.0 and 0.0 from -0.0, which == does not.
    return type(left) is type(right) and repr(left) == repr(right)


def free_cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """The cells of the names that ``function`` has from functions around it."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def is_super(node: ast.AST) -> bool:
    """Whether ``node`` is ``super()``."""
    return (
        isinstance(node, ast.Call)
        and not node.args
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
    )


FACTORY = "__liteboost_factory__"


def compile_in_factory(
    node: ast.FunctionDef, original: types.CodeType, names: tuple[str, ...]
) -> types.CodeType:
    """Compile ``node``, the definition of ``original``, with ``names`` as additional free variables.

    The definition is nested in a factory whose parameters are the function's own free variables
    (``__class__``, for ``super()``) and ``names``. Annotations and defaults are left out: they are
    evaluated at definition and the caller copies them from the original.
    """
    if any(isinstance(child, (ast.Yield, ast.YieldFrom, ast.Await)) for child in ast.walk(node)):
        raise SourceUnavailable("is a generator or a coroutine")
    factory = _factory_tree(node, (*original.co_freevars, *names))
    imports = [ast.Import(names=[ast.alias(name=name)]) for name in _imported_names(original)]
    module = ast.fix_missing_locations(ast.Module(body=[*imports, factory], type_ignores=[]))
    flags = original.co_flags & _future_flags()
    code = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    outer = next(const for const in code.co_consts if isinstance(const, types.CodeType))
    return next(const for const in outer.co_consts if isinstance(const, types.CodeType))


def _imported_names(code: types.CodeType) -> list[str]:
    """Global names of ``code`` that its file imports.

    CPython compiles ``name.attribute()`` differently when ``name`` is imported in the same compilation
    unit, so the unit built here has to import (it is compiled, never executed) the same names.
    """
    imported = _imports_of_file(code.co_filename)
    used = {name for code in nested_codes(code) for name in code.co_names}
    return sorted(used & imported)


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


@functools.lru_cache(maxsize=512)
def _imports_of_file(filename: str) -> frozenset[str]:
    """Names that a file binds by import statements at module level."""
    try:
        tree = tree_of("".join(linecache.getlines(filename)))
    except SyntaxError:
        return frozenset()
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Module, ast.If, ast.Try, ast.With)):
            pending += ast.iter_child_nodes(node)
        elif isinstance(node, ast.ExceptHandler):
            pending += node.body
    return frozenset(names)


@functools.cache
def _future_flags() -> int:
    """Compiler flags of every ``from __future__`` import that a code object can carry."""
    import __future__

    return functools.reduce(
        lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
    )


def _factory_tree(node: ast.FunctionDef, parameters: tuple[str, ...]) -> ast.FunctionDef:
    arguments = node.args
    nothing = ast.Constant(value=None)

    def bare(argument: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(arg=argument.arg), argument)

    inner_arguments = ast.arguments(
        posonlyargs=[bare(a) for a in arguments.posonlyargs],
        args=[bare(a) for a in arguments.args],
        vararg=bare(arguments.vararg) if arguments.vararg else None,
        kwonlyargs=[bare(a) for a in arguments.kwonlyargs],
        kw_defaults=[None if d is None else nothing for d in arguments.kw_defaults],
        kwarg=bare(arguments.kwarg) if arguments.kwarg else None,
        defaults=[nothing for _ in arguments.defaults],
    )
    inner = ast.FunctionDef(
        name=node.name, args=inner_arguments, body=node.body, decorator_list=[], returns=None
    )
    ast.copy_location(inner, node)
    factory = ast.FunctionDef(
        name=FACTORY,
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=name) for name in parameters],
            vararg=None,
            kwonlyargs=[],
            kw_defaults=[],
            kwarg=None,
            defaults=[],
        ),
        body=[inner, ast.Return(value=ast.Name(id=node.name, ctx=ast.Load()))],
        decorator_list=[],
        returns=None,
    )
    if sys.version_info >= (3, 12):
        inner.type_params, factory.type_params = [], []
    return ast.copy_location(factory, node)
