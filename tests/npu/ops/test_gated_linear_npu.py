"""`gated_linear` on the NPU: the products write what the activation reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import npu_ops
from support.compare import DTYPES
from torch import Tensor

from liteboost_adaptor.ops import ops
from liteboost_adaptor.ops.activation import ACTIVATIONS

ENDS = {"silu": ["SwiGlu"], "gelu": ["GeGluV3"], "gelu_tanh": ["GeGluV3"], "relu": ["Relu", "Mul"]}
ENDS |= {"relu2": ["Relu", "Mul", "Mul"], "sigmoid": ["Sigmoid", "Mul"]}


def make(rows: tuple[int, ...], dtype: torch.dtype, biases: str = "") -> dict[str, Tensor | None]:
    n, k = 80, 96
    gate, up = torch.randn(2, n, k).mul(k**-0.5).to(dtype)
    gate_bias, up_bias = torch.randn(2, n).to(dtype)
    return {
        "x": torch.randn(*rows, k).to(dtype),
        "gate_weight": gate.clone(),
        "gate_bias": gate_bias.clone() if "gate" in biases else None,
        "up_weight": up.clone(),
        "up_bias": up_bias.clone() if "up" in biases else None,
    }


def close(found: npu_ops.Run, arguments: dict[str, object]) -> None:
    """No further off than the original code, which rounds what the activation gives, too."""
    (result,) = found.results
    doubled = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    exact = ops()["gated_linear"].reference(**doubled)
    assert result.shape == exact.shape and result.dtype == arguments["x"].dtype and result.is_contiguous()
    x, gate, gate_bias, up, up_bias = list(arguments.values())[:5]
    act = arguments.get("activation", "silu"), arguments.get("alpha", 1.0)
    activated = ops()["activation"].reference(F.linear(x, gate, gate_bias), *act)
    own = ((activated * F.linear(x, up, up_bias)).double() - exact).norm()
    assert (result.double() - exact).norm() <= 1.5 * own + 2.0**-20 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_launches(activation: str, dtype: torch.dtype) -> None:
    for rows in ((1, 1), (3, 7), ()):
        arguments = {**make(rows, dtype), "activation": activation}
        found = npu_ops.run("gated_linear", **arguments)
        assert found.reasons == [] and found.launches == ["Mm", "Mm", *ENDS[activation]]
        close(found, arguments)


@pytest.mark.parametrize("biases", ["gate", "up", "gate up"])
def test_biases(biases: str) -> None:
    arguments = make((2, 5), torch.bfloat16, biases)
    found = npu_ops.run("gated_linear", **arguments)
    products = ["Addmm" if name in biases else "Mm" for name in ("gate", "up")]
    assert found.reasons == [] and found.launches == [*products, "SwiGlu"]
    close(found, arguments)


def test_slope() -> None:
    arguments = {**make((2, 5), torch.bfloat16), "alpha": 1.702}
    found = npu_ops.run("gated_linear", **arguments)
    assert found.reasons == [] and found.launches == ["Mm", "Mm", "ClippedSwiglu"]
    close(found, arguments)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_bits_of_the_ops_it_is_made_of(activation: str) -> None:
    arguments = {
        key: value if value is None else value.npu()
        for key, value in make((2, 5), torch.bfloat16, "up").items()
    }
    ours = torch.ops.liteboost
    x, gate, gate_bias, up, up_bias = arguments.values()
    with torch.no_grad():
        whole = ours.gated_linear(*arguments.values(), activation)
        parts = ours.gated_activation(
            ours.linear(x, gate, gate_bias), ours.linear(x, up, up_bias), activation
        )
    assert torch.equal(whole.cpu(), parts.cpu())


def test_nothing() -> None:
    found = npu_ops.run("gated_linear", **make((0, 5), torch.bfloat16))
    assert found.results[0].shape == (0, 5, 80) and found.reasons == ["no elements"]
