"""A digest of what a function computes: its body, and everything of Python it reaches.

The body is serialised with local names replaced by their order of appearance, without docstring,
annotations and defaults; a global is replaced by what it *is* (a torch function by its full name, a
Python function by its own digest, a constant by its value), a method of ``self`` by the method's
digest. So a renamed variable gives the same digest, and the same text over another ``rotate_half``
gives another.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import source

DIGEST_LENGTH = 16
#: Packages whose functions are named, not looked into: their meaning is their name.
NAMED_PACKAGES = ("torch", "math", "numpy", "builtins", "operator")
#: Constants of torch that are known by how they print.
_NAMED_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MISSING = object()


class Opaque(Exception):
    """The function reaches something whose meaning cannot be established. The message says what."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a computation.

    Attributes:
        digest: Hexadecimal, `DIGEST_LENGTH` characters.
        operations: Names of everything called, operators and control flow, callees included.
    """

    digest: str
    operations: frozenset[str]


def fingerprint(function: Any, owner: type | None = None, instance: Any = None) -> Fingerprint:
    """Fingerprint of a function, or of a method when ``owner`` is the class ``self`` will have.

    With ``instance``, callables it keeps in attributes (an activation chosen in ``__init__``) and the
    types of child modules are part of the digest.

    Raises:
        Opaque: No trustworthy source, or a global whose meaning is unknown.
    """
    # Before the cache: a wrapt proxy has the hash of what it wraps, and equals it.
    if hasattr(function, "__wrapped__"):
        raise Opaque("is wrapped by another function")
    return _fingerprint(function, owner, (), callables(instance))


def behind_wrapper(function: Any) -> tuple[Any, str]:
    """The function that a wrapper does nothing but call, and the digest of the wrapper's text.

    The text says what the wrapper does only together with what it holds: no function may be in its closure
    but the one it wraps. What the text does must be judged by who lists its digest.

    Returns:
        ``function`` itself and an empty digest where it is no such wrapper.
    """
    inner = getattr(function, "__wrapped__", None)
    if type(function) is not types.FunctionType or type(inner) is not types.FunctionType:
        return function, ""
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if any(callable(value) and value is not inner for value in held):
        return function, ""
    try:
        text = source.text_of(function)
    except source.SourceUnavailable:
        return function, ""
    return inner, hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the name is bound later
        return False


def forget() -> None:
    """Read everything again: what a function names may have been exchanged since."""
    _fingerprint.cache_clear()


def callables(instance: Any) -> tuple[tuple[str, str], ...]:
    """(attribute, meaning) of what ``instance`` holds and can call; sizes and flags are no part of it."""
    if instance is None:
        return ()
    held = {**vars(instance), **vars(instance).get("_modules", {})}
    return tuple(
        sorted(
            (name, _describe(v))
            for name, v in held.items()
            if callable(v) and not hasattr(torch.nn.Module, name)
        )
    )


def _describe(value: Any) -> str:
    if isinstance(value, functools.partial):
        keywords = ",".join(f"{key}={item!r}" for key, item in sorted(value.keywords.items()))
        return f"partial({_describe(value.func)},{value.args!r},{keywords})"
    if isinstance(value, types.MethodType):
        try:
            owner: type = type(value.__self__)
            return f"method<{_fingerprint(value.__func__, owner, (), ()).digest}>"
        except Opaque:
            return f"opaque {value!r}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is None:  # a child module or another callable object: its type is its meaning
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{(getattr(value, '__module__', None) or 'builtins')}.{name}"


@functools.lru_cache(maxsize=8192)
def _fingerprint(
    function: Any, owner: type | None, path: tuple[Any, ...], held: tuple[tuple[str, str], ...]
) -> Fingerprint:
    if hasattr(function, "__wrapped__"):
        raise Opaque("is wrapped by another function")
    try:
        parsed = source.parse(source.innermost(function))
    except source.SourceUnavailable as fault:
        raise Opaque(str(fault)) from fault
    if function in path:
        return Fingerprint("recursion", frozenset({"recursion"}))
    writer = _Writer(parsed, owner, (*path, function), dict(held))
    text = writer.write()
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
    return Fingerprint(digest, frozenset(writer.operations))


@dataclass
class _Writer:
    """Serialises one definition. Own format: ``ast.dump`` and ``ast.unparse`` change between Pythons."""

    parsed: source.Source
    owner: type | None
    path: tuple[Any, ...]
    held: dict[str, str]
    operations: set[str] = field(default_factory=set)
    locals: dict[str, str] = field(default_factory=dict)
    in_index: bool = False

    def write(self) -> str:
        node = self.parsed.node
        arguments = node.args
        everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        everything += [a for a in (arguments.vararg, arguments.kwarg) if a]
        for argument in everything:
            self._local(argument.arg)
        code = self.parsed.function.__code__
        for name in (*code.co_varnames, *code.co_cellvars, *_comprehension_names(node, code)):
            self.locals.setdefault(name, "")
        body = node.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        # A callee's defaults are part of what it computes; those of the function itself are passed on.
        defaults = repr(self.parsed.function.__defaults__) if len(self.path) > 1 else ""
        star = f"{len(arguments.args)},{bool(arguments.vararg)}"
        star += f",{len(arguments.kwonlyargs)},{bool(arguments.kwarg)}"
        return f"def({star}{defaults})[{';'.join(self._node(child) for child in body)}]"

    def _local(self, name: str) -> str:
        if not self.locals.get(name):
            self.locals[name] = f"v{sum(1 for value in self.locals.values() if value)}"
        return self.locals[name]

    def _node(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{','.join(self._node(child) for child in node)}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        special = getattr(self, f"_{type(node).__name__}", None)
        return special(node) if special else self._plain(node)

    def _plain(self, node: ast.AST) -> str:
        name = type(node).__name__
        if isinstance(node, (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.stmt)) or name in _CONTROL:
            if not isinstance(node, (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)):
                self.operations.add(name)
        parts = [
            f"{key}={self._node(value)}"
            for key, value in ast.iter_fields(node)
            if value not in (None, []) and key not in _SKIPPED
        ]
        return f"{name}({','.join(parts)})"

    def _Constant(self, node: ast.Constant) -> str:
        return f"const {type(node.value).__name__} {node.value!r}"

    def _AnnAssign(self, node: ast.AnnAssign) -> str:
        return f"Assign(targets=[{self._node(node.target)}],value={self._node(node.value)})"

    def _Call(self, node: ast.Call) -> str:
        if isinstance(node.func, ast.Attribute) and self._global_chain(node.func) is _MISSING:
            self.operations.add(node.func.attr)
        return self._plain(node)

    def _Name(self, node: ast.Name) -> str:
        if node.id in self.locals:
            return self._local(node.id)
        return self._meaning(self._global(node.id), node.id)

    def _Attribute(self, node: ast.Attribute) -> str:
        value = self._global_chain(node)
        if value is not _MISSING:
            return self._meaning(value, ast.unparse(node))
        if self.owner is not None and self._is_super(node.value):
            return f"super.{node.attr}{self._inherited(self.owner, node.attr)}"
        if self.owner is not None and self._is_self(node.value):
            return f"self.{node.attr}{self._method(self.owner, node.attr)}"
        # A size may choose elements; a size that enters the arithmetic is an operation to account for.
        if not (self.in_index and node.attr == "shape"):
            self.operations.add(node.attr)
        return f"{self._node(node.value)}.{node.attr}"

    def _Subscript(self, node: ast.Subscript) -> str:
        value = self._node(node.value)
        outer, self.in_index = self.in_index, True
        index = self._node(node.slice)
        self.in_index = outer
        return f"Subscript(value={value},slice={index})"

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and self.locals.get(node.id) == "v0"

    def _is_super(self, node: ast.AST) -> bool:
        return source.is_super(node) and "super" not in self.locals

    def _inherited(self, owner: type, name: str) -> str:
        """The digest of the method that ``super()`` finds for an instance of ``owner``."""
        line, writer = owner.__mro__, self._global("__class__")
        classes = line[line.index(writer) + 1 :] if writer in line else ()
        found = next((vars(cls)[name] for cls in classes if name in vars(cls)), _MISSING)
        if type(found) is not types.FunctionType:
            raise Opaque(f"uses super().{name}, which is no plain method")
        return self._callee(found, owner, name)

    def _method(self, owner: type, name: str) -> str:
        """The digest of a method of ``owner``, or nothing for an attribute of the instance."""
        if name in self.held:  # an attribute of the instance comes before a method of its class
            self.operations.add(f"self.{name}")
            return f"<{self.held[name]}>"
        found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), _MISSING)
        if isinstance(found, staticmethod):
            return self._callee(found.__func__, None, name)
        if type(found) is types.FunctionType:
            return self._callee(found, owner, name)
        if found is _MISSING or isinstance(found, (int, float, str, bool, type(None))):
            self.operations.add(f"self.{name}")
            return "" if found is _MISSING else f"={found!r}"
        raise Opaque(f"uses self.{name}, a {type(found).__name__} of the class")

    def _callee(self, function: Callable[..., Any], owner: type | None, name: str) -> str:
        try:
            inner = _fingerprint(
                function, owner, self.path, tuple(sorted(self.held.items())) if owner else ()
            )
        except Opaque as fault:
            raise Opaque(f"calls {name}, which {fault}") from fault
        self.operations |= inner.operations
        return f"<{inner.digest}>"

    def _global(self, name: str) -> Any:
        function = self.parsed.function
        cell = source.free_cells(function).get(name)
        if cell is not None:
            return cell.cell_contents
        if name in function.__globals__:
            return function.__globals__[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise Opaque(f"uses the name {name}, which is not defined")

    def _root(self, dotted: str) -> str:
        """The package a C function was reached through; it carries no module name of its own."""
        first = self._global(dotted.split(".")[0])
        return first.__name__.split(".")[0] if isinstance(first, types.ModuleType) else "builtins"

    def _global_chain(self, node: ast.AST) -> Any:
        """The object a dotted name rooted in a global module stands for, else `_MISSING`."""
        if isinstance(node, ast.Name):
            return _MISSING if node.id in self.locals else self._global(node.id)
        if isinstance(node, ast.Attribute):
            base = self._global_chain(node.value)
            if isinstance(base, (types.ModuleType, type)):
                return getattr(base, node.attr, _MISSING)
        return _MISSING

    def _meaning(self, value: Any, name: str) -> str:
        if value is super:
            raise Opaque("uses super() otherwise than to call a method")
        if isinstance(value, (bool, int, float, str, type(None))):
            return f"const {type(value).__name__} {value!r}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        label = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(value, _NAMED_CONSTANTS):
            label = repr(value)
        package = (getattr(value, "__module__", None) or type(value).__module__).split(".")[0]
        if label and (package in NAMED_PACKAGES or isinstance(value, types.BuiltinFunctionType)):
            label = label.split(".")[-1]
            self.operations.add(label)
            root = package if package != "builtins" else self._root(name)
            return f"named {root}.{label}"
        if type(value) is types.FunctionType:
            return f"fn{self._callee(value, None, name)}"
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, dict) and type(value) is not dict:
            # A table with a class of its own (ACT2FN): named, like the functions of named packages.
            return f"table {type(value).__module__}.{type(value).__qualname__}"
        raise Opaque(f"uses the global {name}, a {type(value).__name__}")


def _comprehension_names(node: ast.AST, code: types.CodeType) -> list[str]:
    """Names that comprehensions bind, which up to Python 3.11 are variables of a function of their own."""
    if _ARE_FUNCTIONS and not any(nested.co_name in _COMPREHENSIONS for nested in source.nested_codes(code)):
        return []
    bound = {
        name.id
        for child in ast.walk(node)
        if isinstance(child, ast.comprehension)
        for name in ast.walk(child.target)
        if isinstance(name, ast.Name)
    }
    shadowed = bound.intersection(code.co_names)
    if shadowed:
        raise Opaque(f"uses the name {min(shadowed)} inside a comprehension and for something else")
    return sorted(bound)


#: What Python calls the functions that it makes of them.
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_ARE_FUNCTIONS = sys.version_info < (3, 12)
_SKIPPED = ("annotation", "returns", "type_comment", "decorator_list", "ctx", "kind", "simple", "type_params")
_CONTROL = ("IfExp", "Lambda", "ListComp", "GeneratorExp", "DictComp", "SetComp", "Compare", "Starred")
