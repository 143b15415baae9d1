"""The frameworks of the unit tests: how they describe tensors, calls and what they expect."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import tables
from .syntax import Node, Type
from .tables import tensor_of
from .tokens import Unreadable
from .values import (
    Comparison,
    Opaque,
    ParameterSet,
    Scalar,
    Shape,
    Status,
    Symbol,
    Tensor,
    Vector,
    copied,
)

if TYPE_CHECKING:
    from .expressions import Expressions, Scope

_DIRECT = re.compile(r"(aclnn\w+?)GetWorkspaceSize\Z")
#: Parts of names of tests, or of what they set, in the order in which they are looked for -> the SoC.
_SOCS = [
    ("950", "950"), ("910_95", "950"), ("910d", "950"), ("3510", "950"), ("mc62", "950"), ("910_93",
    "910C"), ("910c", "910C"),
    ("910b", "910B"), ("2201", "910B"), ("310p", "310P"), ("2002", "310P"), ("310b", "310B"), ("310", "310"),
    ("ascend910", "910"), ("1001", "910"), ("610lite", "610"), ("kirin", "Kirin"), ("5102", "5102"),
    ("arch35", "950"), ("arch20", "310P"),
]  # fmt: skip


def soc_of(text: str) -> str | None:
    """The generation that a name or a version of the tests means."""
    lower = text.lower()
    return next((soc for part, soc in _SOCS if part in lower), None)


@dataclass
class Bench:
    """Of one file: reads tables beside it, and keeps the parameter sets that its tests come by."""

    path: str
    #: the text of a table whose name a test builds, or None
    read: Callable[[str], str | None]
    sets: list[ParameterSet] = field(default_factory=list)
    name: str = ""
    soc: str = "910B"

    def start(self, name: str, *hints: str) -> None:
        """Of a test, whose names say for which SoC it is; the frameworks' own default is a 910B."""
        self.name = name
        self.soc = next((soc for hint in hints if (soc := soc_of(hint))), "910B")

    def call(self, operator: str, arguments: Sequence[Any]) -> Status:
        made = ParameterSet(operator, self.name, self.soc, arguments=[copied(one) for one in arguments])
        self.sets.append(made)
        return Status(made)

    def tiling(self, operator: str, inputs: Any, outputs: Any, attributes: dict[str, Any]) -> Status:
        made = ParameterSet(operator, self.name, self.soc)
        made.inputs, made.outputs, made.attributes = copied(inputs), copied(outputs), dict(attributes)
        self.sets.append(made)
        return Status(made)


@dataclass
class ApiTest:
    operator: str
    arguments: list[Any]


@dataclass
class TilingTest:
    operator: str
    inputs: list[Any]
    outputs: list[Any]
    attributes: dict[str, Any]


@dataclass
class ContextFaker:
    """A tiling context that is built by a chain of calls."""

    calls: list[tuple[str, list[Any]]] = field(default_factory=list)


# ---- values --------------------------------------------------------------------------------------
def construct(of_bench: Bench, of: Type, arguments: list[Any]) -> Any:
    name = of.name
    if name == "TensorDesc":
        return tensor_of(arguments)
    if name == "TensorListDesc":
        if len(arguments) == 2 and isinstance(arguments[0], int):
            return Vector(copied(arguments[1]) for _ in range(arguments[0]))
        return Vector(arguments[0] if arguments and isinstance(arguments[0], Vector) else arguments)
    if name == "ScalarDesc":
        return Scalar(arguments[0])
    if name in ("IntArrayDesc", "BoolArrayDesc", "FloatArrayDesc"):
        return Vector(arguments[0]) if arguments and isinstance(arguments[0], Vector) else Vector(arguments)
    if name == "StorageShape":
        if len(arguments) == 1 and isinstance(arguments[0], Shape):
            return copied(arguments[0])
        both = [one if isinstance(one, Vector) else Vector([one]) for one in arguments[:2]]
        return Shape(*both, *(Vector() for _ in range(2 - len(both))))
    if name == "Shape":
        return (
            Vector(arguments[0])
            if len(arguments) == 1 and isinstance(arguments[0], Vector)
            else Vector(arguments)
        )
    if name == "TilingContextPara":
        return _tiling_test(of_bench, arguments)
    if name == "TilingContextFaker":
        return ContextFaker()
    if name in ("SocVersionManager", "NpuArchManager") and arguments:
        _set_soc(of_bench, arguments[0])
        return Opaque(name)
    return None


def _tiling_test(of_bench: Bench, arguments: list[Any]) -> TilingTest:
    operator, inputs, outputs, *rest = arguments
    attributes = (
        rest[0]
        if rest and isinstance(rest[0], Vector) and all(isinstance(a, Vector) for a in rest[0])
        else []
    )
    attributes = [one for one in attributes if len(one) == 2 and isinstance(one[0], str)]
    for one in rest:
        if isinstance(one, str) and one.startswith("Ascend"):
            _set_soc(of_bench, one)
            break
    described = _instances([_description(one) for one in inputs], rest)
    return TilingTest(
        operator, described, [_description(one) for one in outputs], {a[0]: a[1] for a in attributes}
    )


def _instances(tensors: list[Any], rest: list[Any]) -> list[Any]:
    """Inputs of which there are several, or none, are lists; the numbers come after the attributes."""
    counts = next(
        (one for one in rest if isinstance(one, Vector) and one and all(type(n) is int for n in one)), None
    )
    if counts is None or sum(counts) != len(tensors):
        return tensors
    found, at = [], 0
    for count in counts:
        part = tensors[at : at + count]
        found.append(Vector(part) if count > 1 else part[0] if part else None)
        at += count
    return found


def _description(value: Any) -> Tensor | None:
    """A tensor of a tiling context: shapes, dtype, format, and values that the host may read."""
    if isinstance(value, Tensor) or value is None:
        return value
    if isinstance(value, Opaque) and value.text == "TD_DEFAULT":
        return None
    if not isinstance(value, Vector) or len(value) < 2:
        raise Unreadable(f"a tensor described by {value!r:.40}")
    shape, dtype, form = value[0], value[1], value[2] if len(value) > 2 else "FORMAT_ND"
    if isinstance(shape, Vector):
        shape = Shape(*shape) if len(shape) == 2 else Shape(Vector(), Vector())
    if not isinstance(shape, Shape):
        raise Unreadable(f"a tensor of shape {shape!r:.40}")
    if not shape.origin and not shape.storage:
        return None  # tilings take an optional input without axes for one that is not given
    data = list(value[4]) if len(value) > 4 and isinstance(value[4], Vector) else None
    return Tensor(list(shape.origin or shape.storage), dtype, form, storage=list(shape.storage), data=data)


def _set_soc(of_bench: Bench, value: Any) -> None:
    found = soc_of(value) if isinstance(value, str) else None
    if found is None and isinstance(value, str):
        found = f"{value}?"
    if found and not (found == "910B" and of_bench.soc == "910C"):
        of_bench.soc = found


def attribute(of: Any, name: str) -> Any:
    if isinstance(of, tables.Row):
        return tables.column(of, name)
    if isinstance(of, Opaque):
        return Opaque(f"{of.text}.{name}", of.parts)
    raise Unreadable(f"{name} of {of!r:.40}")


# ---- calls ---------------------------------------------------------------------------------------
def call_method(of_bench: Bench, of: Any, name: str, arguments: list[Any]) -> Any:
    if isinstance(of, Tensor):
        if name == "Value" and arguments and isinstance(arguments[0], Vector):
            of.data = list(arguments[0])
        elif name in ("SetStorageShape",) and isinstance(arguments[0], Vector):
            of.storage = list(arguments[0])
        return of
    if isinstance(of, Shape):
        return of.origin if "Origin" in name else of.storage
    if isinstance(of, ApiTest):
        return (
            of_bench.call(of.operator, of.arguments)
            if name.startswith("TestGetWorkspaceSize")
            else Opaque(name)
        )
    if isinstance(of, ContextFaker):
        return _chained(of, name, arguments)
    if isinstance(of, Opaque):
        if name == "SetPlatformRes" and arguments[0] == "version" and isinstance(arguments[1], dict):
            for value in arguments[1].values():
                _set_soc(of_bench, value)
        return Opaque(f"{of.text}.{name}()", (*of.parts, *(a for a in arguments if isinstance(a, str))))
    if isinstance(of, tables.Row) or of is None:
        return Opaque(f"{name}()")
    raise Unreadable(f"{name}() of {of!r:.40}")


def _chained(of: ContextFaker, name: str, arguments: list[Any]) -> Any:
    if name in ("Build", "GetContext"):
        return of
    if name.startswith("Get"):
        return Opaque(name)
    of.calls.append((name, arguments))
    return of


def call_opaque(of_bench: Bench, function: Opaque, arguments: list[Any]) -> Any:
    """A tiling function, found by the operator's name, on a context; or something that does not matter."""
    contexts = [one for one in arguments if isinstance(one, ContextFaker)]
    names = [part for part in function.parts if isinstance(part, str)]
    if contexts and names:
        return _tiled(of_bench, names[-1], contexts[0])
    return Opaque(f"{function.text}()", tuple(arguments))


def _tiled(of_bench: Bench, operator: str, context: ContextFaker) -> Status:
    shapes: dict[str, list[Any]] = {"InputShapes": [], "OutputShapes": []}
    described: dict[tuple[str, int], list[Any]] = {}
    attributes: dict[str, Any] = {}
    for name, arguments in context.calls:
        if name in shapes:
            shapes[name] = list(arguments[0])
        elif name in ("NodeInputTd", "NodeOutputTd"):
            described[name, arguments[0]] = arguments[1:]
        elif name == "NodeAttrs":
            attributes = {one[0]: one[1] for one in arguments[0]}
    tensors = []
    for kind, node in (("InputShapes", "NodeInputTd"), ("OutputShapes", "NodeOutputTd")):
        found = []
        for k, shape in enumerate(shapes[kind]):
            dtype, _, form = [*described.get((node, k), []), None, None, None][:3]
            if shape is None or dtype is None:
                found.append(None)
                continue
            found.append(_description(Vector([shape, dtype, form])))
        tensors.append(found)
    return of_bench.tiling(operator, *tensors, attributes)


def call(of_bench: Bench, of: Type, arguments: list[Any]) -> tuple[bool, Any]:
    """Whether ``of`` is a function of the frameworks, and what it returns."""
    if match := _DIRECT.match(of.name):
        return True, of_bench.call(match[1], arguments[:-2])
    if of.name in _FUNCTIONS:
        return True, _FUNCTIONS[of.name](of_bench, arguments)
    if of.name == "GetCasesFromCsv":
        return True, tables.rows(of_bench.read(re.sub(r"\.cpp\Z", ".csv", of_bench.path)) or "")
    if of.name in tables.FUNCTIONS:
        return True, tables.FUNCTIONS[of.name](arguments)
    return False, None


def _create_tensor(_: Bench, arguments: list[Any]) -> Tensor:
    shape, _, dtype, strides, offset, form, storage, *_ = arguments
    made = tensor_of([shape, dtype, form, strides or Vector(), offset, storage or Vector()])
    return made


_FUNCTIONS: dict[str, Callable[[Bench, list[Any]], Any]] = {
    "INPUT": lambda _, a: Vector(a),
    "OUTPUT": lambda _, a: Vector(a),
    "ValuesIn": lambda _, a: a[0] if len(a) == 1 else Vector(a[0].of[a[0].at : a[1].at]),
    "Values": lambda _, a: Vector(a),
    "aclCreateTensor": _create_tensor,
    "aclCreateTensorList": lambda _, a: Vector(a[0]),
    "aclCreateIntArray": lambda _, a: Vector(a[0]),
    "CreateFrom": lambda _, a: a[0],
    "ExecuteTestCase": lambda b, a: _tiled_case(b, a[0]).expect(
        a[1] if len(a) > 1 else Symbol("GRAPH_FAILED")
    ),
    "ExecuteTiling": lambda b, a: _tiled_case(b, a[0]),
    "SetPlatformSocVersion": lambda b, a: _set_soc(b, a[0]),
    "SetPlatformNpuArch": lambda b, a: _set_soc(b, a[0]),
}


def _tiled_case(of_bench: Bench, of: Any) -> Status:
    if not isinstance(of, TilingTest):
        raise Unreadable(f"a tiling of {of!r:.40}")
    return of_bench.tiling(of.operator, of.inputs, of.outputs, of.attributes)


def _api_test(run: Expressions, nodes: Sequence[Node], scope: Scope) -> ApiTest:
    parts = [run.evaluate(one, scope) for one in nodes[1:]]
    arguments = [one for part in parts for one in (part if isinstance(part, Vector) else [part])]
    return ApiTest(nodes[0][1], arguments)


def _get_param(run: Expressions, nodes: Sequence[Node], scope: Scope) -> Any:
    return run.globals.values["GetParam()"]


def _equal(same: bool) -> Callable[[Expressions, Sequence[Node], Scope], None]:
    def check(run: Expressions, nodes: Sequence[Node], scope: Scope) -> None:
        left, right = (run.evaluate(one, scope) for one in nodes[:2])
        if isinstance(right, Status | Comparison):
            left, right = right, left
        if isinstance(left, Status):
            left.expect(right, same)
        elif isinstance(left, Comparison) and isinstance(right, bool):
            left.status.expect(left.value, (left.equal == right) == same)

    return check


def _truth(wanted: bool) -> Callable[[Expressions, Sequence[Node], Scope], None]:
    def check(run: Expressions, nodes: Sequence[Node], scope: Scope) -> None:
        found = run.evaluate(nodes[0], scope)
        if isinstance(found, Comparison):
            found.status.expect(found.value, found.equal == wanted)
        elif isinstance(found, Status):
            found.expect(wanted)

    return check


def _ignored(run: Expressions, nodes: Sequence[Node], scope: Scope) -> Opaque:
    return Opaque("nothing")


SPECIAL: dict[str, Callable[[Expressions, Sequence[Node], Scope], Any]] = {
    "OP_API_UT": _api_test,
    "GetParam": _get_param,
}
for _level in ("EXPECT", "ASSERT"):
    SPECIAL |= {
        f"{_level}_EQ": _equal(True), f"{_level}_NE": _equal(False), f"{_level}_TRUE": _truth(True),
        f"{_level}_FALSE": _truth(False),
        f"{_level}_GE": _ignored, f"{_level}_GT": _ignored, f"{_level}_LE": _ignored,
        f"{_level}_LT": _ignored,
    }  # fmt: skip
for _word in ("ADD_FAILURE", "SCOPED_TRACE", "GTEST_SKIP", "dlog_setlevel", "unsetenv", "setenv"):
    SPECIAL[_word] = _ignored
