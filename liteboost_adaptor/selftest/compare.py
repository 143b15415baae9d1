"""Run an op on a device and hold it against its reference in float64 on the CPU."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import op_named
from ..replacements import npu_format
from . import cases as _  # noqa: F401  (fills the table of cases)
from .case import Case, cases_of

#: How far from float64 a result may be, over the largest value of its row: four roundings to the dtype, which
#: is what a kernel that rounds between its steps needs; in fp32, room for sums in another order.
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 4 * 2.0**-8, torch.float16: 4 * 2.0**-11}
#: An op may also be so many times as far as the same calculation in plain PyTorch on the CPU.
OWN_FACTOR = 2.0
#: Each shape comes twice, with other values: what a kernel keeps of a call must serve the next one.
ROUNDS = 2


@dataclass(frozen=True)
class Figure:
    """One case, compared.

    Attributes:
        case: Its label.
        error: Largest distance from float64, over the largest value of the row; infinite where a result is
            not finite, or there is a fault.
        allowed: What `error` may be.
        fault: What else is wrong, empty if nothing: a shape, or the op's own words when it raised.
        fallback: Why an NPU's kernel left the call to the reference; empty where it served it.
    """

    case: str
    error: float
    allowed: float
    fault: str = ""
    fallback: str = ""

    @property
    def passed(self) -> bool:
        """Whether the op may be used, as far as this case goes."""
        return not self.fault and self.error <= self.allowed

    @property
    def words(self) -> str:
        """The case and its figures."""
        return f"{self.case}: {self.fault or f'error {self.error:.2e}, allowed {self.allowed:.2e}'}"


@dataclass(frozen=True)
class Result:
    """The figures of one op and kind.

    Attributes:
        op: Name without namespace.
        kind: As in `selftest.case.cases_of`.
        figures: One for each case and round.
        fault: What ended the comparison or took its device away; empty if nothing did.
        seconds: What the comparison took.
    """

    op: str
    kind: str
    figures: tuple[Figure, ...]
    fault: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def served(self) -> tuple[Figure, ...]:
        """The cases that the kernel served."""
        return tuple(figure for figure in self.figures if not figure.fallback)

    @property
    def failed(self) -> tuple[Figure, ...]:
        """Those of them that speak against it."""
        return tuple(figure for figure in self.served if not figure.passed)

    @property
    def worst(self) -> Figure | None:
        """The case served that is nearest to what is allowed, or furthest beyond it."""
        return max(self.served, key=lambda figure: figure.error / (figure.allowed or 1.0), default=None)

    @property
    def reason(self) -> str:
        """The reason against using the op for this kind, or an empty string."""
        if self.fault:
            return self.fault
        if not self.figures:
            return f"nothing is known to compare it by ({self.kind})"
        if not self.served:
            return f"none of the cases to compare it by is served ({self.kind}): {self.figures[0].fallback}"
        if not self.failed or self.worst is None:
            return ""
        return (
            f"differs from its reference ({self.kind}) in {len(self.failed)} of {len(self.served)} cases; "
            f"{self.worst.words}"
        )


def compare(op: str, kind: str, device: str) -> Result:
    """Every case of an op and kind, in rounds with other values.

    Args:
        op: Name without namespace.
        kind: As in `selftest.case.cases_of`.
        device: Where the op runs: ``"cpu"``, ``"npu"``, ``"npu:1"``.

    Returns:
        A figure for each case and round; none where there are no cases.

    Raises:
        torch.OutOfMemoryError: The device has no memory left; nothing is said about the op.
    """
    before = time.perf_counter()
    rounds = [cases_of(op, kind, seed) for seed in range(ROUNDS)]
    with torch.no_grad(), _verifying(device) as fallback:
        figures = [_figure(op, case, device, fallback) for cases in rounds for case in cases]
    return Result(op, kind, tuple(figures), seconds=time.perf_counter() - before)


def place(tensor: Tensor, device: str) -> Tensor:
    """A copy of ``tensor`` on ``device`` with the same strides, in memory laid out like its own."""
    return placed({"": tensor}, device)[""]


def placed(arguments: Mapping[str, Any], device: str) -> dict[str, Any]:
    """`place` for the tensors among ``arguments``; those that share memory share its copy."""
    memories: dict[tuple[int, torch.dtype], Tensor] = {}
    found = dict(arguments)
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr() or id(storage), tensor.dtype  # no two that are empty share any
        if key not in memories:
            elements = storage.nbytes() // tensor.element_size()
            memories[key] = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
        found[name] = memories[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return found


@contextlib.contextmanager
def _verifying(device: str) -> Iterator[Callable[[], str]]:
    """Let the kernels of an NPU run on this thread though nothing has compared them yet.

    Yields:
        What tells why the last call was not served, empty where it was.
    """
    kernels = torch.ops.liteboost
    if device == "cpu" or not hasattr(kernels, "_npu_set_verifying"):
        yield lambda: ""
        return
    kernels._npu_set_verifying(True)
    try:
        yield kernels._npu_reason_while_verifying
    finally:
        kernels._npu_set_verifying(False)


def _figure(op: str, case: Case, device: str, fallback: Callable[[], str]) -> Figure:
    reference = op_named(op).reference
    exact = _results(op, reference, {name: _double(value) for name, value in case.arguments.items()})
    own = _results(op, reference, placed(case.arguments, "cpu"))
    try:
        arguments = placed(case.arguments, device)
        if case.in_nz and device != "cpu":
            with npu_format.internal.allowed():
                for name in case.in_nz:
                    arguments[name] = npu_format.cast(arguments[name], npu_format.FRACTAL_NZ)
        results = _results(op, getattr(torch.ops.liteboost, op), arguments)
        found = [result.cpu() for result in results]
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # whatever an operator raises speaks against it, and is kept
        words = " ".join(str(fault).split()) or type(fault).__name__
        if words.startswith("NPU out of memory"):  # torch_npu 2.9.0 raises a plain RuntimeError
            raise torch.OutOfMemoryError(words) from fault
        return Figure(case.label, math.inf, 0.0, f"{type(fault).__name__}: {words}")
    return replace(_worst(case, found, own, exact), fallback=fallback())


def _results(op: str, function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """What a call of ``function`` returns, and behind it what it has written into its arguments."""
    return op_named(op).outputs(function(**arguments), arguments)


def _worst(case: Case, found: list[Tensor], own: list[Tensor], exact: list[Tensor]) -> Figure:
    label = case.label
    worst = Figure(label, 0.0, math.inf)
    for number, (result, plain, true) in enumerate(zip(found, own, exact, strict=True)):
        if result.shape != true.shape or result.dtype != plain.dtype:
            what = f"result {number} is {_described(result)} instead of {_described(plain)}"
            return Figure(label, math.inf, 0.0, what)
        rounded = case.rounds_to or plain.dtype
        # Integers that nothing was rounded to must be what they are.
        is_float = rounded.is_floating_point
        allowed = max(ALLOWED[rounded], OWN_FACTOR * _error(plain, true)) if is_float else 0.0
        figure = Figure(label, _error(result, true), allowed)
        if worst.allowed == math.inf or figure.error * worst.allowed > worst.error * figure.allowed:
            worst = figure
    return worst


def _error(result: Tensor, exact: Tensor) -> float:
    """Largest difference over the largest finite exact value of its row; infinite where one is no number.

    Infinities that are the same do not differ.
    """
    if not exact.numel():
        return 0.0
    result = result.double()
    finite = exact.abs().masked_fill(exact.isinf(), 0)
    scale = finite.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    error = ((result - exact).masked_fill(result == exact, 0).abs() / scale).max().item()
    return error if math.isfinite(error) else math.inf


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
