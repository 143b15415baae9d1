"""What the expressions of a unit test evaluate to, where Python has no such thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .syntax import Type
from .tokens import Unreadable


class Symbol(str):
    """A constant of CANN by its name, e.g. ``ACL_FLOAT16``, ``GRAPH_FAILED``."""


class Vector(list[Any]):
    """``std::vector`` and its like; ``of`` is the type of its elements where that was said."""

    of: Type | None = None


class Opaque:
    """A thing of the test bench that is not modelled. Whatever is asked of it is opaque again."""

    def __init__(self, text: str, parts: tuple[Any, ...] = ()) -> None:
        self.text, self.parts = text, parts

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def __bool__(self) -> bool:
        raise Unreadable(f"the test asks for {self.text}")


@dataclass
class Tensor:
    shape: list[int]
    dtype: str
    format: str
    strides: list[int] | None = None
    offset: int = 0
    storage: list[int] | None = None
    #: values that a host reads, e.g. the lengths of sequences
    data: list[int] | None = None


@dataclass
class Shape:
    """``gert::StorageShape``."""

    origin: Vector
    storage: Vector


@dataclass
class Scalar:
    value: float


@dataclass
class Struct:
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Iterator:
    of: Any
    at: int


@dataclass
class Stream:
    """A file or string stream that is read line by line."""

    text: str | None
    at: int = 0


@dataclass
class ParameterSet:
    """One call that a test makes, and what it expects of it.

    ``operator`` is an aclnn function and ``arguments`` its arguments, or the name of a tiling whose
    ``inputs``, ``outputs`` and ``attributes`` are given. ``accepted``: whether it is to succeed; None where
    the test does not say.
    """

    operator: str
    name: str
    soc: str
    arguments: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    accepted: bool | None = None
    expected: str = ""


@dataclass
class Status:
    """What phase 1, or a tiling, would return. A test compares it with what it expects."""

    of: ParameterSet

    def expect(self, value: Any, equal: bool = True) -> None:
        """The test says that the status equals ``value``, or differs from it."""
        accepted = accepts(value)
        self.of.expected = ("" if equal else "not ") + str(value)
        if accepted is None or (not equal and not accepted):
            return
        self.of.accepted = accepted if equal else not accepted


@dataclass
class Comparison:
    status: Status
    value: Any
    equal: bool


def accepts(value: Any) -> bool | None:
    """Whether a status means success; None for one that tells of the test bench, not of the arguments."""
    if isinstance(value, bool):
        return value
    if value in (0, "ACL_SUCCESS", "ACLNN_SUCCESS", "GRAPH_SUCCESS", "OK", "SUCCESS"):
        return True
    refusals = ("ACLNN_ERR_PARAM_INVALID", "ACLNN_ERR_PARAM_NULLPTR", "GRAPH_FAILED", "GRAPH_PARAM_INVALID")
    return False if value in refusals or value in (161001, 161002) else None


def copied(value: Any) -> Any:
    """A value as C++ copies it."""
    if isinstance(value, Vector):
        made = Vector(copied(one) for one in value)
        made.of = value.of
        return made
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if isinstance(value, Struct):
        return Struct(value.name, {key: copied(one) for key, one in value.fields.items()})
    if isinstance(value, Shape):
        return Shape(copied(value.origin), copied(value.storage))
    if isinstance(value, Tensor):
        return Tensor(
            list(value.shape),
            value.dtype,
            value.format,
            value.strides,
            value.offset,
            value.storage,
            value.data,
        )
    return value
