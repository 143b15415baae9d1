"""rms_norm, add_rms_norm, inverse_rms, gated_rms_norm, layer_norm."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.bounds import TINY, UNIT, assert_same, assert_within, double, exact, noise
from fuzz.table import Case, fuzzes
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

EPS = st.sampled_from([1e-6, 1e-5, 1e-3])
OFFSETS = st.sampled_from([0.0, 0.0, 1.0, 0.5])


def _dtypes(x: Tensor, weight: Tensor | None, late: bool) -> tuple[torch.dtype, float]:
    """Dtype of the result, and the relative error of its roundings."""
    if weight is None or late:
        return x.dtype, UNIT[x.dtype]
    # The row to the dtype of x; 1 + weight and the product to that of weight.
    return weight.dtype, UNIT[x.dtype] + 2 * UNIT[weight.dtype]


def _check_normed(result: Tensor, x: Tensor, arguments: dict[str, object]) -> None:
    weight = arguments["weight"]
    dtype, roundings = _dtypes(x, weight, bool(arguments["late"]))
    assert result.dtype == dtype
    names = ("weight", "eps", "weight_offset", "late")
    (want,) = exact("rms_norm", {"x": x, **{name: arguments[name] for name in names}})
    factor = 1.0 if weight is None else weight.double().abs() + arguments["weight_offset"]
    relative = 1.02 * roundings + noise(x.shape[-1])
    assert_within(result, want, relative * want.abs() + TINY[x.dtype] * factor + TINY[dtype])


def _weight(draw: DrawFn, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """One weight for all rows, or one for each of the last dimension but one."""
    of_groups = len(size) > 1 and draw(st.integers(0, 3)) == 0
    return tensors.maybe(draw, size[-2:] if of_groups else size[-1:], tensors.same_or_float32(draw, dtype))


@fuzzes("inverse_rms")
def inverse_rms(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    x = tensors.tensor(draw, tensors.shape(draw), dtype, draw(st.sampled_from([1.0, 0.03, 1e4])))
    arguments = {"x": x, "eps": draw(EPS)}

    def check(results: list[Tensor]) -> None:
        (want,) = exact("inverse_rms", arguments)
        assert results[0].dtype == dtype
        bound = (1.02 * UNIT[dtype] + noise(x.shape[-1])) * want.abs() + TINY[dtype]
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("rms_norm")
def rms_norm(draw: DrawFn) -> Case:
    dtype, size = draw(tensors.DTYPES), tensors.shape(draw)
    x = tensors.tensor(draw, size, dtype, draw(st.sampled_from([1.0, 1e-3, 1e4])))
    arguments = {
        "x": x,
        "weight": _weight(draw, size, dtype),
        "eps": draw(EPS),
        "weight_offset": draw(OFFSETS),
        "late": draw(st.booleans()),
    }
    return Case(arguments, lambda results: _check_normed(results[0], x, arguments))


@fuzzes("add_rms_norm")
def add_rms_norm(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    size, scale = tensors.shape(draw), draw(st.sampled_from([1.0, 1e-3, 1e3]))
    arguments = {
        "x": tensors.tensor(draw, size, dtype, scale),
        "residual": tensors.tensor(draw, size, dtype, scale),
        "weight": _weight(draw, size, dtype),
        "eps": draw(EPS),
        "weight_offset": draw(OFFSETS),
        "late": draw(st.booleans()),
    }

    def check(results: list[Tensor]) -> None:
        normed, total = results
        assert_same(total, arguments["x"] + arguments["residual"])
        _check_normed(normed, total, arguments)

    return Case(arguments, check)


@fuzzes("gated_rms_norm")
def gated_rms_norm(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    gate_first = draw(st.booleans())
    groups = draw(st.integers(1, 4)) if gate_first and draw(st.booleans()) else 0
    width = draw(tensors.WIDTHS)
    width = width // groups * groups if groups else width
    size = tensors.shape(draw, width=width)
    late = draw(st.booleans())
    arguments = {
        "x": tensors.tensor(draw, size, dtype, draw(st.sampled_from([1.0, 1e-2, 1e2]))),
        "gate": tensors.tensor(draw, size, dtype, draw(st.sampled_from([1.0, 5.0]))),
        "weight": tensors.tensor(draw, size[-1:], tensors.same_or_float32(draw, dtype)),
        "eps": draw(EPS),
        "activation": draw(st.sampled_from(["silu", "sigmoid"])),
        "gate_first": gate_first,
        "late": late,
        "group_size": width // groups if groups else 0,
    }

    def check(results: list[Tensor]) -> None:
        (want,) = exact("gated_rms_norm", arguments)
        wide = arguments["weight"].dtype
        assert results[0].dtype == (wide if gate_first and not late else dtype)
        roundings = UNIT[dtype] * 2 + (0 if late else UNIT[wide])
        # What is rounded on the way: the row, then the row times the weight.
        largest = arguments["weight"].double().abs() + 1
        if not gate_first:
            largest = largest * (arguments["gate"].double().abs() + 1)
        bound = (1.02 * roundings + noise(width)) * want.abs() + 2 * TINY[dtype] * largest
        assert_within(results[0], want, bound)

    return Case(arguments, check)


@fuzzes("layer_norm")
def layer_norm(draw: DrawFn) -> Case:
    dtype = draw(tensors.DTYPES)
    size, wide = tensors.shape(draw), tensors.same_or_float32(draw, dtype)
    x = tensors.tensor(draw, size, dtype, draw(st.sampled_from([1.0, 1e-2, 10.0])))
    arguments = {
        "x": x,
        "weight": tensors.maybe(draw, size[-1:], wide),
        "bias": tensors.maybe(draw, size[-1:], wide),
        "eps": draw(EPS),
    }

    def check(results: list[Tensor]) -> None:
        (want,) = exact("layer_norm", arguments)
        assert results[0].dtype == dtype
        if not x.numel():
            return assert_within(results[0], want, 0.0)
        wide_x, unit = x.double(), noise(size[-1])
        deviation = (wide_x.var(-1, keepdim=True, unbiased=False) + arguments["eps"]).sqrt()
        # The mean is known to this; an error of it acts on each difference and on the deviation.
        mean = unit * wide_x.abs().amax(-1, keepdim=True) / deviation
        centred = (wide_x - wide_x.mean(-1, keepdim=True)).abs() / deviation
        error = (mean + centred * (unit + 2 * mean + mean**2)) * 1.5
        for_weight = 1.0 if arguments["weight"] is None else double(arguments["weight"]).abs()
        shift = 0.0 if arguments["bias"] is None else double(arguments["bias"]).abs()
        bound = for_weight * error + unit * shift + 1.02 * UNIT[dtype] * want.abs() + TINY[dtype]
        # Rounded once, from a number that is off by the above.
        assert_within(results[0], want, bound * (1 + 2 * UNIT[dtype]))

    return Case(arguments, check)
