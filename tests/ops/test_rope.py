"""`liteboost::rope` against float64 and the original functions, at every instruction set and layout."""

from __future__ import annotations

import pytest
import torch
from support.compare import (
    DTYPES,
    SIZES,
    assert_refused,
    assert_same_on_any_threads,
    same_bits,
    sentinel_view,
)
from torch import Tensor

from liteboost_adaptor.ops.rope import LAYOUTS
from liteboost_adaptor.ops.rope import rope as reference

op = torch.ops.liteboost.rope
in_place = torch.ops.liteboost.rope_


def tables(
    batch: int, length: int, dim: int, dtype: torch.dtype, layout: str = "half"
) -> tuple[Tensor, Tensor]:
    """As a rotary embedding makes them, full width."""
    angles = (torch.arange(length)[None, :, None] + torch.arange(batch)[:, None, None] * 3) / 7.0
    angles = angles * 10_000.0 ** (-torch.arange(dim // 2) / max(1, dim // 2))
    angles = angles.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Query and key as an attention block has them: transposed views of ``[B, S, H, D]``."""
    q = torch.randn(batch, length, heads, dim, dtype=torch.float32).to(dtype)
    k = torch.randn(batch, length, kv_heads, dim, dtype=torch.float32).to(dtype)
    return q.transpose(1, 2), k.transpose(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def rotate_interleaved(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def original(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """``apply_rotary_pos_emb`` of Llama, or of Cohere or DeepSeek, for one tensor."""
    rotate = rotate_interleaved if layout == "interleaved" else rotate_half
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    dim = cos.shape[-1]
    turned = x[..., :dim]
    if layout == "deinterleave":
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
    turned = (turned * cos) + (rotate(turned) * sin)
    return torch.cat((turned, x[..., dim:]), -1)


def assert_rotated(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    exact = original(x.double(), cos.double(), sin.double(), layout)
    # Relative to the terms of the sum, which may cancel.
    terms = original(x.double().abs(), cos.double().abs(), sin.double().abs(), layout).abs()
    terms = terms + original(x.double().abs(), cos.double().abs(), -sin.double().abs(), layout).abs()
    info = torch.finfo(x.dtype)
    unit, tiny = info.eps / 2, info.smallest_normal * info.eps
    assert result.shape == x.shape and result.dtype == x.dtype and result.is_contiguous()
    error = (result.double() - exact).abs()
    assert bool((error <= 1.01 * unit * exact.abs() + 4 * 2.0**-24 * terms + tiny).all())
    if result.numel() >= 60:
        theirs = (original(x, cos, sin, layout).double() - exact).norm()
        assert error.norm() <= 1.5 * theirs + 2.0**-23 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [2, 14, 64, 66, 126, 128, 130, 256])
def test_values_at_every_head_dim(isa: str, dtype: torch.dtype, layout: str, dim: int) -> None:
    q, k = make(2, 3, 1, 5, dim, dtype)
    for table_dtype in {dtype, torch.float32}:
        cos, sin = tables(2, 5, dim, table_dtype, layout)
        rotated = op(q, k, cos, sin, 1, layout)
        for result, x in zip(rotated, (q, k), strict=True):
            if table_dtype == dtype:
                assert_rotated(result, x, cos, sin, layout)
            else:
                want = reference(x, x, cos, sin, 1, layout)[0]
                torch.testing.assert_close(result, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", SIZES)
def test_values_at_every_length(isa: str, dtype: torch.dtype, length: int) -> None:
    q, k = make(1, 2, 1, length, 16, dtype)
    cos, sin = tables(1, length, 16, dtype)
    for result, x in zip(op(q, k, cos, sin), (q, k), strict=True):
        assert result.shape == x.shape
        if length:
            assert_rotated(result, x, cos, sin, "half")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rotary", "dim"), [(16, 64), (20, 64), (96, 128), (2, 7)])
def test_partial_rotation(isa: str, dtype: torch.dtype, layout: str, rotary: int, dim: int) -> None:
    q, k = make(2, 4, 2, 3, dim, dtype)
    cos, sin = tables(2, 3, rotary, dtype, layout)
    for result, x in zip(op(q, k, cos, sin, 1, layout), (q, k), strict=True):
        assert_rotated(result, x, cos, sin, layout)
        assert torch.equal(result[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary", [2, 30, 64])
def test_half_width_tables(isa: str, dtype: torch.dtype, layout: str, rotary: int) -> None:
    q, k = make(2, 4, 2, 3, 64, dtype)
    cos, sin = tables(2, 3, rotary, dtype, layout)
    step = 2 if layout == "interleaved" else 1
    narrow = [table[..., ::step][..., : rotary // 2] for table in (cos, sin)]
    for result, want in zip(op(q, k, *narrow, 1, layout, rotary), op(q, k, cos, sin, 1, layout), strict=True):
        assert same_bits(result, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_two_halves_of_the_tables_are_both_used(isa: str, dtype: torch.dtype, layout: str) -> None:
    q, k = make(1, 2, 2, 3, 64, dtype)
    cos, sin = torch.randn(2, 1, 3, 64).to(dtype)
    for result, x in zip(op(q, k, cos, sin, 1, layout), (q, k), strict=True):
        assert_rotated(result, x, cos, sin, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_bits(isa: str, dtype: torch.dtype, layout: str) -> None:
    q, k = make(2, 4, 2, 5, 48, dtype)
    cos, sin = tables(2, 5, 48, dtype, layout)
    want = op(q.contiguous(), k.contiguous(), cos, sin, 1, layout)
    fused = torch.cat((q.transpose(1, 2), k.transpose(1, 2)), 2)  # one projection for both
    calls = {
        "transposed": (q, k, cos, sin),
        "one projection": (*(part.transpose(1, 2) for part in fused.split((4, 2), 2)), cos, sin),
        "sentinels": (sentinel_view(q), sentinel_view(k), sentinel_view(cos), sentinel_view(sin)),
        "channels apart": (q.mT.contiguous().mT, k.mT.contiguous().mT, cos.mT.contiguous().mT, sin),
    }
    for name, arguments in calls.items():
        assert all(map(same_bits, op(*arguments, 1, layout), want)), name
    back = [x.transpose(1, 2) for x in op(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2, layout)]
    assert all(map(same_bits, back, want))
    expanded = q[:1].expand(2, -1, -1, -1), k[:1].expand(2, -1, -1, -1)
    dense = [x.contiguous() for x in expanded]
    assert all(map(same_bits, op(*expanded, cos, sin, 1, layout), op(*dense, cos, sin, 1, layout)))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_queries_alone(isa: str, unsqueeze_dim: int) -> None:
    q, k = make(2, 4, 2, 5, 32, torch.bfloat16)
    cos, sin = tables(2, 5, 32, torch.bfloat16)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    alone, none = op(q, q.narrow(unsqueeze_dim, 0, 0), cos, sin, unsqueeze_dim)
    assert none.numel() == 0
    assert same_bits(alone, op(q, k, cos, sin, unsqueeze_dim)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deinterleaved_is_interleaved_with_the_results_sorted(isa: str, dtype: torch.dtype) -> None:
    q, k = make(2, 3, 1, 5, 66, dtype)
    cos, sin = torch.randn(2, 2, 5, 32).to(dtype)
    for ours, theirs in zip(
        op(q, k, cos, sin, 1, "deinterleave", 64), op(q, k, cos, sin, 1, "interleaved", 64), strict=True
    ):
        sorted_channels = torch.cat((theirs[..., :64:2], theirs[..., 1:64:2], theirs[..., 64:]), -1)
        assert same_bits(ours, sorted_channels)


def test_tables_shared_by_the_batch(isa: str) -> None:
    q, k = make(3, 4, 2, 5, 32, torch.bfloat16)
    cos, sin = tables(1, 5, 32, torch.bfloat16)
    want = op(q, k, cos.repeat(3, 1, 1), sin.repeat(3, 1, 1))
    for shared in ((cos, sin), (cos[0], sin[0]), (cos.expand(3, -1, -1), sin.expand(3, -1, -1))):
        assert all(map(same_bits, op(q, k, *shared), want))


def test_arguments_are_not_written(isa: str) -> None:
    arguments = *make(1, 2, 1, 5, 32, torch.bfloat16), *tables(1, 5, 32, torch.bfloat16)
    before = [argument.clone() for argument in arguments]
    op(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "dim"),
    [(0, 2, 2, 3, 8), (1, 0, 2, 3, 8), (1, 2, 0, 3, 8), (1, 2, 2, 0, 8), (1, 2, 2, 3, 0)],
)
def test_empty(isa: str, batch: int, heads: int, kv_heads: int, length: int, dim: int) -> None:
    q, k = make(batch, heads, kv_heads, length, dim, torch.float32)
    results = op(q, k, torch.ones(1, length, dim), torch.ones(1, length, dim))
    assert [result.shape for result in results] == [q.shape, k.shape]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_agrees(dtype: torch.dtype, layout: str) -> None:
    q, k = make(2, 4, 2, 5, 64, dtype)
    for table_dtype, width in ((dtype, 64), (torch.float32, 64), (dtype, 24), (torch.float32, 12)):
        cos, sin = torch.randn(2, 2, 5, width).to(table_dtype)
        arguments = (q, k, cos, sin, 1, layout, 24 if width == 12 else 0)
        for result, want in zip(op(*arguments), reference(*arguments), strict=True):
            torch.testing.assert_close(result, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_result_does_not_depend_on_threads(layout: str) -> None:
    arguments = *make(2, 4, 2, 511, 64, torch.bfloat16), *tables(2, 511, 64, torch.bfloat16, layout)
    assert_same_on_any_threads(lambda: op(*arguments, 1, layout))


Q, C = torch.ones(2, 4, 5, 16), torch.ones(2, 5, 16)
BAD = [
    ((Q[0], Q, C, C), ValueError, r"q must have 4 dimensions, got shape \[4, 5, 16\]"),
    ((Q, Q[0], C, C), ValueError, r"k must have 4 dimensions like q, got shape \[4, 5, 16\]"),
    ((Q, Q[:, :, :4], C, C), ValueError, r"k must match q in all but the heads: q is \[2, 4, 5, 16\], got"),
    ((Q, Q.half(), C, C), TypeError, r"k must have the dtype of q \(float32\), got float16"),
    ((Q.long(), Q.long(), C, C), TypeError, "q must be float32, bfloat16 or float16, got int64"),
    ((Q, Q, C.half(), C), TypeError, r"cos must have the dtype of q \(float32\) or float32, got float16"),
    ((Q, Q, C[0, 0], C), ValueError, r"cos must have shape .*got \[16\]"),
    ((Q, Q, C[:, :3], C), ValueError, r"cos must have batch 1 or 2 and q_len = 5, got \[2, 3, 16\]"),
    ((Q, Q, C, C, 2), ValueError, r"cos must have batch 1 or 2 and q_len = 4, got \[2, 5, 16\]"),
    ((Q, Q, C, C[:1]), ValueError, r"sin must have the shape of cos = \[2, 5, 16\], got \[1, 5, 16\]"),
    ((Q, Q, C, C.to("meta")), ValueError, r"sin must be on the device of q \(cpu\), got meta"),
    ((Q, Q, C, C, 3), ValueError, "unsqueeze_dim must be 1 or 2, got 3"),
    ((Q, Q, C, C, 1, "pairs"), ValueError, "layout must be half, interleaved or deinterleave, got 'pairs'"),
    (
        (Q, Q, C, C, 1, "half", 12),
        ValueError,
        "cos must have rotary_dim = 12 or half as many columns, got 16",
    ),
    ((Q, Q, C, C, 1, "half", 32), ValueError, "rotary_dim must be even and at most head_dim = 16, got 32"),
    ((Q, Q, C[..., :3], C[..., :3]), ValueError, "rotary_dim must be even and at most head_dim = 16, got 3"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD, ids=[bad[2][:30] for bad in BAD])
def test_bad_arguments(arguments: tuple, error: type[Exception], text: str) -> None:
    assert_refused((op, reference), arguments, error, f"liteboost::rope: {text}")


def test_gradient_is_refused(isa: str) -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="liteboost::rope: has no backward"):
        op(q, Q, C, C)
    with torch.no_grad():
        assert not op(q, Q, C, C)[0].requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    q, k = make(2, 4, 2, 5, 18, dtype)
    cos, sin = torch.randn(2, 2, 5, 18).to(dtype)
    torch.library.opcheck(op, (q, k, cos, sin))
    torch.library.opcheck(
        op, (q.transpose(1, 2), k.transpose(1, 2), cos[0, :, :5], sin[0, :, :5], 2, "interleaved", 10)
    )
    torch.library.opcheck(op, (q, k[:, :0], cos[..., :8], sin[..., :8], 1, "deinterleave", 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_gives_the_same_bits_where_the_arguments_lie(
    isa: str, dtype: torch.dtype, layout: str
) -> None:
    for dim in (1, 2):
        q, k = (x.transpose(1, 2) if dim == 2 else x for x in make(2, 4, 2, 5, 64, dtype))
        cos, sin = tables(2, 5, 48, dtype, layout)
        expected = op(q, k, cos, sin, dim, layout)
        versions, strides = (q._version, k._version), q.stride()
        assert in_place(q, k, cos, sin, dim, layout) is None
        assert (q._version, k._version) == (versions[0] + 1, versions[1] + 1) and q.stride() == strides
        assert same_bits(q.contiguous(), expected[0]) and same_bits(k.contiguous(), expected[1])


def test_in_place_refuses_what_is_no_rotation(isa: str) -> None:
    q, k = make(1, 4, 2, 3, 16, torch.float32)
    cos, sin = tables(1, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="cos must have batch"):
        in_place(q, k, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_in_place(dtype: torch.dtype) -> None:
    q, k = make(2, 4, 2, 3, 16, dtype)
    torch.library.opcheck(in_place, (q, k, *tables(2, 3, 16, dtype)))
