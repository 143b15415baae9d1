"""An op of ours on the NPU: what it gives, what it launches, and whether an aclnn operator served it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from cann_sim import trace
from torch import Tensor

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops import ops
from liteboost_adaptor.replacements import npu_format
from liteboost_adaptor.selftest.compare import placed
from support.attention_cases import double
from support.compare import NOISE, assert_close


@dataclass
class Run:
    """One call.

    Attributes:
        results: On the CPU; behind them what the op wrote to.
        launches: Names of the operators launched, in order, as `named`.
        reasons: Why the reference ran; empty when the op was served.
    """

    results: list[Tensor]
    launches: list[str]
    reasons: list[str]


def run(name: str, /, in_nz: tuple[str, ...] = (), counted_as: str = "", **arguments: Any) -> Run:
    """Call ``torch.ops.liteboost.<name>`` with tensors that lie on the NPU as these do on the CPU.

    Those named ``in_nz`` lie there in FRACTAL_NZ. ``counted_as``: the public op that a private one serves.
    """
    counted_as = counted_as or name
    op, outputs = getattr(torch.ops.liteboost, name), ops()[counted_as].outputs
    # Apart, because an op may write to them.
    first, second, third = (placed(arguments, "npu") for _ in range(3))
    if in_nz:
        with npu_format.internal.allowed():
            for there in (first, second, third):
                there |= {each: npu_format.cast(there[each], npu_format.FRACTAL_NZ) for each in in_nz}
    with torch.no_grad():
        op(**first)  # what is used for the first time is compared first, which launches more
        torch.ops.liteboost._npu_forget_counts()
        results = [each.cpu() for each in outputs(op(**second), second)]
        counts = native_npu.calls()
        with _memory_left_as_it_is(), trace.recording() as recorded:
            again = outputs(op(**third), third)
    assert sum(count for op_name, _, count in counts if op_name == counted_as) == 1, counts
    assert all(torch.equal(a, b.cpu()) for a, b in zip(results, again, strict=True))
    return Run(results, named(recorded.ops), [reason for _, reason, _ in counts if reason])


def named(launches: list[str]) -> list[str]:
    """Without ``aclnn``, and casts as torch_npu launches them from 2.10 on: 2.9 has an operator for them."""
    casts = {"Cast": "InplaceCopy"} if torch.__version__.startswith("2.9.") else {}
    short = [launch.removeprefix("aclnn") for launch in launches]
    return [casts.get(launch, launch) for launch in short]


@contextmanager
def _memory_left_as_it_is() -> Iterator[None]:
    """Without the launches that fill new memory in tests (`conftest`)."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


def check(name: str, /, roundings: int = 1, noise: float = NOISE, **arguments: Any) -> Run:
    """`run`, and the results against the reference in float64, as the CPU kernel's are."""
    found = run(name, **arguments)
    assert found.reasons == [], f"{name} was not served: {found.reasons}"
    reference = ops()[name].reference
    exact, original = (
        _listed(each)
        for each in (
            reference(**{key: double(value) for key, value in arguments.items()}),
            reference(**arguments),
        )
    )
    for result, wanted, plain in zip(found.results, exact, original, strict=True):
        assert result.dtype == plain.dtype
        assert_close(result, wanted, plain, roundings=roundings, noise=noise)
    return found


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def covering(kinds: list[str]) -> list[str]:
    """Those in which a word comes that none before had: all that they tell apart, not every combination."""
    seen: set[str] = set()
    chosen = []
    for kind in kinds:
        if not seen.issuperset(kind.split()):
            chosen.append(kind)
            seen.update(kind.split())
    return chosen
