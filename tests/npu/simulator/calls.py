"""Calls of single aclnn functions on the simulator, any SoC and release, and the comparison with float64."""

from __future__ import annotations

import atexit
import functools
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cann_sim.environment import environment
from cann_sim.releases import DEFAULT_RELEASE
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
ND, NZ = 2, 29
# One rounding to nearest: half a unit in the last place. float32 has the error of its sums.
ROUNDING = {torch.float32: 2.0**-21, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Stored:
    """A tensor argument with a format of its own, e.g. FRACTAL_NZ; `storage_shape` is that of its memory."""

    tensor: Tensor
    format: int = ND
    storage_shape: Sequence[int] = ()


class Simulator:
    """A process on the simulator. `tensors` of an answer are those given, as they are afterwards."""

    def __init__(self, soc: str, release: str) -> None:
        variables = environment(release, soc) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables,
        )
        atexit.register(self._process.kill)

    def ask(self, function: str, *arguments: Any) -> Any:
        try:
            pickle.dump((function, arguments), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            started.cache_clear()
            pytest.fail(f"the simulator ended with {self._process.wait()} in {function}{arguments[:1]}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        self._process.kill()

    def call(self, op: str, *arguments: Any) -> dict[str, Any]:
        return self.ask("call", op, [_sent(a) for a in arguments])

    def run(self, op: str, *arguments: Any) -> list[Tensor | None]:
        """The tensors after a call that succeeds, one for each argument (None for one that is no tensor)."""
        answer = self.call(op, *arguments)
        assert answer["code"] == 0, f"{op}: {answer['code']} in phase {answer['phase']}: {answer['message']}"
        return answer["tensors"]

    def refused(self, op: str, *arguments: Any, message: str, code: int = 161002) -> None:
        """Phase 1 answers with `code`, and its message has `message` in it."""
        answer = self.call(op, *arguments)
        assert (answer["code"], answer["phase"]) == (code, 1), f"{op} was accepted, or: {answer['message']}"
        assert message in answer["message"], answer["message"]


def _sent(argument: Any) -> Any:
    if isinstance(argument, Stored):
        return (argument.tensor, argument.format, list(argument.storage_shape))
    if isinstance(argument, Tensor):
        return (argument, ND, None)
    if isinstance(argument, list) and argument and isinstance(argument[0], Tensor | Stored):
        return [_sent(a) for a in argument]
    return argument


@functools.cache
def started(soc: str = "910B", release: str = DEFAULT_RELEASE) -> Simulator:
    return Simulator(soc, release)


def run(op: str, *arguments: Any, release: str = DEFAULT_RELEASE) -> list[Tensor | None]:
    return started(release=release).run(op, *arguments)


def refused(
    op: str,
    *arguments: Any,
    message: str,
    code: int = 161002,
    soc: str = "910B",
    release: str = DEFAULT_RELEASE,
) -> None:
    started(soc, release).refused(op, *arguments, message=message, code=code)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same values with a gap after each row and an offset: not contiguous, last axis of stride 1."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), float("nan"), dtype=x.dtype)
    wide[..., 3:-2] = x
    return wide[..., 3:-2]


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None, roundings: float = 1.0) -> None:
    """`got` is float64 `want` rounded `roundings` times, after float32 arithmetic on values of its size."""
    relative = ROUNDING[dtype or got.dtype] * roundings
    slack = 2.0**-20 * max(float(want.abs().max()), 1e-3) if want.numel() else 0.0
    assert got.shape == want.shape
    error = (got.double() - want).abs() - want.abs() * relative * 1.001
    assert not got.isnan().any()
    worst = float(error.max()) if error.numel() else 0.0
    tiny = 2.0**-25 if (dtype or got.dtype) == torch.float16 else 0.0  # subnormal values of float16
    assert worst <= slack + tiny, (
        f"off by {worst:.3g} more than {roundings} rounding(s) of {dtype or got.dtype}"
    )
