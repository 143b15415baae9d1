"""From a function object to its syntax tree, but only when the tree is what the function executes."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import re
import sys
import textwrap
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
    found = _definition(ById(function.__code__))
    if isinstance(found, str):
        raise SourceUnavailable(found)
    return Source(function, found.node)


def text_of(function: types.FunctionType) -> str:
    """What `parse` has proved to be the text of what runs, from the left margin, without blanks behind it.

    Raises:
        SourceUnavailable: As `parse`.
    """
    found = _definition(ById(function.__code__))
    if isinstance(found, str):
        raise SourceUnavailable(found)
    return textwrap.dedent(found.text).rstrip() + "\n"


class ById:
    """A code object as a key: its own comparison ignores the file, is by value, and takes long."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.code is other.code


@dataclass(frozen=True)
class _Definition:
    """A definition, and the lines of its file that it was parsed from."""

    node: ast.FunctionDef
    text: str


_DOES_NOT_PARSE = "has source text that does not parse by itself"


# Of code, not of functions: closures that are made anew each time a model is bound share theirs, and are not
# kept alive by it; a function that was given other code is not taken for what it was.
@functools.lru_cache(maxsize=4096)
def _definition(key: ById) -> _Definition | str:
    """The definition that the code was compiled from, or why it cannot be had."""
    code = key.code
    lines, first = _lines_by_indentation(code), code.co_firstlineno
    # A text that ends too early, in a bracket or a string whose lines begin further left, does not parse.
    found = _proved(lines, first, code) if lines else _DOES_NOT_PARSE
    if found != _DOES_NOT_PARSE:
        return found
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return "has no source text"
    return _proved(lines, first, code)


def _lines_by_indentation(code: types.CodeType) -> list[str]:
    """The lines from where ``code`` begins to where its indentation ends, or none if they do not begin so.

    ``inspect`` tokenizes them and looks for their module, which takes longer than to compile them.
    """
    linecache.checkcache(code.co_filename)
    lines, first = linecache.getlines(code.co_filename), code.co_firstlineno - 1
    if first >= len(lines) or not lines[first].lstrip().startswith(("def ", "@")):
        return []
    indentation = _indentation(lines[first])
    # Behind the last line that does something: before it a bracket may close at the first indentation.
    end = max(line for each in nested_codes(code) for _, _, line in each.co_lines() if line is not None)
    while end < len(lines) and (not lines[end].strip() or _indentation(lines[end]) > indentation):
        end += 1
    return lines[first:end]


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _proved(lines: list[str], first: int, code: types.CodeType) -> _Definition | str:
    """The definition in ``lines``, of which the file has ``first - 1`` before it, or why not."""
    # An indented definition is parsed under an `if`: taking its indentation away would change docstrings.
    is_indented = lines[0][:1].isspace()
    before = "\n" * (first - 2) + "if True:\n" if is_indented else "\n" * (first - 1)
    try:
        tree = tree_of(before + "".join(lines))
    except SyntaxError:
        return _DOES_NOT_PARSE
    outer = tree.body[0]
    body = outer.body if is_indented and isinstance(outer, ast.If) else tree.body
    node = body[0] if len(body) == 1 else None
    if not isinstance(node, ast.FunctionDef):
        return "is not defined by a plain def statement"
    if not _is_what_runs(node, code):
        return "runs code that differs from its source text"
    return _Definition(node, "".join(lines))


def _is_what_runs(node: ast.FunctionDef, code: types.CodeType) -> bool:
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "decorator_list": []})
    ast.copy_location(bare, node)
    try:
        for imported in (_names_behind_import, _imports_of_file):
            rebuilt = compile_in_factory(bare, code, (), imported(code.co_filename))
            if _same_code(rebuilt, code):
                return True
            if rebuilt.co_freevars != code.co_freevars or rebuilt.co_varnames != code.co_varnames:
                return False  # no import makes these others
    except (SyntaxError, ValueError, SourceUnavailable):
        pass
    return False


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
    node: ast.FunctionDef,
    original: types.CodeType,
    names: tuple[str, ...],
    imported: frozenset[str] | None = None,
) -> types.CodeType:
    """Compile ``node``, the definition of ``original``, with ``names`` as additional free variables.

    The definition is nested in a factory whose parameters are the function's own free variables
    (``__class__``, for ``super()``) and ``names``. Annotations and defaults are left out: they are
    evaluated at definition and the caller copies them from the original.

    Args:
        imported: Names that the file imports; what it seems to import if not given. It decides how a call of
            an attribute of them is compiled, and not what it does.
    """
    if any(map(_yields, nested_codes(original))):
        raise SourceUnavailable("is a generator or a coroutine")
    if imported is None:
        imported = _names_behind_import(original.co_filename)
    factory = _factory_tree(node, (*original.co_freevars, *names))
    imports = [ast.Import(names=[ast.alias(name=name)]) for name in _names_used(original, imported)]
    module = ast.Module(body=[*imports, factory], type_ignores=[])
    for each in imports:
        ast.fix_missing_locations(each)
    flags = original.co_flags & _future_flags()
    code = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    outer = next(const for const in code.co_consts if isinstance(const, types.CodeType))
    return next(const for const in outer.co_consts if isinstance(const, types.CodeType))


def _yields(code: types.CodeType) -> bool:
    """Whether it is a generator or a coroutine, other than a generator expression."""
    kinds = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return bool(code.co_flags & kinds) and code.co_name != "<genexpr>"


def _names_used(code: types.CodeType, imported: frozenset[str]) -> list[str]:
    """Global names of ``code`` that its file imports.

    CPython compiles ``name.attribute()`` differently when ``name`` is imported in the same compilation
    unit, so the unit built here has to import (it is compiled, never executed) the same names.
    """
    used = {name for code in nested_codes(code) for name in code.co_names}
    return sorted(used & imported)


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


_IMPORT = re.compile(r"import[ \t]+(\([^)]*\)|[^\n#;]*)")


@functools.lru_cache(maxsize=512)
def _names_behind_import(filename: str) -> frozenset[str]:
    """What a file seems to import, in functions, too: a hundredth of the time of `_imports_of_file`."""
    found = set()
    for each in _IMPORT.finditer("".join(linecache.getlines(filename))):
        for part in re.sub(r"#.*", "", each[1]).strip("()").split(","):
            words = part.split()
            found.update(words[-1:] if len(words) > 1 else [word.split(".")[0] for word in words])
    return frozenset(found)


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
    inner = ast.FunctionDef(name=node.name, args=inner_arguments, body=[], decorator_list=[], returns=None)
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
    ast.fix_missing_locations(ast.copy_location(factory, node))
    inner.body = node.body  # which has locations
    return factory
