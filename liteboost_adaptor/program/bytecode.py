"""Read the bytecode of a function: which names it uses, and whether it does what guards cannot see."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from dataclasses import dataclass

#: Instructions that read arguments, locals, globals, cells, attributes and items, compute with them, or call.
#: What they change is compared before and behind the step (`state`). Every other instruction is refused.
_KNOWN = re.compile(
    r"""
    CACHE|RESUME\w*|NOP|NOT_TAKEN|EXTENDED_ARG|INTERPRETER_EXIT|PRECALL|KW_NAMES|PUSH_NULL|COPY|SWAP|POP_\w+|END_\w+
    |LOAD_(?!NAME|BUILD_CLASS|LOCALS|FROM_DICT\w*)\w+|STORE_(?:FAST\w*|ATTR|SUBSCR|SLICE|DEREF)
    |DELETE_(?:FAST|ATTR|SUBSCR)|BINARY_\w+|UNARY_\w+|COMPARE_OP|IS_OP|CONTAINS_OP|TO_BOOL|BUILD_\w+|LIST_\w+
    |SET_(?:ADD|UPDATE|FUNCTION_ATTRIBUTE)|DICT_\w+|MAP_ADD|FORMAT_\w+|CONVERT_VALUE|UNPACK_\w+|CALL\w*
    |JUMP\w*|FOR_ITER|GET_(?:ITER|LEN|YIELD_FROM_ITER)|RETURN_\w+|YIELD_VALUE|SEND|RAISE_VARARGS|RERAISE|RETURN_GENERATOR|GEN_START
    |MAKE_(?:FUNCTION|CELL)|COPY_FREE_VARS|BEFORE_WITH|WITH_EXCEPT_START|PUSH_EXC_INFO|CHECK_EXC_MATCH
    |MATCH_\w+|CALL_INTRINSIC_1|STOPITERATION_ERROR
    """,
    re.VERBOSE,
)
#: By these a function gets at attributes under names that are not among its own.
_BY_ANY_NAME = frozenset(
    {
        *("getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "dir"),
        *("asdict", "astuple"),
    }
)


@dataclass(frozen=True)
class Names:
    """What a function names.

    Attributes:
        globals: Names it looks up in its module, or among builtins.
        all: These and the names of attributes, and every string it holds.
        handed_on: Those of `all` that it does not only call, there and then.
        is_open: Whether it may use others, which it computes.
    """

    globals: frozenset[str]
    all: frozenset[str]
    handed_on: frozenset[str]
    is_open: bool


@functools.lru_cache(maxsize=8192)
def names_of(code: types.CodeType) -> Names:
    """The names that ``code`` itself uses; not those of functions it defines, which run as their own."""
    names = code.co_names
    found, handed_on, extended = set(), set(), 0
    is_open = not _BY_ANY_NAME.isdisjoint(names)
    for at in range(0, len(code.co_code), 2):
        operation, argument = code.co_code[at], code.co_code[at + 1] | extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _GLOBAL:
            is_loaded = operation == _LOAD_GLOBAL
            name = names[argument >> _GLOBAL_SHIFT if is_loaded else argument]
            found.add(name)
            if not (is_loaded and argument & 1):
                handed_on.add(name)
        elif operation == _LOAD_ATTR and not (_SHARES_METHODS and argument & 1):
            handed_on.add(names[argument >> _ATTRIBUTE_SHIFT])
        elif operation == _MATCH_CLASS and argument:
            is_open = True  # by position: the class says what they are called
    strings = {text for value in code.co_consts for text in _strings(value)}
    fields = {name for text in strings if "{" in text for name in _NAME.findall(text)}
    everything = frozenset(names) | strings | fields
    return Names(frozenset(found), everything, frozenset(handed_on) | strings | fields, is_open)


_NAME = re.compile(r"[^\W\d]\w*")
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_LOAD_ATTR = dis.opmap["LOAD_ATTR"]
#: Since 3.12 one instruction loads attributes and methods, and its lowest bit says which.
_SHARES_METHODS = sys.version_info >= (3, 12)
_ATTRIBUTE_SHIFT = 1 if _SHARES_METHODS else 0
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_GLOBAL = {dis.opmap[name] for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")}
#: Since 3.11 its lowest bit says whether a call follows.
_GLOBAL_SHIFT = 1


def _strings(value: object) -> tuple[str, ...]:
    if type(value) is str:
        return (value,)
    # Of no subclass: those may give other things than they hold.
    if isinstance(value, tuple | frozenset) and type(value) in (tuple, frozenset):
        return tuple(text for each in value for text in _strings(each))
    return ()


@functools.lru_cache(maxsize=8192)
def fault_of(code: types.CodeType) -> str:
    """What ``code`` does that no guard can see, with its line, or an empty string."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.positions.lineno if step.positions and step.positions.lineno else line
        name = step.opname
        if name in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars:
            return _fault(code, line, f"assigns {step.argval} of the function around it")
        if not _KNOWN.fullmatch(name):
            return _fault(code, line, f"{_WORDS.get(name, name)} {step.argval or ''}".strip())
    return ""


def _fault(code: types.CodeType, line: int, what: str) -> str:
    return f"{code.co_qualname}, line {line}: {what}"


#: For the commonest of those that are refused.
_WORDS = {
    "STORE_GLOBAL": "assigns the global",
    "DELETE_GLOBAL": "deletes the global",
    "IMPORT_NAME": "imports",
    "LOAD_BUILD_CLASS": "defines a class",
    "GET_AWAITABLE": "awaits",
}
