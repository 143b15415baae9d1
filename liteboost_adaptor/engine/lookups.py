"""What a function looks up by name when it runs, as its bytecode says.

Bytecode is what runs: no text has to be found, parsed and proved to be the same.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from dataclasses import dataclass, field

from .source import ById


@dataclass(frozen=True)
class Lookups:
    """What one function, with the functions it defines, looks up; each once, in order of discovery.

    Attributes:
        operators: Methods by which Python does operators, such as ``__add__`` and ``__radd__``.
        paths: Names that are no locals, each with the attributes that are asked of it: ``("torch", "nn")``.
        of_first: Attributes of the first parameter: of ``self``, in a method.
        of_super: Attributes of ``super()``.
        of_values: Attributes of anything else.
    """

    operators: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    of_first: tuple[str, ...]
    of_super: tuple[str, ...]
    of_values: tuple[str, ...]


def lookups(code: types.CodeType) -> Lookups:
    """What ``code`` looks up."""
    return _lookups(ById(code))


@functools.lru_cache(maxsize=8192)
def _lookups(key: ById) -> Lookups:
    code = key.code
    reader = _Reader()
    reader.read(code, code.co_varnames[0] if code.co_argcount else "", frozenset(code.co_freevars))
    return Lookups(
        tuple(reader.operators),
        tuple(reader.paths),
        *(tuple(reader.attributes[kind]) for kind in (_FIRST, _SUPER, _VALUE)),
    )


#: On top of the stack: the first parameter, what ``super()`` gives, anything else. A tuple is a path.
_FIRST, _SUPER, _VALUE = "first", "super", "value"
_Top = str | tuple[str, ...]


@dataclass
class _Reader:
    """Follows what is on top of the stack from one instruction to the next."""

    operators: dict[str, None] = field(default_factory=dict)
    paths: dict[tuple[str, ...], None] = field(default_factory=dict)
    attributes: dict[str, dict[str, None]] = field(
        default_factory=lambda: {_FIRST: {}, _SUPER: {}, _VALUE: {}}
    )

    def read(self, code: types.CodeType, first: str, free: frozenset[str]) -> None:
        """Read ``code`` and what it defines.

        Args:
            first: The first parameter of the outermost function, where ``code`` has it.
            free: Names that ``code`` has from functions around the outermost one.
        """
        top: _Top = _VALUE
        joins: set[int] = set()
        names, variables = code.co_names, _variables(code)
        arguments, extended, jump = code.co_code[1::2], 0, 0
        # Thousands for a first model: what is asked of most of them is one look at a table.
        for at, operation in enumerate(code.co_code[::2]):
            kind = _KINDS[operation]
            if kind == _CACHE:
                continue
            if jump and not extended:
                joins.add(at + jump)
                jump = 0
            if top is not _VALUE and at in joins:  # what is on top may come from elsewhere, too
                top = self._end(top)
            argument = arguments[at] | extended
            extended = argument << 8 if kind == _EXTENDED else 0
            if kind == _EXTENDED or kind == _TRANSPARENT:
                continue
            if kind == _ATTRIBUTE:
                top = self._attribute(top, names[argument >> _ATTRIBUTES[operation]])
                continue
            if top is not _VALUE:
                if kind == _CALL and top == ("super",) and not argument:
                    top = _SUPER
                    continue
                top = self._end(top)
            if kind == _LOCAL:
                if variables[argument & _LOCALS[operation]] == first:
                    top = _FIRST
            elif kind == _NAME:
                top = (names[argument >> _NAMES[operation]],)
            elif kind == _CELL:
                name = variables[argument]
                top = (name,) if name in free else _FIRST if name == first else _VALUE
            elif kind == _OPERATOR:
                self._operator(operation, argument)
            elif kind == _OF_SUPER:
                self.attributes[_VALUE if argument & 2 else _SUPER][names[argument >> 2]] = None
            elif kind == _JUMP:
                jump = argument
        self._end(top)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                around = constant.co_freevars
                self.read(constant, first if first in around else "", free.intersection(around))

    def _end(self, top: _Top) -> _Top:
        """Nothing more is asked of ``top``."""
        if isinstance(top, tuple):
            self.paths[top] = None
        return _VALUE

    def _attribute(self, top: _Top, name: str) -> _Top:
        if isinstance(top, tuple):
            return (*top, name)
        self.attributes[top][name] = None
        return _VALUE

    def _operator(self, operation: int, argument: int) -> None:
        if operation == _BINARY_OP:
            made = _BINARY[argument]
        elif operation == _COMPARE_OP:
            made = (_COMPARISONS[argument >> _COMPARE_SHIFT],)
        elif operation == _CALL_INTRINSIC:
            made = ("__pos__",) if argument == _UNARY_POSITIVE else ()
        else:
            made = _OPERATORS.get(operation, ())
        self.operators.update(dict.fromkeys(made))


def _variables(code: types.CodeType) -> tuple[str, ...]:
    """Names of locals and cells as instructions count them: a parameter that is a cell, too, comes once."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return (*code.co_varnames, *cells, *code.co_freevars)


def _operations(**named: int) -> dict[int, int]:
    """Those of ``named`` that this Python has, by number."""
    return {dis.opmap[name]: value for name, value in named.items() if name in dis.opmap}


_BINARY_OP, _COMPARE_OP = dis.opmap["BINARY_OP"], dis.opmap["COMPARE_OP"]
_CALL_INTRINSIC, _UNARY_POSITIVE = dis.opmap.get("CALL_INTRINSIC_1", -1), 5
#: By how much an instruction's argument is shifted to be the number of a name. Since 3.12 the lowest bit of
#: an attribute's says whether it is called.
_ATTRIBUTES = _operations(LOAD_ATTR=int(sys.version_info >= (3, 12)), STORE_ATTR=0, DELETE_ATTR=0)
if sys.version_info < (3, 12):
    _ATTRIBUTES[dis.opmap["LOAD_METHOD"]] = 0
_NAMES = _operations(LOAD_GLOBAL=1, LOAD_NAME=0, STORE_GLOBAL=0, DELETE_GLOBAL=0, LOAD_FROM_DICT_OR_GLOBALS=0)
_CELLS = _operations(
    LOAD_DEREF=0, LOAD_CLASSDEREF=0, LOAD_FROM_DICT_OR_DEREF=0, STORE_DEREF=0, DELETE_DEREF=0
)
#: Which bits of the argument say what is on top afterwards. Since 3.13 one instruction may load two.
_LOCALS = _operations(
    LOAD_FAST=-1,
    LOAD_FAST_CHECK=-1,
    LOAD_FAST_BORROW=-1,
    LOAD_FAST_LOAD_FAST=15,
    STORE_FAST_LOAD_FAST=15,
    LOAD_FAST_BORROW_LOAD_FAST_BORROW=15,
)
#: They leave what is on top there, or its copy.
_COPIES = _operations(NOP=0, PRECALL=0, COPY=0, NOT_TAKEN=0, PUSH_NULL=0)
#: As ``dis.cmp_op`` has them.
_COMPARISONS = ("__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__")
_COMPARE_SHIFT = {(3, 11): 0, (3, 12): 4}.get(sys.version_info[:2], 5)
_ARITHMETIC = {
    **{"ADD": "add", "SUBTRACT": "sub", "MULTIPLY": "mul", "TRUE_DIVIDE": "truediv", "REMAINDER": "mod"},
    **{"FLOOR_DIVIDE": "floordiv", "POWER": "pow", "MATRIX_MULTIPLY": "matmul"},
    **{"LSHIFT": "lshift", "RSHIFT": "rshift", "OR": "or", "XOR": "xor", "AND": "and"},
}


def _binary(operation: str) -> tuple[str, ...]:
    """The methods that Python asks for ``NB_ADD`` and the like."""
    words = operation.removeprefix("NB_").removeprefix("INPLACE_")
    if words not in _ARITHMETIC:
        return ("__getitem__",)  # since 3.14 an operation among the others
    name = _ARITHMETIC[words]
    in_place = (f"__i{name}__",) if "INPLACE_" in operation else ()
    return (*in_place, f"__{name}__", f"__r{name}__")


_BINARY = [_binary(name) for name, _ in dis._nb_ops]  # type: ignore[attr-defined] # not in typeshed
_OPERATORS: dict[int, tuple[str, ...]] = {
    dis.opmap[name]: methods
    for name, methods in {
        "UNARY_NEGATIVE": ("__neg__",),
        "UNARY_POSITIVE": ("__pos__",),
        "UNARY_INVERT": ("__invert__",),
        "BINARY_SUBSCR": ("__getitem__",),
        "BINARY_SLICE": ("__getitem__",),
        "STORE_SUBSCR": ("__setitem__",),
        "STORE_SLICE": ("__setitem__",),
        "DELETE_SUBSCR": ("__delitem__",),
    }.items()
    if name in dis.opmap
}
#: What an operation is, by number. A cache is no instruction: others have some behind them.
_OTHER, _CACHE, _EXTENDED, _TRANSPARENT, _ATTRIBUTE, _CALL, _LOCAL, _NAME, _CELL = range(9)
_OPERATOR, _OF_SUPER, _JUMP = range(9, 12)
_KINDS = [_OTHER] * 256
for _kind, _of_kind in (
    (_JUMP, dis.hasjrel),
    (_CACHE, _operations(CACHE=0)),
    (_EXTENDED, _operations(EXTENDED_ARG=0)),
    (_TRANSPARENT, _COPIES),
    (_ATTRIBUTE, _ATTRIBUTES),
    (_CALL, _operations(CALL=0)),
    (_LOCAL, _LOCALS),
    (_NAME, _NAMES),
    (_CELL, _CELLS),
    # All that tensors have methods for.
    (_OPERATOR, {*_OPERATORS, _BINARY_OP, _COMPARE_OP, _CALL_INTRINSIC}),
    (_OF_SUPER, _operations(LOAD_SUPER_ATTR=0)),
):
    for _operation in _of_kind:
        if 0 <= _operation < len(_KINDS):  # a number beyond is no instruction that is in bytecode
            _KINDS[_operation] = _kind
