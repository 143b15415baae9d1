"""A program as an NPUGraph: captured once, replayed for every token, with attention's lengths renewed.

What runs before a replay, what is captured and what is renewed is told by `phases`, and done by
``kernels/program/graph.h``. A step that cannot be captured runs as a program, and the status says why.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import DeviceFaultError
from ..report import APPLIED, CallCounter, Outcome, report

ops = torch.ops.liteboost
RULE = "step.graph"
TITLE = "A recorded step captured as a graph of the NPU (LITEBOOST_GRAPH)"
#: A program that has run so often runs once more, and then is captured (`Graph.run`).
CAPTURED_AT = 1
#: What ``_graph_prepare`` answers.
_STOPPED, _REPLAY = 0, 1
_AGAIN = "captured again: the cache or a weight lies elsewhere"
_FIRST = "run as a program first, which compares what it calls"


class GraphRefusedError(RuntimeError):
    """A step cannot be captured. The message says why."""


class GraphLaterError(RuntimeError):
    """A step is run as a program first, `rehearsed`. The message says why."""


@functools.cache
def _long_from() -> int:
    return ops._npu_long_from()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Attention is called as in a captured step, and what it calls is compared with its reference."""
    ops._npu_tasks_rehearse(True)
    try:
        yield
    finally:
        ops._npu_tasks_rehearse(False)


def _first_line(raised: RuntimeError) -> str:
    return (str(raised).splitlines() or [""])[0][:160]


class Graphs:
    """The captured steps of one model: their memory, and the stream on which they are captured and renewed.

    Attributes:
        setting: ``"0"``, ``"1"`` or ``"auto"``, as of LITEBOOST_GRAPH.
    """

    def __init__(self, setting: str, model: str) -> None:
        self.setting = setting
        self.counter: CallCounter = report.counter(RULE)
        #: One step is replayed at a time: they share their memory.
        self.lock = threading.Lock()
        self.streams: dict[torch.device, Any] = {}
        #: Device -> what its graphs share their memory by, and how many there are: with the last it is gone.
        self.pools: dict[torch.device, Any] = {}
        self.captured: Counter[torch.device] = Counter()
        self._outcome = Outcome(RULE, APPLIED, model)
        self._finalizer: Any = None

    def of(self, program: Any, device: torch.device) -> Graph | None:
        """The graph of a program that has run often enough, if one may be made; else it is counted why."""
        if device.type != "npu" or self.setting == "0":
            return None
        if reason := program.graph_fault or self._reason_against():
            self.counter.count_fallback(reason)
            return None
        if program.graph is None:
            program.graph = Graph(program.number, self, device)
        return program.graph

    def note(self) -> None:
        """Have the status tell that a step of this model was captured."""
        if self._finalizer is None:
            report.add(self._outcome)
            self._finalizer = weakref.finalize(self, report.remove, self._outcome)

    def close(self) -> None:
        """Take back what was reported."""
        if self._finalizer is not None:
            self._finalizer()

    def _reason_against(self) -> str:
        if not hasattr(ops, "_npu_tasks_make"):
            return "no compiled kernels"
        if self.setting == "auto" and ops._npu_soc().startswith("Ascend310P"):
            return "a 310P has few events; LITEBOOST_GRAPH=1 captures"
        return ""


class Graph:
    """One captured program."""

    def __init__(self, program: int, graphs: Graphs, device: torch.device) -> None:
        self._graphs, self._device = graphs, device
        self._npu = torch.get_device_module(device)
        self._number = ops._graph_make(program)
        self._captured: Any = None
        self._tasks = 0
        #: Which lengths of the last step are long for attention.
        self._are_long: list[bool] = []
        self._forget_tasks: Any = None
        self._prepared, self._ended = self._npu.Event(), self._npu.Event()
        self._finalizer = weakref.finalize(self, ops._graph_forget, self._number)

    def close(self) -> None:
        """Let go of what was captured."""
        self._let_go()
        self._finalizer()

    def run(self, inputs: list[torch.Tensor], numbers: list[int]) -> list[torch.Tensor]:
        """What the program would give; nothing if it stopped.

        Raises:
            GraphLaterError: The program has not run with keys of this length class.
            GraphRefusedError: It could not be captured.
            DeviceFaultError: The device has failed in a replay.
        """
        long_from = _long_from()
        # Numbers count what a cache keeps before this token or with it.
        are_long = [number + new >= long_from for number in numbers for new in (0, 1)]
        if self._are_long != are_long:
            # For long keys other kernels of the vendor's may run, which nobody has compared yet.
            if self._captured is not None:
                self._npu.synchronize()
                self._let_go()
            self._are_long = are_long
            raise GraphLaterError(_FIRST)
        self._npu.current_stream().wait_event(self._ended)  # another thread may have replayed it elsewhere
        ready = ops._graph_prepare(self._number, inputs, numbers)
        if ready == _STOPPED:
            return []
        if ready != _REPLAY or self._captured is None:
            self._capture()
        try:
            self._replay()
            return list(ops._graph_results(self._number))
        except RuntimeError as raised:
            words = (str(raised).splitlines() or [""])[0]
            raise DeviceFaultError(
                f"the NPU failed in a captured decode step: {words}. The device does nothing more for this "
                "process: start it again, with LITEBOOST_GRAPH=0 to see which operator it was."
            ) from raised

    def _capture(self) -> None:
        if self._captured is not None:
            self._graphs.counter.count_fallback(_AGAIN)
        self._npu.synchronize()
        self._let_go()
        stream, pool = self._stream(), self._pool()
        graph, tasks = self._npu.NPUGraph(), ops._npu_tasks_make()
        try:
            with self._npu.stream(stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._launch(tasks)
                finally:
                    graph.capture_end()
        except RuntimeError as raised:
            ops._npu_tasks_forget(tasks)
            reason = _first_line(raised)
            try:
                self._take_back(pool)
            except RuntimeError as behind:  # the step runs as a program all the same
                reason = f"{reason}; and behind it: {_first_line(behind)}"
            self._forget_pool()
            raise GraphRefusedError(reason) from raised
        self._captured, self._tasks = graph, tasks
        self._forget_tasks = weakref.finalize(self, ops._npu_tasks_forget, tasks)
        self._graphs.captured[self._device] += 1
        self._graphs.note()

    def _take_back(self, pool: Any) -> None:
        """Let go of what torch_npu 2.9.0 keeps when the end of a capture raises: later releases let go of it.

        Its allocator would refuse to give cached memory back, and its generator to draw anything but in a
        capture; the next capture that ends well, here one of nothing, brings the generator out of this one.
        """
        own: Any = sys.modules["torch_npu"]._C
        index = self._device.index if self._device.index is not None else self._npu.current_device()
        try:
            own._npu_endAllocateCurrentStreamToPool(index, pool)
        except (AttributeError, RuntimeError):  # a later release; it has ended
            return
        own._npu_releasePool(index, pool)
        graph = self._npu.NPUGraph()
        with self._npu.stream(self._stream()):
            graph.capture_begin(pool=self._npu.graph_pool_handle(), capture_error_mode="thread_local")
            graph.capture_end()

    def _launch(self, tasks: int) -> None:
        ops._npu_tasks_begin(tasks, False)
        try:
            ops._graph_capture(self._number)
        finally:
            ops._npu_tasks_end()

    def _replay(self) -> None:
        """The replay waits at each attention until that is renewed: the device need not wait for the last."""
        current, stream = self._npu.current_stream(), self._stream()
        self._prepared.record(current)
        self._captured.replay()
        with self._npu.stream(stream):
            # What is renewed is in use until the replay before has ended, and reads what is made for this.
            stream.wait_event(self._prepared)
            ops._npu_tasks_begin(self._tasks, True)
            try:
                ops._graph_renew(self._number)
            except RuntimeError:
                ops._npu_tasks_abandon()
                raise
            ops._npu_tasks_end()
        self._ended.record(current)

    def _let_go(self) -> None:
        if self._captured is not None:
            self._captured.reset()
            self._forget_tasks()
            self._captured = None
            self._graphs.captured[self._device] -= 1
            self._forget_pool()

    def _forget_pool(self) -> None:
        if not self._graphs.captured[self._device]:
            self._graphs.pools.pop(self._device, None)

    def _stream(self) -> Any:
        """Not the current one, which would wait for itself: torch_npu gives the streams of a pool in turn."""
        streams, current = self._graphs.streams, self._npu.current_stream(self._device)
        while streams.get(self._device) in (None, current):
            streams[self._device] = self._npu.Stream(device=self._device)
        return streams[self._device]

    def _pool(self) -> Any:
        pools = self._graphs.pools
        if self._device not in pools:
            pools[self._device] = self._npu.graph_pool_handle()
        return pools[self._device]
