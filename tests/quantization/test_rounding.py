"""Weights to integers: errors, scales, edges, and what is refused."""

from __future__ import annotations

import pytest
import torch

from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.ops.quantized_linear import dequantize_w4, dequantize_w8
from liteboost_adaptor.quantization import QuantScheme
from liteboost_adaptor.quantization.calibration import gptq
from liteboost_adaptor.quantization.schemes import QuantizedTensor, rounding

SCHEMES = [
    QuantScheme("w8a16"),
    *(QuantScheme("w4a16", size, symmetric) for size in (32, 64, 128) for symmetric in (True, False)),
]


def back(quantized: QuantizedTensor, scheme: QuantScheme) -> torch.Tensor:
    dequantize = dequantize_w8 if scheme.bits == 8 else dequantize_w4
    return dequantize(**quantized.tensors())


def plain_error(weight: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The squared error of rounding with the largest magnitude at the end of the range, nothing clipped."""
    groups = weight.reshape(len(weight), -1, weight.shape[1] if scheme.bits == 8 else scheme.group_size)
    if scheme.symmetric:
        scales = groups.abs().amax(-1, keepdim=True) / (127 if scheme.bits == 8 else 7)
        return (groups - (groups / scales).round() * scales).square().sum()
    lowest, highest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (highest - lowest) / 15
    zeros = (-lowest / scales).round()
    return (groups - ((groups / scales + zeros).round().clamp(0, 15) - zeros) * scales).square().sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_search_is_better_than_plain_rounding(scheme: QuantScheme) -> None:
    weight = torch.randn(40, 256) * torch.rand(40, 1)
    quantized = rounding.quantize(weight, scheme)
    for name, (shape, dtype) in scheme.buffer_specs(40, 256).items():
        assert quantized.tensors()[name].shape == shape and quantized.tensors()[name].dtype == dtype
    error = (back(quantized, scheme) - weight).square().sum()
    assert 0 < error < (1.001 if scheme.bits == 8 else 0.95) * plain_error(weight, scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_the_integers_can_say_comes_back(scheme: QuantScheme) -> None:
    integers = torch.randint(-7, 8, (12, 128)).float()
    integers[:, ::32] = -8  # the whole range is used
    integers[:, 1::32] = 7
    if scheme.bits == 8:
        integers[:, 0] = 127
    weight = integers * 0.125
    assert torch.equal(back(rounding.quantize(weight, scheme), scheme), weight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zeros_and_tiny_numbers_stay_finite(scheme: QuantScheme) -> None:
    weight = torch.zeros(4, 256)
    weight[1] = 1e-44
    weight[2, 5] = 3.0
    found = back(rounding.quantize(weight, scheme), scheme)
    assert torch.isfinite(found).all() and not found[0].any() and not found[3].any()
    assert found[2, 5] == pytest.approx(3.0, rel=0.005) and found[2].count_nonzero() == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_chunks_change_nothing(scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 128).bfloat16()
    whole = rounding.quantize(weight, scheme).tensors()
    monkeypatch.setattr(rounding, "CHUNK", 5 * 128)
    parts = rounding.quantize(weight, scheme).tensors()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(value: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 3] = value
    with pytest.raises(QuantizationError, match=r"model\.layer\.weight holds values that are infinite"):
        rounding.quantize(weight, QuantScheme("w4a16"), "model.layer.weight")


def test_a_weight_too_large_for_its_scales_is_refused_by_name() -> None:
    scheme = QuantScheme("w4a16", scale_dtype_name="float16")
    weight = torch.randn(4, 64)
    weight[2, 3] = 1e7
    with pytest.raises(
        QuantizationError, match=r"head\.weight holds values up to 1e\+07, too large for scales in"
    ):
        rounding.quantize(weight, scheme, "head.weight")
    rounding.quantize(weight, QuantScheme("w4a16"))


def test_gptq_refuses_a_weight_that_is_no_number() -> None:
    weight = torch.randn(4, 64)
    weight[2, 3] = float("inf")
    for scheme in (QuantScheme("w4a16"), QuantScheme("w8a16")):
        with pytest.raises(QuantizationError, match=r"proj\.weight holds values that are infinite"):
            gptq.quantize(weight, scheme, torch.eye(64), "proj.weight")


def test_a_weight_that_does_not_suit_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"in_features = 48 is not a multiple of the group size 32"):
        rounding.quantize(torch.randn(4, 48), QuantScheme("w4a16"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("w2a16",), "scheme must be one of w8a16, w4a16, w8a8, w4a8, got 'w2a16'"),
        (("w4a16", 48), "group_size must be one of 32, 64, 128, got 48"),
        (("w4a16", 32, "yes"), "symmetric must be True or False"),
        (("w8a16", 32, False), "w8a16 is symmetric"),
    ],
)
def test_schemes_that_are_none(arguments: tuple, text: str) -> None:
    with pytest.raises(QuantizationError, match=text):
        QuantScheme(*arguments)
