"""`linear` as one aclnn operator, with and without bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import npu_ops
from support.compare import DTYPES


def close(found: npu_ops.Run, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """One rounding, and that of an fp32 sum of products of this size."""
    (result,) = found.results
    arguments = [x.double(), weight.double(), None if bias is None else bias.double()]
    exact, products = F.linear(*arguments), F.linear(*(a if a is None else a.abs() for a in arguments))
    assert result.shape == exact.shape and result.dtype == x.dtype and result.is_contiguous()
    unit = torch.finfo(x.dtype).eps / 2
    assert bool(
        ((result.double() - exact).abs() <= 1.01 * unit * exact.abs() + 8 * 2.0**-24 * products).all()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 7, 129), (300, 64), (40,), (2, 2, 2, 33)], ids=str)
def test_one_launch(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(70, shape[-1]).to(dtype)
    offset = torch.randn(70).to(dtype) if bias else None
    found = npu_ops.run("linear", x=x, weight=weight, bias=offset)
    assert found.reasons == [] and found.launches == ["Addmm" if bias else "Mm"]
    close(found, x, weight, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    x = torch.randn(4, 6, 96).to(dtype)
    weight = torch.randn(80, 192).to(dtype)
    views = {
        "x permuted": (x.transpose(0, 1), weight[:, :96].contiguous()),
        "x a slice": (x[..., 16:], weight[:, :80].contiguous()),
        "x expanded": (x[:1].expand(4, 6, 96), weight[:, :96].contiguous()),
        "rows of a wider weight": (x, weight[:, 96:]),
        "weight transposed": (x, torch.randn(96, 80).to(dtype).t()),
    }
    for name, (rows, matrix) in views.items():
        found = npu_ops.run("linear", x=rows, weight=matrix)
        assert found.reasons == [] and "Mm" in found.launches, name
        close(found, rows, matrix, None)


@pytest.mark.parametrize("shapes", [((0, 8), (4, 8)), ((3, 8), (0, 8)), ((3, 0), (4, 0))], ids=str)
def test_nothing(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    x, weight = (torch.ones(shape) for shape in shapes)
    found = npu_ops.run("linear", x=x, weight=weight)
    assert found.reasons == ["no elements"]
    close(found, x, weight, None)


def test_fp32_is_not_shortened() -> None:
    """HF32, which torch_npu's own product may use, would err by 1e-3."""
    x, weight = torch.randn(5, 512), torch.randn(33, 512)
    found = npu_ops.run("linear", x=x, weight=weight)
    exact = x.double() @ weight.double().t()
    assert ((found.results[0].double() - exact).norm() / exact.norm()).item() < 1e-6
