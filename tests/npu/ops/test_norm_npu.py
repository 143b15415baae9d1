"""The norms as aclnn operators: values and launches of every form."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.compare import DTYPES
from torch import Tensor

SHAPES = [(1, 1, 64), (2, 7, 131), (3, 4, 96), (5, 40)]
EPS = 1e-6


def make(*shape: int, dtype: torch.dtype) -> dict[str, object]:
    return {"x": torch.randn(shape).to(dtype), "weight": torch.randn(shape[-1]).to(dtype), "eps": EPS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, late: bool) -> None:
    arguments = make(*shape, dtype=dtype)
    # The operator rounds once, also where the original rounds before the product with the weight.
    assert npu_ops.check("rms_norm", **arguments, late=late).launches == ["RmsNorm"]
    offset = npu_ops.check("rms_norm", **arguments, late=late, weight_offset=1.0, roundings=2)
    assert offset.launches == ["GemmaRmsNorm"]
    without = {**arguments, "weight": None}
    assert npu_ops.check("rms_norm", **without, late=late).launches == ["RmsNorm"]
    assert npu_ops.check("rms_norm", **without, late=late, weight_offset=1.0).launches == ["RmsNorm"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_for_each_group(dtype: torch.dtype) -> None:
    arguments = {**make(2, 7, 4, 96, dtype=dtype), "weight": torch.randn(4, 96).to(dtype)}
    found = npu_ops.check("rms_norm", **arguments, roundings=2)
    assert found.launches == ["RmsNorm", "Mul"]
    offset = npu_ops.check("rms_norm", **arguments, weight_offset=1.0, late=True, roundings=3)
    assert offset.launches == ["RmsNorm", "Addcmul"]
    sums = npu_ops.check(
        "add_rms_norm", **arguments, residual=torch.randn(2, 7, 4, 96).to(dtype), roundings=4
    )
    assert sums.launches == ["Add", "RmsNorm", "Mul"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, late: bool) -> None:
    arguments = {**make(*shape, dtype=dtype), "residual": torch.randn(shape).to(dtype), "late": late}
    for form, launches in (
        ({}, ["AddRmsNorm"]),
        ({"weight": None}, ["AddRmsNorm"]),
        ({"weight_offset": 1.0}, ["Add", "GemmaRmsNorm"]),
    ):
        found = npu_ops.run("add_rms_norm", **{**arguments, **form})
        assert found.reasons == [] and found.launches == launches
        normed, total = found.results
        exact = arguments["x"].double() + arguments["residual"].double()
        unit = torch.finfo(dtype).eps / 2
        assert bool(((total.double() - exact).abs() <= 1.01 * unit * exact.abs() + 1e-30).all())
        again = npu_ops.run(
            "rms_norm",
            x=total,
            **{k: v for k, v in {**arguments, **form}.items() if k not in ("x", "residual")},
        )
        assert (normed.double() - again.results[0].double()).norm() <= 2 * unit * normed.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inverse_rms(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        found = npu_ops.check("inverse_rms", x=torch.randn(shape).to(dtype), eps=EPS)
        norm, *casts = found.launches  # by which operator, differs between torch_npu's releases
        assert norm == "RmsNorm" and casts in (
            [[]] if dtype == torch.float32 else [["InplaceCopy"], ["Cast"]]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("order", [{}, {"gate_first": True}, {"gate_first": True, "group_size": 32}], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_gated_rms_norm(order: dict[str, object], activation: str, late: bool, dtype: torch.dtype) -> None:
    for shape in ((1, 1, 64), (2, 7, 96)):
        arguments = {**make(*shape, dtype=dtype), "gate": torch.randn(shape).to(dtype), "late": late, **order}
        found = npu_ops.run("gated_rms_norm", **arguments, activation=activation)
        gate = ["Cat", "SwiGlu"] if activation == "silu" else ["Sigmoid", "Mul"]
        norm = ["RmsNorm", "Mul"] if "group_size" in order else ["RmsNorm"]
        assert found.reasons == [] and found.launches == (gate + norm if order else norm + gate)
        exact, original = references(arguments, activation)
        error, own = ((each.double() - exact).norm() for each in (found.results[0], original))
        assert error <= 1.5 * own + 2 * torch.finfo(dtype).eps * exact.norm()


def references(arguments: dict[str, object], activation: str) -> tuple[Tensor, Tensor]:
    from liteboost_adaptor.ops.norm import gated_rms_norm

    doubled = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    return gated_rms_norm(**doubled, activation=activation), gated_rms_norm(
        **arguments, activation=activation
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        arguments = make(*shape, dtype=dtype)
        bias = torch.randn(shape[-1]).to(dtype)
        found = npu_ops.run("layer_norm", **arguments, bias=bias)
        assert found.reasons == [] and found.launches == ["LayerNorm"]
        exact = torch.nn.functional.layer_norm(
            arguments["x"].double(), shape[-1:], arguments["weight"].double(), bias.double(), EPS
        )
        unit = torch.finfo(dtype).eps
        assert (found.results[0].double() - exact).norm() <= (unit + 1e-6) * exact.norm()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": torch.ones(64)}, "a weight of another dtype than x"),
        ({"weight_offset": 0.5}, "an offset that is not 0 or 1"),
        ({"x": torch.ones(0, 64).bfloat16()}, "no elements"),
    ],
)
def test_what_no_operator_does_runs_as_the_reference(changes: dict[str, object], reason: str) -> None:
    found = npu_ops.run("rms_norm", **{**make(3, 64, dtype=torch.bfloat16), **changes})
    assert found.reasons == [reason]


def test_ones_serve_every_stream() -> None:
    """A norm without weight shares a tensor of ones that another stream has made."""
    x = torch.randn(3, 72)
    with torch.no_grad():
        first = torch.ops.liteboost.rms_norm(x.npu(), None, EPS)
        stream = torch.npu.Stream()
        stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(stream):
            second = torch.ops.liteboost.rms_norm(x.npu(), None, EPS)
        stream.synchronize()
    assert torch.equal(first.cpu(), second.cpu())
