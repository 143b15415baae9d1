"""Which instructions of a program are captured as a graph of a device, and which run before every replay."""

from __future__ import annotations

from collections.abc import Collection

import torch

from .npu_passes import OF_A_RUN
from .recording import Call, Length, is_foreign
from .tensors import writes

#: Operators that may read what grows: they are launched once more for every replay, in the place of what was
#: captured.
RENEWED = ("liteboost::attention", "liteboost::_npu_int8_attention", "liteboost::_npu_latent_attention")
#: Namespaces of the operators by which ranks exchange tensors.
COLLECTIVES = ("liteboost_parallel", "c10d", "_c10d_functional")
#: Of these, whose results are captured: all ranks have them at the same places of the same step.
_OURS = "liteboost_parallel"
#: Runs before every replay; captured; captured and renewed; neither.
BEFORE, CAPTURED, AGAIN, NEITHER = "b", "g", "r", "-"


class Phases:
    """The phase of each line of a program, as `Writer` writes them.

    Attributes:
        fault: Why no graph can be made of the program, or an empty string.
        statics: Slots that are made before a replay and read in it.
        fixed: Slots that must lie where they lay.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.statics: list[int] = []
        self.fixed: list[int] = []
        self._captured: set[int] = set()
        self._fresh: set[int] = set()
        self._growing: set[int] = set()
        self._appended: set[int] = set()
        self._renewed: set[int] = set()

    def given(self, slot: int, is_growing: bool) -> None:
        """What a run is given, or is made before it, is in ``slot``."""
        self._fresh.add(slot)
        if is_growing:
            self._growing.add(slot)

    def appended(self, slot: int) -> None:
        """In ``slot`` is what a cache keeps, of which the last position is written by what is captured."""
        self.given(slot, is_growing=True)
        self._appended.add(slot)

    def stays(self, slot: int) -> None:
        """What is in ``slot`` is read where it lies: a constant, or the memory of a cache."""
        self.fixed.append(slot)

    def refuse(self, reason: str) -> None:
        """No graph can be made; the first reason is kept."""
        self.fault = self.fault or reason

    def captured(self, reads: Collection[int], results: Collection[int]) -> str:
        """The phase of an instruction that is captured."""
        self.statics += [slot for slot in reads if slot in self._fresh and slot not in self.statics]
        self._captured.update(results)
        return CAPTURED

    def of_view(self, source: int, result: int) -> str:
        """The phase of another view of what the run has made."""
        if source in self._captured:
            return self.captured([source], [result])
        self.given(result, source in self._growing)
        if source in self._appended:
            self._appended.add(result)
        return BEFORE

    def of_call(self, call: Call, reads: list[int], results: list[int], is_growing: bool) -> str:
        """The phase of an operator; ``is_growing``: whether a result has a size that grows."""
        name = call.function.name().split(".")[0]
        if reason := _reason_against(call, name):
            self.refuse(reason)
        counts = _counts(call.args) or _counts(call.kwargs.values()) or self._growing.intersection(reads)
        if reads and not counts:
            return self.captured(reads, results)
        if not self._captured.intersection(reads):
            for slot in results:
                self.given(slot, is_growing)
            if self._appended.intersection(reads):
                self._appended.update(results)
                if not _is_view(call):
                    self.refuse(f"{name} reads what the graph appends to")
            return BEFORE
        if name not in RENEWED or is_growing:
            self.refuse(f"{name} reads what grows from step to step")
        self._renewed.update(reads)
        self._captured.update(results)
        return AGAIN

    def of_drop(self, slot: int) -> str:
        """The phase of letting go of what is in ``slot``: memory that the rest of the capture can use."""
        is_free = slot in self._captured and slot not in self._renewed
        return CAPTURED if is_free else NEITHER

    def copied(self, results: Collection[int]) -> list[int]:
        """Those of ``results`` that the next replay writes over."""
        return [slot for slot in results if slot in self._captured or slot in self.statics]


def _reason_against(call: Call, name: str) -> str:
    if call.function.namespace in COLLECTIVES and call.function.namespace != _OURS:
        return f"ranks exchange tensors in it by {name}"
    if is_foreign(call.function):
        return f"{name} is neither torch's nor ours"
    if writes(call.function) and call.function.name() not in OF_A_RUN:
        return f"{name} writes to what was there before the step"
    if torch.Tag.nondeterministic_seeded in call.function.tags:
        return f"{name} draws random numbers"
    return ""


def _is_view(call: Call) -> bool:
    """Whether an operator reads no values: its results lie where its first argument lies."""
    returns = call.function._schema.returns
    return all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _counts(values: Collection[object]) -> bool:
    """Whether a size is among the arguments."""
    return any(
        isinstance(each, Length) or (isinstance(each, list | tuple) and _counts(each)) for each in values
    )
