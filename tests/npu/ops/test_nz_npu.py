"""`linear` and `gated_linear` with weights in FRACTAL_NZ: read as they lie, by operators of their own."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops

from liteboost_adaptor import native_npu
from liteboost_adaptor.replacements import npu_format

from .test_gated_linear_npu import close as close_gated
from .test_gated_linear_npu import make
from .test_linear_npu import close

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "sizes", [((1, 1), 96, 64), ((2, 7), 129, 70), ((40,), 33, 17), ((), 16, 2)], ids=str
)
def test_one_launch(sizes: tuple[tuple[int, ...], int, int], bias: bool, dtype: torch.dtype) -> None:
    rows, k, n = sizes
    x, weight = torch.randn(*rows, k).to(dtype), torch.randn(n, k).to(dtype)
    offset = torch.randn(n).to(dtype) if bias else None
    found = npu_ops.run("linear", in_nz=("weight",), x=x, weight=weight, bias=offset)
    assert found.reasons == [] and found.launches == ["AddmmWeightNz" if bias else "MatmulWeightNz"]
    close(found, x, weight, offset)
    plain = npu_ops.run("linear", x=x, weight=weight, bias=offset)
    assert torch.equal(found.results[0], plain.results[0])


@pytest.mark.parametrize("in_nz", [("gate_weight", "up_weight"), ("gate_weight",), ("up_weight",)], ids=str)
@pytest.mark.parametrize("biases", ["", "gate up", "up"])
def test_gated(biases: str, in_nz: tuple[str, ...]) -> None:
    arguments = make((2, 5), torch.bfloat16, biases)
    found = npu_ops.run("gated_linear", in_nz=in_nz, **arguments)
    products = [
        ("Addmm" if name in biases else "Mm")
        if f"{name}_weight" not in in_nz
        else ("AddmmWeightNz" if name in biases else "MatmulWeightNz")
        for name in ("gate", "up")
    ]
    assert found.reasons == [] and found.launches == [*products, "SwiGlu"]
    close_gated(found, arguments)


def test_kinds_are_verified_apart() -> None:
    x, weight = torch.randn(2, 32).half(), torch.randn(48, 32).half()
    torch.ops.liteboost._npu_forget_verdicts()
    npu_ops.run("linear", x=x, weight=weight)
    npu_ops.run("linear", in_nz=("weight",), x=x, weight=weight)
    npu_ops.run("linear", in_nz=("weight",), x=x, weight=weight, bias=torch.randn(48).half())
    npu_ops.run("gated_linear", in_nz=("gate_weight",), **make((1,), torch.float16))
    known = {(op, kind): reason for op, kind, reason in native_npu.verdicts()}
    assert {
        ("linear", "fp16"),
        ("linear", "fp16 nz"),
        ("linear", "fp16 nz bias"),
        ("gated_linear", "fp16 silu nz"),
    } <= known.keys()
    assert set(known.values()) == {""}


def test_a_part_of_a_weight_is_copied_to_nd() -> None:
    """Its memory is not that of a matrix of its shape: the reference gets a copy in ND."""
    x, weight = torch.randn(2, 32).half(), torch.randn(48, 32).half()
    with torch.no_grad(), npu_format.internal.allowed():
        whole = npu_format.cast(weight.npu(), npu_format.FRACTAL_NZ)
        torch.ops.liteboost._npu_forget_counts()
        result = torch.ops.liteboost.linear(x.npu(), whole[16:32])
    assert [why for _, why, _ in native_npu.calls()] == ["a part of a weight in FRACTAL_NZ"]
    expected = x.double() @ weight[16:32].double().t()
    assert (result.cpu().double() - expected).abs().max() <= 2.0**-10 * expected.abs().max()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.randn(16, 32), "fp32 in FRACTAL_NZ"),
        (torch.randn(1, 32).half(), "FRACTAL_NZ with one row or column"),
    ],
    ids=lambda value: str(value.shape) if torch.is_tensor(value) else value,
)
def test_what_no_operator_reads_is_copied_to_nd(weight: torch.Tensor, reason: str) -> None:
    x = torch.randn(3, 32).to(weight.dtype)
    found = npu_ops.run("linear", in_nz=("weight",), x=x, weight=weight)
    assert found.reasons == [reason]
    assert {"Identity", "NpuFormatCast"} & set(found.launches)  # the cast before CANN 9.1, and from it on
    expected = x.double() @ weight.double().t()
    assert (found.results[0].double() - expected).abs().max() <= 2.0**-9 * expected.abs().max()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.ones(4, 4), "fp32 in FRACTAL_NZ"),
        (torch.ones(1, 4).half(), "FRACTAL_NZ with one row or column"),
        (torch.ones(4, 1).half(), "FRACTAL_NZ with one row or column"),
        (torch.ones(0, 4).half(), "no elements"),
        (torch.ones(3, 4).half(), ""),
    ],
    ids=lambda value: str(value.shape) if torch.is_tensor(value) else value,
)
def test_what_is_asked_before_a_weight_is_cast(weight: torch.Tensor, reason: str) -> None:
    assert torch.ops.liteboost._npu_nz_refusal(weight.npu(), None) == reason


def test_formats_are_allowed_only_while_somebody_needs_them() -> None:
    import torch_npu

    option = torch_npu._C._npu_getOption
    before = option("ALLOW_INTERNAL_FORMAT")
    with npu_format.internal.allowed(), npu_format.internal.allowed():
        assert option("ALLOW_INTERNAL_FORMAT") == b"enable"
        tensor = npu_format.cast(torch.ones(3, 5).half().npu(), npu_format.FRACTAL_NZ)
        assert npu_format.format_of(tensor) == npu_format.FRACTAL_NZ
        assert npu_format.padding_of(tensor) == (256 - 15) * 2
    assert option("ALLOW_INTERNAL_FORMAT") == before
