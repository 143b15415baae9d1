"""Experts of integers as an aclnn operator: no host that waits, and only experts that are named are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import npu_ops
from support.quantized_layers import packed

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    pack_w4,
)
from liteboost_adaptor.quantization.layers import QuantizedExperts, WeightShape
from liteboost_adaptor.quantization.schemes import QuantScheme

pytestmark = pytest.mark.usefixtures("no_grad")
DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GROUPED = "GroupedMatmulV4"


def layer(bits: int, experts: int, outputs: int, inputs: int, group: int = 32, zeros: bool = False) -> Any:
    """Weights of all experts as they are saved."""
    rows = experts * outputs
    if bits == 8:
        weight = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
        return {"weight": weight, "scales": torch.rand(rows) * 0.01 + 0.001}
    weights = {
        "weight": pack_w4(torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)),
        "scales": (torch.rand(rows, inputs // group) * 0.1 + 0.01).bfloat16(),
    }
    if zeros:
        weights["zero_points"] = torch.randint(0, 17, (rows, inputs // group), dtype=torch.uint8)
    return weights


def near(result: torch.Tensor, x: torch.Tensor, bias: Any, index: torch.Tensor, weights: Any, n: int) -> None:
    """Each weight, its scale and the sum are rounded to the dtype of x once; products are summed in fp32."""
    dequantize = dequantize_w8 if weights["weight"].dtype == torch.int8 else dequantize_w4
    weight = dequantize(**weights, dtype=torch.float64).unflatten(0, (-1, n))
    weight = torch.cat([weight, torch.zeros_like(weight[:1])])
    added = torch.zeros(len(weight), n, dtype=torch.float64)
    if bias is not None:
        added[:-1] = bias.double()
    rows = x.double() if x.dim() == 3 else x.double()[:, None].expand(-1, index.shape[1], -1)
    exact = torch.einsum("tsk,tsnk->tsn", rows, weight[index]) + added[index]
    size = torch.einsum("tsk,tsnk->tsn", rows.abs(), weight[index].abs()) + added[index].abs()
    unit = UNIT[x.dtype]
    assert result.shape == exact.shape and result.dtype == x.dtype
    bound = 1.01 * unit * exact.abs() + (2.02 * unit + 2.0**-20) * size + 2.0**-24
    assert bool(((result.cpu().double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shared", [True, False], ids=["a row a token", "a row a slot"])
@pytest.mark.parametrize(("bits", "inputs", "group"), [(8, 41, 0), (4, 96, 32), (4, 128, 64), (4, 64, 64)])
def test_one_product(
    bits: int, inputs: int, group: int, shared: bool, bias: bool, dtype: torch.dtype
) -> None:
    experts, outputs = 5, 48
    weights = layer(bits, experts, outputs, inputs, group)
    for tokens, slots in ((1, 2), (9, 3)):
        index = torch.randint(0, experts + 1, (tokens, slots))
        x = torch.randn(*((tokens, inputs) if shared else (tokens, slots, inputs))).to(dtype)
        added = torch.randn(experts, outputs).to(dtype) if bias else None
        arguments = packed(weights) | {
            "x": x,
            "bias": added,
            "index": index,
            "out_features": outputs,
        }
        found = npu_ops.run("experts_packed", **arguments)
        assert found.reasons == [] and found.launches.count(GROUPED) == 1
        near(found.results[0], x, added, index, weights, outputs)


def module(scheme: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> QuantizedExperts:
    made = QuantScheme(scheme, **options)
    parameter = torch.randn(6, 64, 96).to(dtype) * 0.1
    shape = WeightShape.of(parameter, False)
    experts = QuantizedExperts(shape, made, dtype, "meta").eval()
    experts.fill(shape.quantize(parameter, made, "experts"))
    return experts


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_a_layer_there_launches_no_more_than_plain_experts_and_is_saved_as_ever(scheme: str) -> None:
    there = module(scheme, **({"group_size": 32} if scheme == "w4a16" else {}))
    saved = {name: tensor.clone() for name, tensor in there.state_dict().items()}
    there = there.to("npu")
    x, index = torch.randn(7, 96).bfloat16(), torch.randint(0, 7, (7, 2))
    plain = torch.randn(6, 64, 96).bfloat16().npu()
    there.product(x.npu(), None, index.npu())
    torch.ops.liteboost.experts_linear(x.npu(), plain, None, index.npu())
    given = x.npu(), None, index.npu()
    with npu_ops._memory_left_as_it_is(), npu_ops.trace.recording() as ours:
        result = there.product(*given)
    with npu_ops._memory_left_as_it_is(), npu_ops.trace.recording() as theirs:
        torch.ops.liteboost.experts_linear(given[0], plain, None, given[2])
    assert ours.ops == theirs.ops and not ours.synchronisations and not ours.copies("d2h")
    near(result, x, None, index, saved, 64)
    found = {name: tensor.cpu() for name, tensor in there.state_dict().items()}
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize(("scheme", "bits"), [("w8a16", 8), ("w4a16", 4)])
def test_only_the_integers_of_experts_named_are_read(scheme: str, bits: int) -> None:
    there = module(scheme).to("npu")
    x, index = torch.randn(1, 96).bfloat16().npu(), torch.tensor([[1, 4]]).npu()
    there.product(x, None, index)
    with npu_ops.trace.recording() as recorded:
        there.product(x, None, index)
    (launch,) = [each for each in recorded.launches if each.op.endswith(GROUPED)]
    assert launch.argument("weight").read == 2 * 64 * 96 * bits // 8


def test_what_the_operator_does_not_take_is_multiplied_one_by_one_and_counted() -> None:
    index = torch.randint(0, 6, (4, 2))
    zeros, plain = layer(4, 5, 32, 96, 32, zeros=True), layer(8, 5, 32, 96)
    for weights, dtype, reason in (
        (zeros, torch.bfloat16, "zero points in groups"),
        (plain, torch.float32, "fp32"),
        (layer(4, 5, 32, 96), torch.float32, "fp32"),
    ):
        x = torch.randn(4, 96).to(dtype)
        arguments = packed(weights) | {
            "x": x,
            "bias": None,
            "index": index,
            "out_features": 32,
        }
        found = npu_ops.run("experts_packed", **arguments)
        assert reason in found.reasons
        if dtype != torch.float32:
            near(found.results[0], x, None, index, weights, 32)


def test_zero_points_of_one_group_are_offsets() -> None:
    index, x = torch.randint(0, 6, (4, 2)), torch.randn(4, 64).bfloat16()
    weights = layer(4, 5, 32, 64, 64, zeros=True)
    arguments = packed(weights) | {"x": x, "bias": None, "index": index, "out_features": 32}
    found = npu_ops.run("experts_packed", **arguments)
    assert found.reasons == [] and native_npu.calls()
    near(found.results[0], x, None, index, weights, 32)
