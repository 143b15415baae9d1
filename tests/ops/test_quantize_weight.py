"""`quantize_w8` and `quantize_w4` against float64, at every instruction set, length and layout."""

from __future__ import annotations

import pytest
import torch
from support.compare import DTYPES, SIZES, same_bits, sentinel_view
from torch import Tensor

from liteboost_adaptor.ops import quantize_weight as reference
from liteboost_adaptor.ops.quantized_linear import dequantize_w4, dequantize_w8, unpack_w4

ops = torch.ops.liteboost
FP32, BF16 = torch.float32, torch.bfloat16
GROUPS = [(32, True), (32, False), (64, True), (96, False), (128, True), (128, False)]


def same(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Bit by bit, but for what a NaN says."""
    return all(same_bits(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(found, want, strict=True))


def exhaustive(group: Tensor, low: int, high: int, zeros: range) -> float:
    """The least squared error of a group in float64 over a fine sweep of scales and all zero points."""
    best = float("inf")
    largest = group.abs().max().item()
    for sign in (1, -1):
        for zero in zeros:
            scales = sign * largest * torch.linspace(0.3, 2.2, 400).double() / max(high - zero, zero - low)
            integers = (group[None] / scales[:, None] + zero).round().clamp(low, high) - zero
            errors = (group[None] - integers * scales[:, None]).square().sum(-1)
            best = min(best, errors.min().item())
    return best


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_w8_at_every_length(isa: str, dtype: torch.dtype, size: int) -> None:
    weight = (torch.randn(3, size) * torch.tensor([1.0, 1e-3, 40.0])[:, None]).to(dtype)
    for scale_dtype in DTYPES:
        found = ops.quantize_w8(weight, scale_dtype)
        assert same(found, reference.quantize_w8(weight, scale_dtype))
        assert found[0].dtype == torch.int8 and found[1].dtype == scale_dtype
    integers, scales = ops.quantize_w8(weight, FP32)
    nearest = (weight.double() / scales.double()[:, None]).clamp(-127, 127)
    assert ((integers - nearest).abs() <= 0.5001).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "symmetric"), GROUPS)
def test_w4_of_every_group(isa: str, dtype: torch.dtype, group: int, symmetric: bool) -> None:
    weight = (torch.randn(5, 3 * group) + torch.tensor([0, 0.5, -4, 9, 0])[:, None]).to(dtype)
    for scale_dtype in DTYPES:
        found = ops.quantize_w4(weight, group, symmetric, scale_dtype)
        assert same(found, reference.quantize_w4(weight, group, symmetric, scale_dtype))
        assert found[1].dtype == scale_dtype and found[2].dtype == torch.uint8
    packed, scales, zeros = ops.quantize_w4(weight, group, symmetric, FP32)
    integers = unpack_w4(packed).reshape(5, 3, group).double()
    nearest = weight.double().reshape(5, 3, group) / scales.double()[..., None] + zeros[..., None]
    assert ((integers - nearest.clamp(0, 15)).abs() <= 0.5001).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_w4_is_near_the_best_there_is(symmetric: bool) -> None:
    weight = torch.randn(24, 32)
    found = ops.quantize_w4(weight, 32, symmetric, FP32)
    errors = (dequantize_w4(*found, dtype=torch.float64) - weight).square().sum(-1)
    zeros = range(8, 9) if symmetric else range(4, 12)
    best = torch.tensor([exhaustive(row.double(), 0, 15, zeros) for row in weight])
    assert (errors / best).mean() < (1.1 if symmetric else 1.25)


def test_w8_is_near_the_best_there_is() -> None:
    weight = torch.randn(24, 96)
    errors = (dequantize_w8(*ops.quantize_w8(weight, FP32), dtype=torch.float64) - weight).square().sum(-1)
    best = torch.tensor([exhaustive(row.double(), -127, 127, range(1)) for row in weight])
    assert (errors / best).mean() < 1.25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_give_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 96).to(dtype)
    views = {
        "transposed": weight.mT.contiguous().mT,
        "rows apart": torch.cat((weight, weight), -1)[:, :96],
        "every other": torch.stack((weight, weight), -1)[..., 0],
        "sentinels": sentinel_view(weight),
    }
    w8, w4 = ops.quantize_w8(weight, FP32), ops.quantize_w4(weight, 32, False, BF16)
    for name, view in views.items():
        assert same(ops.quantize_w8(view, FP32), w8), name
        assert same(ops.quantize_w4(view, 32, False, BF16), w4), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_has_no_scale(isa: str, value: float) -> None:
    weight = torch.randn(3, 64)
    weight[1, 40] = value
    integers, scales = ops.quantize_w8(weight, FP32)
    assert scales.isnan().tolist() == [False, True, False] and not integers[1].any() and integers[0].any()
    for symmetric in (True, False):
        packed, scales, zeros = ops.quantize_w4(weight, 32, symmetric, BF16)
        assert scales.isnan().tolist() == [[False, False], [False, True], [False, False]]
        assert (unpack_w4(packed)[1, 32:] == zeros[1, 1]).all()


@pytest.mark.parametrize("largest", [3e38, 1e6])
def test_scales_beyond_their_dtype_are_not_a_number(isa: str, largest: float) -> None:
    weight = torch.randn(2, 32).clamp(-1, 1)
    weight[1] *= largest
    for found in (
        ops.quantize_w8(weight * 127, torch.float16)[1],
        ops.quantize_w4(weight, 32, True, torch.float16)[1],
    ):
        assert found.flatten().isnan().tolist() == [False, True]
    weight[1] *= 0.1 / largest
    assert ops.quantize_w8(weight, torch.float16)[1].isfinite().all()


def test_zeros_and_what_is_too_small_have_scale_1(isa: str) -> None:
    weight = torch.zeros(2, 32)
    weight[1] = 1e-45
    for scales in (
        ops.quantize_w8(weight, torch.float16)[1],
        ops.quantize_w4(weight, 32, False, torch.float16)[1],
    ):
        assert (scales == 1).all()


def test_more_columns_than_are_summed_at_once(isa: str) -> None:
    weight = torch.randn(2, 40_001).bfloat16()
    assert same(ops.quantize_w8(weight, FP32), reference.quantize_w8(weight, FP32))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0)])
def test_empty(isa: str, shape: tuple[int, int]) -> None:
    weight = torch.empty(shape)
    assert same(ops.quantize_w8(weight, FP32), reference.quantize_w8(weight, FP32))
    assert same(ops.quantize_w4(weight, 32, True, BF16), reference.quantize_w4(weight, 32, True, BF16))


def test_result_does_not_depend_on_threads() -> None:
    weight = torch.randn(37, 4096).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = ops.quantize_w4(weight, 32, True, BF16)
        torch.set_num_threads(3)
        assert same(ops.quantize_w4(weight, 32, True, BF16), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("package", [ops, reference], ids=["op", "reference"])
def test_what_does_not_fit_is_refused(package) -> None:
    weight = torch.randn(4, 64)
    with pytest.raises(TypeError, match=r"liteboost::quantize_w8: weight must be float32"):
        package.quantize_w8(weight.long(), FP32)
    with pytest.raises(
        TypeError, match=r"liteboost::quantize_w8: scale_dtype must be float32, bfloat16 or float16"
    ):
        package.quantize_w8(weight, torch.int8)
    with pytest.raises(ValueError, match=r"liteboost::quantize_w8: weight must have shape \[out_features"):
        package.quantize_w8(weight[0], FP32)
    with pytest.raises(
        ValueError, match=r"liteboost::quantize_w4: group_size must be a multiple of 32, got 48"
    ):
        package.quantize_w4(weight, 48, True, BF16)
    with pytest.raises(
        ValueError, match=r"liteboost::quantize_w4: weight must have a multiple of group_size"
    ):
        package.quantize_w4(weight, 128, True, BF16)


def test_gradient_is_refused(isa: str) -> None:
    weight = torch.randn(2, 32, requires_grad=True)
    for call in (lambda: ops.quantize_w8(weight, FP32), lambda: ops.quantize_w4(weight, 32, True, BF16)):
        with pytest.raises(RuntimeError, match="has no backward"):
            call()
        with torch.no_grad():
            call()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64).to(dtype)
    torch.library.opcheck(ops.quantize_w8, (weight, FP32))
    torch.library.opcheck(ops.quantize_w4, (weight, 32, False, BF16))
