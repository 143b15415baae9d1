"""`linear_packed` as an aclnn operator: odd sizes, strides, groups, and layers as they lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import npu_ops, quantized_layers
from support.quantized_layers import packed

from liteboost_adaptor.ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    from_int4,
    pack_w4,
    prepack_scales,
)
from liteboost_adaptor.quantization.schemes import QuantScheme

DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return {"weight": weight, "scales": (torch.rand(outputs) * 0.01 + 0.001).to(dtype)}


def layer_w4(outputs: int, inputs: int, group: int, zeros: bool) -> dict[str, torch.Tensor]:
    weights = {
        "weight": pack_w4(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)),
        "scales": (torch.rand(outputs, inputs // group) * 0.1 + 0.01).bfloat16(),
    }
    if zeros:
        weights["zero_points"] = torch.randint(0, 17, (outputs, inputs // group), dtype=torch.uint8)
    return weights


def product(x: torch.Tensor, bias: torch.Tensor | None = None, **weights: torch.Tensor) -> npu_ops.Run:
    """As layers on an NPU call it: 8 bits as they are saved, 4 as CANN packs them."""
    own = weights
    if weights["weight"].dtype == torch.uint8:
        own = {
            "weight": torch.ops.liteboost._npu_int4(weights["weight"].npu()).cpu(),
            "scales": weights["scales"].t().contiguous(),
        }
        if "zero_points" in weights:
            own["offsets"] = (8 - weights["zero_points"].to(x.dtype)).t().contiguous()
    return npu_ops.run(
        "_npu_linear_packed", counted_as="linear_packed", x=x, bias=bias, **{"offsets": None, **own}
    )


def close(found: npu_ops.Run, x: torch.Tensor, bias: torch.Tensor | None, **weights: torch.Tensor) -> None:
    """Scale and weight are rounded to x's dtype, then the sum, once each; products are summed in fp32."""
    near(found.results[0], x, bias, **weights)


def near(result: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, **weights: torch.Tensor) -> None:
    dequantize = dequantize_w8 if weights["weight"].dtype == torch.int8 else dequantize_w4
    weight = dequantize(**weights, dtype=torch.float64)
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    products = F.linear(x.double().abs(), weight.abs(), None if bias is None else bias.double().abs())
    assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
    unit = UNIT[x.dtype]
    bound = 1.01 * unit * exact.abs() + (2.02 * unit + 2.0**-20) * products + 2.0**-24
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 7, 129), (300, 64), (40,), (2, 2, 2, 33), (1, 1)], ids=str)
def test_one_product(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    x, weights = torch.randn(shape).to(dtype), layer(70, shape[-1], dtype)
    added = torch.randn(70).to(dtype) if bias else None
    found = product(x, added, **weights)
    # Beside bf16 the operator takes a bias in fp32 only.
    casts = ["InplaceCopy"] if bias and dtype == torch.bfloat16 else []
    assert found.reasons == [] and found.launches == [*casts, "WeightQuantBatchMatmulV3"]
    close(found, x, added, **weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_more_digits_are_cast(dtype: torch.dtype) -> None:
    x, weights = torch.randn(3, 64).to(dtype), layer(33, 64)
    found = product(x, **weights)
    assert found.reasons == [] and found.launches == ["InplaceCopy", "WeightQuantBatchMatmulV3"]
    close(found, x, None, **weights)


def test_strides() -> None:
    wide, x = layer(80, 192, torch.bfloat16), torch.randn(4, 6, 96).bfloat16()
    scales = wide["scales"]
    views = {
        "x permuted": (x.transpose(0, 1), wide["weight"][:, :96].contiguous()),
        "x a slice": (x[..., 16:], wide["weight"][:, :80].contiguous()),
        "x expanded": (x[:1].expand(4, 6, 96), wide["weight"][:, :96].contiguous()),
        "rows of a wider weight": (x, wide["weight"][:, 96:]),
        "weight transposed": (x, wide["weight"].t()[:96, :80].contiguous().t()),
    }
    for name, (rows, matrix) in views.items():
        found = product(rows, weight=matrix, scales=scales)
        assert found.reasons == [] and "WeightQuantBatchMatmulV3" in found.launches, name
        close(found, rows, None, weight=matrix, scales=scales)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("outputs", [65535, 65536, 140000])
def test_a_large_vocabulary_is_multiplied_in_parts(outputs: int, rows: int) -> None:
    x, weights = torch.randn(rows, 32).bfloat16(), layer(outputs, 32, torch.bfloat16)
    added = torch.randn(outputs).bfloat16()
    found = product(x, added, **weights)
    parts = found.launches.count("WeightQuantBatchMatmulV3")
    assert found.reasons == [] and parts == -(-outputs // 65535)
    close(found, x, added, **weights)


def test_what_the_operator_does_not_take_is_counted() -> None:
    weights = layer(8, 32)
    for x, reason in ((torch.randn(2, 32), "fp32"), (torch.randn(0, 32).bfloat16(), "no elements")):
        found = product(x, **weights)
        assert found.reasons == [reason]
        exact = F.linear(x.double(), dequantize_w8(**weights, dtype=torch.float64))
        assert torch.allclose(found.results[0].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "group", "zeros"),
    [(96, 32, False), (96, 32, True), (128, 64, True), (256, 128, False), (32, 32, True), (128, 128, False)],
)
def test_w4(inputs: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    for rows, outputs in ((1, 33), (7, 80)):
        x, added = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
        weights = layer_w4(outputs, inputs, group, zeros)
        found = product(x, added, **weights)
        assert found.reasons == [] and found.launches[-1] == "WeightQuantBatchMatmulV3"
        close(found, x, added, **weights)


@pytest.mark.parametrize("outputs", [65536, 70001])
def test_w4_of_a_large_vocabulary(outputs: int) -> None:
    x, weights = torch.randn(2, 64).bfloat16(), layer_w4(outputs, 64, 32, True)
    found = product(x, **weights)
    assert found.reasons == [] and found.launches.count("WeightQuantBatchMatmulV3") == 2
    close(found, x, None, **weights)


FORMS = [(8, 129, 0, False), (4, 96, 32, False), (4, 96, 32, True), (4, 128, 128, False)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "inputs", "group", "zeros"), FORMS)
def test_tiles_of_a_cpu_are_laid_out_first(
    bits: int, inputs: int, group: int, zeros: bool, dtype: torch.dtype
) -> None:
    """What the comparison with the reference calls."""
    for outputs in (33, 64):
        weights = layer(outputs, inputs) if bits == 8 else layer_w4(outputs, inputs, group, zeros)
        x, added = torch.randn(3, inputs).to(dtype), torch.randn(outputs).to(dtype)
        found = npu_ops.run("linear_packed", x=x, **packed(weights), bias=added, out_features=outputs)
        assert found.reasons == [] and found.launches[-1] == "WeightQuantBatchMatmulV3"
        close(found, x, added, **weights)


def test_tiles_that_the_operator_does_not_take_are_counted() -> None:
    weights = layer(24, 64)
    grouped = {
        **packed(weights),
        "scales": prepack_scales(weights["scales"][:, None].repeat(1, 2)),
    }
    cases = (
        (torch.randn(2, 64), packed(weights), "fp32"),
        (torch.randn(0, 64).bfloat16(), packed(weights), "no elements"),
        (torch.randn(2, 64).bfloat16(), grouped, "8 bits in groups"),
    )
    for x, given, reason in cases:
        found = npu_ops.run("linear_packed", x=x, **given, bias=None, out_features=24)
        assert found.reasons == [reason]
        exact = F.linear(x.double(), dequantize_w8(**weights, dtype=torch.float64))
        assert torch.allclose(found.results[0].double(), exact, rtol=2e-2, atol=2e-2)


def test_words_are_packed_as_is_documented() -> None:
    integers = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    words = torch.ops.liteboost._npu_int4(pack_w4(integers).npu()).cpu()
    assert words.dtype == torch.int32 and words.shape == (3, 12)
    for column in range(96):
        nibble = words[:, column // 8].long() >> 4 * (column % 8) & 15
        assert torch.equal(nibble, (integers[:, column].long() - 8) & 15)
    assert torch.equal(from_int4(words), pack_w4(integers))


SCHEMES = [QuantScheme("w8a16"), QuantScheme("w4a16"), QuantScheme("w4a16", 64, symmetric=False)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.symmetric}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_one_product_and_is_saved_as_ever(scheme: QuantScheme, dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(128, 48).to(dtype)
    layer = quantized_layers.linear(plain, scheme)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(1, 1, 128).to(dtype)
    weights = {name: tensor for name, tensor in saved.items() if name != "bias"}
    with torch.no_grad():
        there = layer.to("npu")
        assert there.is_packed
        there(x.npu())
        with npu_ops.trace.recording() as recorded:
            result = there(x.npu()).cpu()
    near(result[0], x[0], plain.bias.detach().cpu(), **weights)
    of_scales = 0 if dtype == torch.bfloat16 or scheme.bits == 8 else 1 + (not scheme.symmetric)
    casts = of_scales + (dtype == torch.bfloat16)  # of the bias, to fp32
    launches = npu_ops.named(recorded.ops)
    ours = [launch for launch in launches if launch != "InplaceCopy"]
    assert ours == ["WeightQuantBatchMatmulV3"] and launches.count("InplaceCopy") == casts
    for model in (there, there.cpu()):
        found = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_what_is_loaded_and_changed_there_counts() -> None:
    scheme, x = QuantScheme("w8a16"), torch.randn(2, 64).bfloat16()
    layers = [
        quantized_layers.linear(torch.nn.Linear(64, 32, bias=False).bfloat16(), scheme) for _ in range(2)
    ]
    other = layers[1].state_dict()
    with torch.no_grad():
        layers[0].to("npu").load_state_dict(other)
        assert layers[0].is_packed
        near(layers[0](x.npu()).cpu(), x, None, **other)
        layers[0].scales.mul_(2)
        twice = {**other, "scales": layers[0].state_dict()["scales"].cpu()}
        assert torch.allclose(twice["scales"], 2 * other["scales"], rtol=2**-8)
        near(layers[0](x.npu()).cpu(), x, None, **twice)
    assert torch.equal(layers[1].state_dict()["scales"], other["scales"])
