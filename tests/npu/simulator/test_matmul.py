"""Matrix products and the FRACTAL_NZ layout of the simulator against float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import FLOATS, ND, NZ, Stored, close, randn, refused, run, started, strided
from torch import Tensor

KEEP, DOWN, FP16, HF32 = 0, 1, 2, 3


def nz_pack(x: Tensor, width: int) -> Tensor:
    """FRACTAL_NZ written out: element (r, c) lies at [c // width, r // 16, r % 16, c % width]."""
    rows, columns = x.shape
    out = torch.zeros(-(-columns // width), -(-rows // 16), 16, width, dtype=x.dtype)
    for r in range(rows):
        for c in range(columns):
            out[c // width, r // 16, r % 16, c % width] = x[r, c]
    return out


def nz(x: Tensor, width: int = 16) -> Stored:
    """A matrix whose storage is in FRACTAL_NZ; the view has the shape and strides of x."""
    packed = nz_pack(x, width)
    return Stored(packed.flatten()[: x.numel()].view(x.shape), NZ, packed.shape)


def seen_transposed(stored: Stored) -> Stored:
    return Stored(stored.tensor.t(), NZ, stored.storage_shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m, k, n", [(1, 37, 19), (5, 64, 33), (17, 16, 1)])
def test_products(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    a, b, out = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    want = a.double() @ b.double()
    close(run("aclnnMm", strided(a), b, out, KEEP)[2], want, roundings=8 if dtype == torch.float32 else 1.02)
    close(
        run("aclnnMatmul", a, b.t().contiguous().t(), out, KEEP)[2],
        want,
        roundings=8 if dtype == torch.float32 else 1.02,
    )
    batch = torch.stack((a, -a)), torch.stack((b, b))
    got = run("aclnnBatchMatMul", *batch, torch.empty(2, m, n, dtype=dtype), KEEP)[2]
    close(got[1], -want, roundings=8 if dtype == torch.float32 else 1.02)


@pytest.mark.parametrize("dtype", FLOATS)
def test_addmm(dtype: torch.dtype) -> None:
    a, b, out = randn(5, 37, dtype=dtype), randn(37, 19, dtype=dtype), torch.empty(5, 19, dtype=dtype)
    product = a.double() @ b.double()
    exact = {"roundings": 8} if dtype == torch.float32 else {"roundings": 1.02}
    for shape in ((), (19,), (1, 19)):  # a bias is added before the one rounding
        bias = randn(*shape, dtype=dtype)
        got = run("aclnnAddmm", bias, a, b, 1.0, 1.0, out, KEEP)[5]
        close(got, bias.double() + product, **exact)
    self = randn(5, 19, dtype=dtype)
    want = 0.5 * self.double() + 2.0 * product.to(dtype).double()
    close(
        run("aclnnAddmm", self, a, b, 0.5, 2.0, out, KEEP)[5],
        want,
        roundings=8 if dtype == torch.float32 else 3,
    )
    close(
        run("aclnnInplaceAddmm", self.clone(), a, b, 0.5, 2.0, KEEP)[0],
        want,
        roundings=8 if dtype == torch.float32 else 3,
    )


def test_float32_may_be_computed_in_less() -> None:
    a, b, out = torch.tensor([[1 + 2.0**-12, 1 + 2.0**-9]]), torch.eye(2), torch.empty(1, 2)
    assert run("aclnnMm", a, b, out, KEEP)[2].tolist() == [[1 + 2.0**-12, 1 + 2.0**-9]]
    assert run("aclnnMm", a, b, out, HF32)[2].tolist() == [
        [1 + 2.0**-11, 1 + 2.0**-9]
    ]  # 11 bits after the point
    assert run("aclnnMm", a, b, out, DOWN)[2].tolist() == [[1 + 2.0**-11, 1 + 2.0**-9]]
    assert started("310P").run("aclnnMm", a, b, out, DOWN)[2].tolist() == [[1.0, 1 + 2.0**-9]]  # float16


@pytest.mark.parametrize(
    "dtype, width", [(torch.float16, 16), (torch.bfloat16, 16), (torch.int8, 32), (torch.float32, 16)]
)
@pytest.mark.parametrize("shape", [(33, 50), (16, 32), (1, 1)])
def test_format_cast_permutes_the_storage(dtype: torch.dtype, width: int, shape: tuple[int, int]) -> None:
    x = torch.randint(-100, 100, shape).to(dtype)
    # 4-byte types take blocks of 16 when float16 is named as the additional dtype, as torch_npu does.
    answer = started().ask("storage_of", x, NZ, 1 if dtype == torch.float32 else -1)
    packed = nz_pack(x, width)
    assert answer == {"code": 0, "shape": list(packed.shape), "format": NZ}
    room = torch.full((packed.numel(),), 77, dtype=dtype)
    target = Stored(room[: x.numel()].view(shape), NZ, answer["shape"])
    written = run("aclnnNpuFormatCast", x, target)[1]
    storage = torch.empty(0, dtype=dtype).set_(written.untyped_storage())
    assert torch.equal(storage, packed.flatten())
    assert torch.equal(
        run("aclnnNpuFormatCast", Stored(written, NZ, answer["shape"]), torch.empty_like(x))[1], x
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_in_nz(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = randn(3, 37, dtype=dtype), randn(37, 50, dtype=dtype)
    width = 32 // dtype.itemsize
    stored = seen_transposed(nz(weight.t().contiguous(), width)) if transposed else nz(weight, width)
    out = torch.empty(3, 50, dtype=dtype)
    want = x.double() @ weight.double()
    exact = {"roundings": 8} if dtype == torch.float32 else {"roundings": 1.02}
    close(run("aclnnMatmulWeightNz", x, stored, out, KEEP)[2], want, **exact)
    if dtype == torch.float32:
        return
    bias = randn(50, dtype=dtype)
    close(run("aclnnAddmmWeightNz", bias, x, stored, 1.0, 1.0, out, KEEP)[5], want + bias.double(), **exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_plain_products_take_a_weight_in_nz(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = randn(3, 37, dtype=dtype), randn(37, 50, dtype=dtype)
    stored = seen_transposed(nz(weight.t().contiguous())) if transposed else nz(weight)
    out, want = torch.empty(3, 50, dtype=dtype), x.double() @ weight.double()
    for release in ("8.5.0", "9.1.0"):
        close(run("aclnnMm", x, stored, out, KEEP, release=release)[2], want, roundings=1.02)
    batch = Stored(stored.tensor[None], NZ, [1, *stored.storage_shape])
    close(run("aclnnBatchMatMul", x[None], batch, out[None], KEEP)[2][0], want, roundings=1.02)
    small = Stored(stored.tensor, NZ, stored.tensor.shape)  # the product would read what lies behind it
    answer = started("910B").call("aclnnMm", x, small, out, KEEP)
    assert answer["code"] and "has memory of 1850 elements" in answer["message"]


def test_of_the_storage_of_a_weight_only_the_size_counts() -> None:
    x, weight, out = randn(3, 32, dtype=torch.float32), randn(32, 16, dtype=torch.float32), torch.empty(3, 16)
    stored = Stored(nz(weight, 8).tensor, NZ, [2, 1, 16, 16])
    for release in ("9.0.0", "9.1.0"):
        got = run("aclnnMatmulWeightNz", x, stored, out, KEEP, release=release)[2]
        close(got, x.double() @ weight.double(), roundings=8)
    for soc, release in (("910B", "8.5.0"), ("310P", "9.1.0")):
        message = "Float with a weight in FRACTAL_NZ needs a 910B or 910C and CANN 9.0"
        refused("aclnnMatmulWeightNz", x, stored, out, DOWN, message=message, soc=soc, release=release)


def test_nz_storage_read_as_nd_is_garbage() -> None:
    """The layout is executed: without its mark the same memory gives another product."""
    x, weight = randn(3, 64, dtype=torch.float16), randn(64, 64, dtype=torch.float16)
    stored, out = nz(weight), torch.empty(3, 64, dtype=torch.float16)
    right = run("aclnnMatmulWeightNz", x, stored, out, KEEP)[2]
    wrong = run("aclnnMm", x, Stored(stored.tensor, ND), out, KEEP)[2]
    close(right, x.double() @ weight.double(), roundings=1.02)
    assert (wrong - right).abs().max() > 1


# ---- dtypes and cubeMathType of 910B and 910C -------------------------------------------------------
def test_operands_of_two_dtypes_are_multiplied_in_the_wider() -> None:
    x, weight = randn(3, 32).half(), randn(32, 4)
    for operand in (weight.bfloat16(), weight):
        out = run("aclnnMm", x, operand, torch.empty(3, 4), KEEP)[2]
        close(out, x.double() @ operand.double())


def test_a_mode_that_16_bits_have_no_use_for_is_ignored() -> None:
    x, weight = randn(3, 32).bfloat16(), randn(32, 4).bfloat16()
    for mode in (FP16, HF32):
        out = run("aclnnMm", x, weight, torch.empty(3, 4).bfloat16(), mode)[2]
        close(out, x.double() @ weight.double())
    half = x.half(), weight.half()
    close(run("aclnnMm", *half, torch.empty(3, 4).half(), HF32)[2], half[0].double() @ half[1].double())


# ---- what is refused ---------------------------------------------------------------------------
def test_products_refuse() -> None:
    a, b, out = torch.ones(3, 32), torch.ones(32, 4), torch.ones(3, 4)
    refused("aclnnMm", a, b.t(), out, KEEP, message="self has shape [3, 32], mat2 [4, 32]")
    refused("aclnnMm", a, b, out.t(), KEEP, message="out has shape [4, 3]")
    refused("aclnnMm", a.int(), b.int(), out.int(), KEEP, message="self is Int")
    refused("aclnnMm", a, b, out, 5, message="cubeMathType is 5")
    refused("aclnnMm", a, b, out.half(), KEEP, message="cubeMathType 0 keeps the dtype of self, Float")
    refused("aclnnBatchMatMul", a, b, out, KEEP, message="self has 2 axes")
    batches = torch.ones(3, 4, 8), torch.ones(2, 8, 5), torch.ones(6, 4, 5)
    refused("aclnnBatchMatMul", *batches, KEEP, message="the batches do not broadcast")
    wrong = torch.ones(3, 4, 8), torch.ones(1, 8, 5), torch.ones(1, 4, 5)
    refused("aclnnBatchMatMul", *wrong, KEEP, message="out has shape [1, 4, 5], it must be [3, 4, 5]")
    refused("aclnnMatmul", *batches, KEEP, message="the batches do not broadcast")
    refused("aclnnMatmul", a, b.t(), out, KEEP, message="self has shape [3, 32], mat2 [4, 32]")
    deep = torch.ones(1, 1, 1, 1, 1, 1, 1, 32, 4)
    refused("aclnnMatmul", a, deep, deep, KEEP, message="mat2 has 9 axes")
    bias = torch.ones(4), a, b, 1.0, 1.0, out, 4
    refused("aclnnAddmm", *bias, message="cubeMathType 4 needs self of the output's shape")
    refused(
        "aclnnAddmm", torch.ones(5), a, b, 1.0, 1.0, out, KEEP, message="self of shape [5] does not broadcast"
    )
    refused(
        "aclnnMm", a, b, out, KEEP, message="310P takes float32 with cubeMathType 1 or 2 only", soc="310P"
    )
    half = a.bfloat16(), b.bfloat16(), out.bfloat16()
    refused("aclnnMm", *half, KEEP, message="self is BFloat16; supported here: Float, Half", soc="310P")


def test_nz_refuses() -> None:
    x, weight, out = torch.ones(3, 32).half(), torch.ones(32, 16).half(), torch.ones(3, 16).half()
    refused(
        "aclnnMatmulWeightNz", x, weight, out, KEEP, message="mat2 must be in FRACTAL_NZ, it has format 2"
    )
    one = torch.ones(32, 1).half()
    refused("aclnnMatmulWeightNz", x, nz(one), out[:, :1], KEEP, message="k and n must not be 1")
    wrong = nz(weight)
    small = Stored(wrong.tensor, NZ, [1, 1, 16, 16])
    refused("aclnnMatmulWeightNz", x, small, out, KEEP, message="it must be as large as [1, 2, 16, 16]")
    part = Stored(wrong.tensor[:, :8], NZ, wrong.storage_shape)
    refused("aclnnMatmulWeightNz", x, part, out[:, :8], KEEP, message="neither contiguous nor a transposed")
    refused("aclnnMatmulWeightNz", nz(x), wrong, out, KEEP, message="self is in FRACTAL_NZ")
    refused("aclnnAddmmWeightNz", nz(out), x, wrong, 1.0, 1.0, out, KEEP, message="self is in FRACTAL_NZ")
    refused("aclnnMm", nz(x), weight, out, KEEP, message="self is in FRACTAL_NZ")
    refused("aclnnMm", x, nz(weight), out, KEEP, message="not simulated on a 310P", soc="310P")
    refused("aclnnMatmul", x, nz(weight), out, KEEP, message="takes ND tensors")
    batch = x[None, :, :1], nz(weight[:1])
    batch[1].tensor = batch[1].tensor[None]
    refused("aclnnBatchMatMul", *batch, out[None], KEEP, message="k and n must not be 1 in FRACTAL_NZ")
    refused("aclnnAddmmWeightNz", out, x, weight, 1.0, 1.0, out, KEEP, message="not supported on", soc="310P")
    refused(
        "aclnnNpuFormatCast", weight.t(), nz(weight.t().contiguous()), message="srcTensor is not contiguous"
    )
    wrong = Stored(nz(weight).tensor, NZ, [2, 1, 16, 16])
    refused("aclnnNpuFormatCast", weight, wrong, message="it must be [1, 2, 16, 16]")
    refused("aclnnNpuFormatCast", weight[0], weight[0], message="srcTensor has 1 axes")
    refused("aclnnNpuFormatCast", weight, nz(weight), message="not supported on", soc="310P")
    assert "do not have NpuFormatCast" in started("310P").ask("storage_of", weight, NZ, -1)["message"]


def test_any_other_operator_refuses_nz() -> None:
    weight = torch.ones(32, 16).half()
    refused("aclnnAbs", nz(weight), weight, message="FRACTAL_NZ")
    refused("aclnnRmsNorm", nz(weight), weight[0], 1e-6, weight, torch.ones(32, 1), message="FRACTAL_NZ")
