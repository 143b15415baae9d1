"""Reads the trace that the simulator writes: launches, copies, synchronisations, collectives, graph replays.

with recording() as trace:                 # in a program that runs on the simulator
    mark("token 0")
    model(...)
trace.launches, trace.copies("d2h"), trace.part("token 0")

trace = read("trace.jsonl")                # a file that SIMCANN_TRACE named
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tensor:
    """A tensor that a launch was given: ``address`` of its first element, ``bytes`` the extent from there."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    contiguous: bool
    format: int
    storage_shape: tuple[int, ...]
    address: int
    bytes: int

    def overlaps(self, other: Tensor) -> bool:
        """Whether the extents have addresses in common (views of one storage, mostly)."""
        return self.address < other.address + other.bytes and other.address < self.address + self.bytes


@dataclass(frozen=True)
class Argument:
    """An argument of a launch: tensors, or a ``value``. ``read`` and ``written``: bytes touched of it."""

    name: str
    kind: str
    direction: str
    value: Any = None
    read: int = 0
    written: int = 0
    tensors: tuple[Tensor | None, ...] = ()

    @property
    def tensor(self) -> Tensor | None:
        """The tensor of an argument of kind ``tensor``; None when it was not given."""
        return self.tensors[0] if self.tensors else None


@dataclass(frozen=True)
class Event:
    """A line of the trace. ``fields`` is the line as it is; ``label`` the last mark before it."""

    event: str
    label: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Launch(Event):
    """An operator that ran. Bytes count every element touched once, by all its arguments together."""

    op: str = ""
    stream: int = 0
    graph: int = 0  # the graph whose replay it belongs to, or 0
    read: int = 0
    written: int = 0
    flops: int = 0
    arguments: tuple[Argument, ...] = ()

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def argument(self, name: str) -> Argument:
        return next(argument for argument in self.arguments if argument.name == name)

    def tensors(self, direction: str | None = None) -> list[Tensor]:
        """The tensors given, of one direction (``in``, ``out``, ``inout``) or all."""
        wanted = [a for a in self.arguments if direction in (None, a.direction)]
        return [tensor for argument in wanted for tensor in argument.tensors if tensor]

    def describe(self) -> str:
        """One line for people: the operator and its arguments."""
        return f"{self.op}({', '.join(_describe(argument) for argument in self.arguments)})"


@dataclass
class Trace:
    """Events in the order in which they happened."""

    events: list[Event] = field(default_factory=list)

    @property
    def launches(self) -> list[Launch]:
        return [event for event in self.events if isinstance(event, Launch)]

    @property
    def ops(self) -> list[str]:
        """Names of the operators launched."""
        return [launch.op for launch in self.launches]

    @property
    def bytes(self) -> int:
        """Bytes that launches read and wrote, and copies within a device."""
        return sum(launch.bytes for launch in self.launches) + 2 * sum(self._copied("d2d"))

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self.launches)

    def of(self, event: str) -> list[Event]:
        """Events of one sort: copy, synchronize, collective, replay, allocate, mark."""
        return [e for e in self.events if e.event == event]

    def copies(self, direction: str) -> list[Event]:
        """Copies in one direction: ``h2d``, ``d2h``, ``d2d``, ``h2h``."""
        return [e for e in self.of("copy") if e.fields["direction"] == direction]

    @property
    def synchronisations(self) -> list[Event]:
        """Waits of the host for a stream, an event or a device."""
        return self.of("synchronize")

    def part(self, label: str) -> Trace:
        """What happened after the mark ``label``, until the next one."""
        return Trace([e for e in self.events if e.label == label and e.event != "mark"])

    @property
    def labels(self) -> list[str]:
        """The marks, in order."""
        return list(dict.fromkeys(e.fields["label"] for e in self.of("mark")))

    def _copied(self, direction: str) -> list[int]:
        return [e.fields["bytes"] for e in self.copies(direction)]


def read(path: str | Path) -> Trace:
    """The trace in a file."""
    events: list[Event] = []
    label = ""
    for line in Path(path).read_text().splitlines():
        fields = json.loads(line)
        if fields["event"] == "mark":
            label = fields["label"]
        events.append(
            _launch(label, fields) if fields["event"] == "launch" else Event(fields["event"], label, fields)
        )
    return Trace(events)


@contextmanager
def recording() -> Iterator[Trace]:
    """Records what happens inside; the trace is filled at the end, after the devices are synchronised.

    torch's deterministic mode is off inside: it fills every new tensor, with a launch each.
    """
    runtime = _runtime()
    trace = Trace()
    with _not_deterministic(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        _synchronize()
        if not runtime.simcann_trace_start(str(path).encode()):
            raise OSError(f"cannot write {path}")
        try:
            yield trace
            # Launches in the task queue belong to the recording, this wait for them does not.
            mark(_END)
            _synchronize()
        finally:
            runtime.simcann_trace_stop()
        waits = ("mark", "synchronize")
        trace.events += [e for e in read(path).events if e.label != _END or e.event not in waits]


def mark(label: str) -> None:
    """Divides the trace here; see `Trace.part`."""
    _runtime().simcann_mark(label.encode())


_END = "end of recording"


@contextmanager
def _not_deterministic() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _synchronize() -> None:
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is not None and torch_npu.npu.is_initialized():
        torch_npu.npu.synchronize()


def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL("libascendcl.so")
    library.simcann_trace_start.restype = ctypes.c_bool
    return library


def _launch(label: str, fields: dict[str, Any]) -> Launch:
    own = {key: fields[key] for key in ("op", "stream", "graph", "read", "written", "flops")}
    arguments = tuple(_argument(one) for one in fields["arguments"])
    return Launch("launch", label, fields, arguments=arguments, **own)


def _argument(fields: dict[str, Any]) -> Argument:
    tensors = tuple(_tensor(one) if one else None for one in fields.get("tensors", ()))
    own = {key: fields[key] for key in ("value", "read", "written") if key in fields}
    return Argument(fields["name"], fields["kind"], fields["direction"], tensors=tensors, **own)


def _tensor(fields: dict[str, Any]) -> Tensor:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Tensor(**values)


def _describe(argument: Argument) -> str:
    if not argument.kind.startswith("tensor"):
        return f"{argument.name}={argument.value}"
    shapes = [
        "-" if t is None else f"{t.dtype}{list(t.shape)}{'' if t.contiguous else '~'}"
        for t in argument.tensors
    ]
    return f"{argument.name}={' '.join(shapes) or '-'}"
