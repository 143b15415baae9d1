"""`linear_w8a8` as two aclnn operators: rows to integers, and their product."""

from __future__ import annotations

import os

import pytest
import torch
from cann_sim.releases import DEFAULT_RELEASE, RELEASES
from support import npu_ops, quantized_layers

from liteboost_adaptor.ops.int8_linear import linear_w8a8, quantize_rows
from liteboost_adaptor.quantization.schemes import QuantScheme

DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Up to there the product takes no more columns than 65,535.
BEFORE_9_1 = RELEASES.index(os.environ.get("SIMCANN_VERSION", DEFAULT_RELEASE)) < RELEASES.index("9.1.0")
LAUNCHES = ["DynamicQuant", "QuantMatmulV5"]


def layer(outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    return {"weight": weight, "scales": torch.rand(outputs) * 0.01 + 0.001}


def near(result: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, **weights: torch.Tensor) -> None:
    """The reference, but for one step of every element that is near a tie: division rounds otherwise."""
    assert result.dtype == x.dtype and result.is_contiguous()
    exact = linear_w8a8(x.float(), **weights, bias=None if bias is None else bias.float()).double()
    integers, row_scales = quantize_rows(x)
    steps = x.double() / row_scales.double()
    is_close = ((steps - steps.floor() - 0.5).abs() < 1e-4).double()
    slack = (is_close @ weights["weight"].double().abs().t()) * row_scales.double()
    slack = slack * weights["scales"].double().abs()
    size = (integers.double().abs() @ weights["weight"].double().abs().t()) * row_scales.double()
    size = size * weights["scales"].double().abs()
    bound = slack + 1.01 * UNIT[x.dtype] * (exact.abs() + slack) + 8 * 2.0**-24 * size + 2.0**-24
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 7, 129), (300, 64), (40,), (2, 2, 2, 33), (1, 1)], ids=str)
def test_two_launches(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    x, weights = torch.randn(shape).to(dtype), layer(70, shape[-1])
    added = torch.randn(70).to(dtype) if bias else None
    found = npu_ops.run("linear_w8a8", x=x, **weights, bias=added)
    assert found.reasons == [] and found.launches == LAUNCHES
    near(found.results[0], x, added, **weights)


def test_outliers_and_rows_of_zeros() -> None:
    x, weights = torch.randn(6, 128).bfloat16(), layer(48, 128)
    x[1] = 0
    x[2, 5], x[3] = 1000, x[3] * 1e-20
    added = torch.randn(48).bfloat16()
    found = npu_ops.run("linear_w8a8", x=x, **weights, bias=added)
    near(found.results[0], x, added, **weights)
    assert torch.equal(found.results[0][1], added)


def test_scales_of_other_dtypes_are_cast() -> None:
    x, weights = torch.randn(3, 64).bfloat16(), layer(33, 64)
    weights["scales"] = weights["scales"].bfloat16()
    found = npu_ops.run("linear_w8a8", x=x, **weights, bias=None)
    assert found.reasons == [] and found.launches == ["DynamicQuant", "InplaceCopy", "QuantMatmulV5"]
    near(found.results[0], x, None, **weights)


def test_strides() -> None:
    wide, x = layer(80, 192), torch.randn(4, 6, 96).bfloat16()
    scales = wide["scales"]
    views = {
        "x permuted": (x.transpose(0, 1), wide["weight"][:, :96].contiguous()),
        "x a slice": (x[..., 16:], wide["weight"][:, :80].contiguous()),
        "x expanded": (x[:1].expand(4, 6, 96), wide["weight"][:, :96].contiguous()),
        "rows of a wider weight": (x, wide["weight"][:, 96:]),
    }
    for name, (rows, matrix) in views.items():
        found = npu_ops.run("linear_w8a8", x=rows, weight=matrix, scales=scales, bias=None)
        assert found.reasons == [] and set(LAUNCHES) <= set(found.launches), name
        near(found.results[0], rows, None, weight=matrix, scales=scales)


@pytest.mark.parametrize("sizes", [(65600, 32), (16, 70000)], ids=str)
def test_many_outputs_and_many_inputs_are_one_product(sizes: tuple[int, int]) -> None:
    x, weights = torch.randn(2, sizes[1]).bfloat16(), layer(*sizes)
    found = npu_ops.run("linear_w8a8", x=x, **weights, bias=None)
    if sizes[1] > 65535 and BEFORE_9_1:
        assert "at most 65535" in found.reasons[0]
    else:
        assert found.reasons == [] and found.launches == LAUNCHES
    near(found.results[0], x, None, **weights)


def test_what_the_operators_do_not_take_is_counted() -> None:
    weights = layer(8, 32)
    for x, reason in ((torch.randn(2, 32), "fp32"), (torch.randn(0, 32).bfloat16(), "no elements")):
        found = npu_ops.run("linear_w8a8", x=x, **weights, bias=None)
        assert found.reasons == [reason]
        assert torch.allclose(found.results[0], linear_w8a8(x, **weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_there_is_saved_as_ever(dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(128, 48).to(dtype)
    made = quantized_layers.linear(plain, QuantScheme("w8a8"))
    saved = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    x = torch.randn(1, 1, 128).to(dtype)
    with torch.no_grad():
        there = made.to("npu")
        there(x.npu())
        with npu_ops.trace.recording() as recorded:
            result = there(x.npu()).cpu()
    weights = {name: tensor for name, tensor in saved.items() if name != "bias"}
    near(result, x, plain.bias.detach().cpu(), **weights)
    assert [launch for launch in npu_ops.named(recorded.ops) if launch != "InplaceCopy"] == LAUNCHES
    found = {name: tensor.cpu() for name, tensor in there.state_dict().items()}
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
