"""activation, gated_activation."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import FP32, TINY, UNIT, assert_within
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.activation import ACTIVATIONS


def exact_activation(gate: Tensor, kind: str, alpha: float) -> Tensor:
    match kind:
        case "silu":
            return gate * torch.sigmoid(alpha * gate)
        case "gelu":  # torch's own cancels below -5, also in float64
            return gate * torch.special.erfc(-gate / 2**0.5) / 2
        case "gelu_tanh":
            return gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
        case "sigmoid":
            return torch.sigmoid(gate)
        case "relu2":
            return gate.relu().square()
    assert kind == "relu", f"say here what {kind} is in float64"
    return gate.relu()


def _relative(x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Relative error of an activation: an exponential of a rounded argument errs with the argument."""
    relative = (16 + 4 * x.abs()) * FP32 + (0 if dtype == torch.float32 else 5e-5)
    # The argument of the tanh form is a cubic.
    return relative + 2 * FP32 * x.abs() ** 3 if kind == "gelu_tanh" else relative


def _two(draw: DrawFn, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate and up: apart, or the halves or the even and odd channels of one tensor."""
    size, scale = tensors.shape(draw), draw(st.sampled_from([1.0, 1e-2, 6.0]))
    together = draw(st.sampled_from(["apart", "halves", "pairs"]))
    if together == "apart":
        return tensors.tensor(draw, size, dtype, scale), tensors.tensor(draw, size, dtype, scale)
    both = tensors.tensor(draw, (*size[:-1], 2 * size[-1]), dtype, scale)
    return both.chunk(2, -1) if together == "halves" and size[-1] else (both[..., ::2], both[..., 1::2])


@fuzzes("gated_activation")
def gated_activation(draw: DrawFn) -> Case:
    dtype, kind = draw(tensors.DTYPES), draw(st.sampled_from(ACTIVATIONS))
    gate, up = _two(draw, dtype)
    limit = draw(st.sampled_from([None, None, 7.0, 0.5, 0.0]))
    arguments = {
        "gate": gate,
        "up": up,
        "activation": kind,
        "alpha": draw(st.sampled_from([1.0, 1.702])) if kind == "silu" else 1.0,
        "limit": limit,
        "up_offset": draw(st.sampled_from([0.0, 0.0, 1.0, -0.5])),
    }

    def check(results: list[Tensor]) -> None:
        g, u = gate.double(), up.double()
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        factor = u + arguments["up_offset"]
        want = exact_activation(g, kind, arguments["alpha"]) * factor
        assert results[0].dtype == dtype
        bound = (1.02 * UNIT[dtype] + _relative(g, kind, dtype)) * want.abs()
        bound += TINY[dtype] * (1 + factor.abs())
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("activation")
def activation(draw: DrawFn) -> Case:
    dtype, kind = draw(tensors.DTYPES), draw(st.sampled_from(ACTIVATIONS))
    size = tensors.shape(draw) if draw(st.integers(0, 9)) else ()
    x = tensors.tensor(draw, size, dtype, draw(st.sampled_from([1.0, 1e-2, 6.0])))
    arguments = {
        "x": x,
        "activation": kind,
        "alpha": draw(st.sampled_from([1.0, 1.702])) if kind == "silu" else 1.0,
    }

    def check(results: list[Tensor]) -> None:
        want = exact_activation(x.double(), kind, arguments["alpha"])
        assert results[0].dtype == dtype
        bound = (1.02 * UNIT[dtype] + _relative(x.double(), kind, dtype)) * want.abs() + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)
