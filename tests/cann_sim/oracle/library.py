"""What the unit tests take from C++'s library, for `Interpreter`; the test framework's part is in `bench`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import bench
from .bench import Bench
from .syntax import NUMBERS, Node, Type
from .tokens import Unreadable
from .values import Iterator, Opaque, Stream, Struct, Symbol, Vector, copied

if TYPE_CHECKING:
    from .expressions import Expressions, Scope

__all__ = ["Bench"]

SEQUENCES = {"vector", "array", "initializer_list", "list", "deque", "set", "unordered_set"}
_MAPS = {"map", "unordered_map"}
_POINTERS = {"char", "auto"}
#: types that a list in braces initializes
BRACED = {
    "StorageShape",
    "Shape",
    "TensorDesc",
    "TensorListDesc",
    "ScalarDesc",
    "IntArrayDesc",
    "string",
} | _MAPS
#: namespaces whose functions are never those of the file
SPACES = {"std", "ut", "ut_str", "ge", "gert", "op"}


def elements(value: Any) -> Any:
    """What a range-for goes over, or an index counts."""
    if isinstance(value, dict):
        return [Vector([key, one]) for key, one in value.items()]
    if isinstance(value, Vector | str):
        return value
    raise Unreadable(f"the elements of {value!r:.40}")


def construct(run: Expressions, of: Type, arguments: list[Any]) -> Any:
    """A value of a type that the file does not define."""
    if of.name in SEQUENCES:
        return _sequence(run, of, arguments)
    if of.name in _MAPS:
        first = arguments[0] if len(arguments) == 1 else None
        entries = first if isinstance(first, dict) or (first and isinstance(first[0], Vector)) else arguments
        return copied(entries) if isinstance(entries, dict) else {one[0]: one[1] for one in entries}
    if of.name in NUMBERS or of.name in _POINTERS:
        return arguments[0] if arguments else 0
    if of.name == "string":
        return arguments[0] if arguments and isinstance(arguments[0], str | Opaque) else ""
    if of.name in ("pair", "tuple"):
        return Vector(arguments)
    if of.name in ("ifstream", "fstream"):
        return Stream(run.bench.read(_file_name(arguments[0])))
    if of.name in ("stringstream", "istringstream"):
        return Stream(str(arguments[0]) if arguments else "")
    made = bench.construct(run.bench, of, arguments)
    return Opaque(of.name, tuple(arguments)) if made is None else made


def _file_name(value: Any) -> str:
    """Of a table, in a path that is only known where the test is built."""
    if isinstance(value, Opaque):
        return next((name for part in value.parts if (name := _file_name(part))), "")
    return value if isinstance(value, str) and value.endswith(".csv") else ""


def _sequence(run: Expressions, of: Type, arguments: list[Any]) -> Vector:
    made = Vector()
    made.of = of.arguments[0] if of.arguments else None
    if len(arguments) == 1 and isinstance(arguments[0], Vector):
        made.extend(copied(arguments[0]))
    elif len(arguments) == 2 and isinstance(arguments[0], Iterator):
        made.extend(elements(arguments[0].of)[arguments[0].at : arguments[1].at])
    elif arguments and isinstance(arguments[0], int) and len(arguments) <= 2:
        fill = arguments[1] if len(arguments) == 2 else (run.construct(made.of, []) if made.of else 0)
        made.extend(copied(fill) for _ in range(arguments[0]))
    elif arguments:
        raise Unreadable(f"a {of.name} made of {arguments!r:.40}")
    elif of.name == "array" and len(of.arguments) == 2 and made.of:
        count = (
            run.evaluate(("name", of.arguments[1].name, (), ""), run.globals)
            if not of.arguments[1].name.isdigit()
            else 0
        )
        made.extend(run.construct(made.of, []) for _ in range(count or int(of.arguments[1].name)))
    return Vector(made) if made.of is None else made


_CONSTANTS = {
    "ACL_SUCCESS": 0, "ACLNN_SUCCESS": 0, "INT64_MAX": 2**63 - 1, "INT32_MAX": 2**31 - 1,
    "INT_MAX": 2**31 - 1,
    "KEEP_DTYPE": 0, "ALLOW_FP32_DOWN_PRECISION": 1, "USE_FP16": 2, "USE_HF32": 3,
    "FORCE_GRP_ACC_FOR_FP32": 4, "USE_FP32_ADD": 4,
    "npos": -1,
}  # fmt: skip
_SYMBOL = re.compile(r"(ACL|ACLNN|DT|FORMAT|GRAPH|ASCEND|DAV)_?\w*\Z")


def constant(name: str, of: Bench) -> Any:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name == "__FILE__":
        return of.path
    return Symbol(name) if _SYMBOL.match(name) else Opaque(name)


# ---- members -------------------------------------------------------------------------------------
def attribute(of: Any, name: str) -> Any:
    if isinstance(of, Struct):
        if name in of.fields:
            return of.fields[name]
        raise Unreadable(f"{of.name} has no field {name}")
    if isinstance(of, Vector) and name in ("first", "second"):
        return of[name == "second"]
    if isinstance(of, Iterator) and name in ("first", "second"):
        return elements(of.of)[of.at][name == "second"]
    return bench.attribute(of, name)


def set_attribute(of: Any, name: str, value: Any) -> None:
    if isinstance(of, Struct):
        before = of.fields.get(name)
        if isinstance(before, Vector) and isinstance(value, Vector) and value.of is None:
            value.of = before.of
        of.fields[name] = value
    elif isinstance(of, Vector) and name in ("first", "second"):
        of[name == "second"] = value
    elif not isinstance(of, Opaque):
        raise Unreadable(f"a member {name} of {of!r:.40}")


def replace(target: Any, value: Any) -> None:
    """What an assignment to a returned reference does."""
    if isinstance(target, Vector) and isinstance(value, Vector):
        target[:] = value
    elif not isinstance(target, Opaque):
        raise Unreadable(f"an assignment to {target!r:.40}")


def call_method(run: Expressions, of: Any, name: str, arguments: list[Any]) -> Any:
    if isinstance(of, Vector):
        return _vector_method(run, of, name, arguments)
    if isinstance(of, str) and not isinstance(of, Symbol):
        return _string_method(of, name, arguments)
    if isinstance(of, dict):
        return _map_method(of, name, arguments)
    if isinstance(of, Stream):
        return of.text is not None if name in ("is_open", "good") else None
    return bench.call_method(run.bench, of, name, arguments)


def _vector_method(run: Expressions, of: Vector, name: str, arguments: list[Any]) -> Any:
    if name in ("push_back", "emplace_back", "AppendDim"):
        value = copied(arguments[0]) if len(arguments) == 1 else Vector(copied(one) for one in arguments)
        of.append(run.coerce(of.of, value) if of.of else value)
        return None
    if name in ("size", "GetDimNum", "length"):
        return len(of)
    if name in ("data", "begin", "cbegin"):
        return of if name == "data" else Iterator(of, 0)
    if name in ("end", "cend"):
        return Iterator(of, len(of))
    if name == "empty":
        return not of
    if name in ("back", "front", "at", "GetDim"):
        at = {"back": -1, "front": 0}.get(name, arguments[0] if arguments else 0)
        if not -len(of) <= at < len(of):
            raise Unreadable(f"{name}() of {len(of)} elements")
        return of[at]
    if name == "SetDim":
        of[arguments[0]] = arguments[1]
    elif name in ("resize", "SetDimNum"):
        fill = arguments[1] if len(arguments) > 1 else (run.construct(of.of, []) if of.of else 0)
        of[:] = of[: arguments[0]] + [copied(fill) for _ in range(arguments[0] - len(of))]
    elif name == "clear":
        of.clear()
    elif name == "pop_back":
        of.pop()
    elif name == "insert" and isinstance(arguments[-1], Iterator):
        of[arguments[0].at : arguments[0].at] = elements(arguments[1].of)[arguments[1].at : arguments[2].at]
    elif name == "insert":
        of.insert(arguments[0].at, arguments[1])
    elif name not in ("reserve", "shrink_to_fit"):
        raise Unreadable(f"{name}() of a vector")
    return None


def _string_method(of: str, name: str, arguments: list[Any]) -> Any:
    if name in ("c_str", "data"):
        return of
    if name in ("size", "length"):
        return len(of)
    if name == "empty":
        return not of
    if name == "substr":
        return of[arguments[0] :] if len(arguments) == 1 else of[arguments[0] : arguments[0] + arguments[1]]
    if name == "find":
        return of.find(*arguments)
    if name in ("rfind", "compare"):
        return of.rfind(*arguments) if name == "rfind" else int(of != arguments[0])
    if name in ("find_first_of", "find_last_of"):
        found = [k for k, letter in enumerate(of) if letter in arguments[0]]
        return -1 if not found else found[0 if name == "find_first_of" else -1]
    if name == "replace":
        return of[: arguments[0]] + arguments[2] + of[arguments[0] + arguments[1] :]
    if name in ("back", "front"):
        return of[-1 if name == "back" else 0]
    raise Unreadable(f"{name}() of a string")


def _map_method(of: dict[Any, Any], name: str, arguments: list[Any]) -> Any:
    if name == "find":
        return Iterator(of, list(of).index(arguments[0]) if arguments[0] in of else len(of))
    if name in ("begin", "end"):
        return Iterator(of, 0 if name == "begin" else len(of))
    if name == "at":
        if arguments[0] not in of:
            raise Unreadable(f"a map has no {arguments[0]!r:.40}")
        return of[arguments[0]]
    if name in ("count", "contains"):
        return int(arguments[0] in of)
    if name in ("size", "empty"):
        return len(of) if name == "size" else not of
    if name in ("insert", "emplace"):
        key, value = arguments if len(arguments) == 2 else arguments[0]
        of.setdefault(key, value)
        return None
    raise Unreadable(f"{name}() of a map")


# ---- functions -----------------------------------------------------------------------------------
def _copy(arguments: list[Any]) -> Any:
    first, last, to = arguments
    values = list(elements(first.of)[first.at : last.at])
    to.of[to.at : to.at + len(values)] = values


def _accumulate(arguments: list[Any]) -> Any:
    first, last, start = arguments[:3]
    values = elements(first.of)[first.at : last.at]
    product = len(arguments) > 3 and isinstance(arguments[3], Opaque) and "multiplies" in arguments[3].text
    return start * math.prod(values) if product else sum(values, start)


def _int(arguments: list[Any]) -> Any:
    try:
        return int(arguments[0])
    except (TypeError, ValueError):
        raise Unreadable(f"{arguments[0]!r:.40} is no integer") from None


_FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "ceil": lambda a: math.ceil(a[0]), "floor": lambda a: math.floor(a[0]), "sqrt": lambda a: math.sqrt(a[0]),
    "max": lambda a: max(a) if a else 2**63 - 1, "min": min, "abs": lambda a: abs(a[0]),
    "to_string": lambda a: str(a[0]),
    "move": lambda a: a[0], "forward": lambda a: a[0], "make_tuple": Vector, "make_pair": Vector,
    "tie": Vector,
    "tuple_cat": lambda a: Vector(one for part in a for one in part), "get": lambda a: a[0], "copy": _copy,
    "accumulate": _accumulate, "begin": lambda a: Iterator(a[0], 0), "end": lambda a: Iterator(a[0],
    len(a[0])),
    "stoi": _int, "stol": _int, "stoll": _int, "stoul": _int, "stoull": _int, "atoi": _int,
    "stof": lambda a: float(a[0]),
    "strcasecmp": lambda a: int(a[0].lower() != a[1].lower()), "CeilDiv": lambda a: -(-a[0] // a[1]),
    "CeilAlign": lambda a: -(-a[0] // a[1]) * a[1],
}  # fmt: skip
_CASTS = {"static_cast", "reinterpret_cast", "const_cast", "dynamic_cast"}


def call(run: Expressions, of: Type, arguments: list[Any]) -> Any:
    """A call of, or a value of the type, ``of``."""
    name = of.name
    if name in _CASTS:
        whole = of.arguments and not of.arguments[0].shared and "int" in of.arguments[0].name
        return int(arguments[0]) if whole and isinstance(arguments[0], float) else arguments[0]
    if name == "get" and of.arguments and of.arguments[0].name.isdigit():
        return arguments[0][int(of.arguments[0].name)]
    if name in _FUNCTIONS:
        if any(isinstance(one, Opaque) for one in arguments[:1]):
            return Opaque(name, tuple(arguments))
        return _FUNCTIONS[name](arguments)
    found, value = bench.call(run.bench, of, arguments)
    return value if found else construct(run, of, arguments)


def call_opaque(run: Expressions, function: Opaque, arguments: list[Any]) -> Any:
    return bench.call_opaque(run.bench, function, arguments)


def _swap(run: Expressions, nodes: Sequence[Node], scope: Scope) -> None:
    left, right = (run.evaluate(one, scope) for one in nodes)
    run.assign(nodes[0], right, scope)
    run.assign(nodes[1], left, scope)


def _getline(run: Expressions, nodes: Sequence[Node], scope: Scope) -> bool:
    stream = run.evaluate(nodes[0], scope)
    end = run.evaluate(nodes[2], scope) if len(nodes) > 2 else "\n"
    if not isinstance(stream, Stream) or stream.text is None or stream.at >= len(stream.text):
        return False
    found = stream.text.find(end, stream.at)
    stop = len(stream.text) if found < 0 else found
    run.assign(nodes[1], stream.text[stream.at : stop].rstrip("\r"), scope)
    stream.at = stop + len(end)
    return True


#: functions that are given their arguments' nodes: they assign to them, or one of them is no value
SPECIAL: dict[str, Callable[[Expressions, Sequence[Node], Scope], Any]] = {
    "swap": _swap, "getline": _getline, **bench.SPECIAL,
}  # fmt: skip
