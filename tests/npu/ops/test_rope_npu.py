"""`rope` as an aclnn operator: values in every form of table and layout, and the launches of a decoder."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.compare import DTYPES
from torch import Tensor

from liteboost_adaptor.ops.rope import LAYOUTS, rope, rope_


def tables(batch: int | None, length: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cosines and sines of different angles a channel, so that an exchange shows."""
    angles = torch.rand(*(() if batch is None else (batch,)), length, width) * 6.28
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def heads_first(batch: int, heads: int, length: int, size: int, dtype: torch.dtype) -> Tensor:
    """[B, H, S, D] as attention makes it: a view of [B, S, H, D]."""
    return torch.randn(batch, length, heads, size).to(dtype).transpose(1, 2)


def close(found: npu_ops.Run, arguments: dict[str, object]) -> None:
    """Each element within one rounding of the sum of its two products' sizes."""
    doubled = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    largest = max(
        (x.double().abs().max().item() for x in (arguments["q"], arguments["k"]) if x.numel()), default=0
    )
    for result, exact in zip(found.results, rope(**doubled), strict=True):
        assert result.shape == exact.shape and result.is_contiguous()
        eps = torch.finfo(result.dtype).eps
        bound = (eps / 2 * 1.01) * exact.abs() + 8 * 2.0**-24 * largest
        assert bool(((result.double() - exact).abs() <= bound).all())


def check(**arguments: object) -> list[str]:
    found = npu_ops.run("rope", **arguments)
    assert found.reasons == []
    assert [each.dtype for each in found.results] == [arguments["q"].dtype] * 2
    close(found, arguments)
    return found.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 80])
def test_a_llama_decodes_with_one_launch_each(dtype: torch.dtype, size: int) -> None:
    for batch in (1, 3):
        q, k = (heads_first(batch, heads, 1, size, dtype) for heads in (8, 2))
        assert check(q=q, k=k, **tables(batch, 1, size, dtype)) == ["RotaryPositionEmbedding"] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill(dtype: torch.dtype, layout: str, batch: int) -> None:
    form = {"layout": layout, **tables(batch, 7, 64, dtype)}
    q, k = (heads_first(batch, heads, 7, 64, dtype) for heads in (4, 2))
    check(q=q, k=k, **form)
    check(q=q.contiguous(), k=k.contiguous(), **form)
    launches = check(q=q.transpose(1, 2), k=k.transpose(1, 2), unsqueeze_dim=2, **form)
    if layout != "deinterleave":
        assert launches == ["RotaryPositionEmbedding"] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_table_for_all_sequences(layout: str) -> None:
    q, k = (heads_first(3, heads, 5, 64, torch.bfloat16) for heads in (4, 2))
    for batch in (1, None):
        check(q=q, k=k, layout=layout, **tables(batch, 5, 64, torch.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_part_of_the_channels_and_tables_of_half_the_width(layout: str, dtype: torch.dtype) -> None:
    for length in (1, 6):
        q, k = (heads_first(2, heads, length, 64, dtype) for heads in (4, 2))
        check(q=q, k=k, layout=layout, rotary_dim=32, **tables(2, length, 32, dtype))
        check(q=q, k=k, layout=layout, rotary_dim=64, **tables(2, length, 32, dtype))
        check(q=q, k=k, layout=layout, rotary_dim=32, **tables(2, length, 16, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tables_in_fp32_are_not_rounded(layout: str, dtype: torch.dtype) -> None:
    q, k = (heads_first(2, heads, 6, 64, dtype) for heads in (4, 2))
    check(q=q, k=k, layout=layout, **tables(2, 6, 64, torch.float32))


def test_views_of_a_fused_projection_and_slices() -> None:
    fused = torch.randn(2, 5, 8 * 64).to(torch.bfloat16).view(2, 5, 8, 64)
    q, k = fused[:, :, :4].transpose(1, 2), fused[:, :, 4:6].transpose(1, 2)
    wide = torch.randn(2, 5, 4, 96).to(torch.bfloat16)[..., 32:].transpose(1, 2)
    form = tables(2, 5, 64, torch.bfloat16)
    check(q=q, k=k, **form)
    check(q=wide, k=k, **form)
    # Single-head keys, as of multi-head latent attention.
    check(q=wide, k=wide[:, :1], **form)


def test_q_alone() -> None:
    q = heads_first(2, 4, 1, 64, torch.bfloat16)
    assert check(q=q, k=q[:, :0], **tables(2, 1, 64, torch.bfloat16)) == ["RotaryPositionEmbedding"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"q": torch.zeros(1, 4, 0, 64), "k": torch.zeros(1, 2, 0, 64)}, "no elements"),
        ({"q": torch.zeros(1, 1000, 1, 64), "k": torch.zeros(1, 1, 1, 64)}, "a thousand heads or sequences"),
        ({"q": torch.zeros(1, 4, 1, 1024), "k": torch.zeros(1, 2, 1, 1024)}, "a head beyond the operator's"),
    ],
)
def test_what_the_operator_does_not_take_runs_as_the_reference(
    arguments: dict[str, Tensor], reason: str
) -> None:
    _, _, length, size = arguments["q"].shape
    arguments = {**arguments, **tables(1, length, size, torch.float32)}
    found = npu_ops.run("rope", **arguments)
    assert found.reasons == [reason]
    close(found, arguments)


IN_PLACE = {
    "a llama's token": (1, 8, 2, 1, 64, 1, {}),
    "three rows": (3, 8, 2, 1, 128, 3, {}),
    "three rows of one position": (3, 8, 2, 1, 64, 1, {}),
    "a prompt, heads behind": (2, 4, 2, 7, 64, 2, {"unsqueeze_dim": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place_is_one_launch_for_both(dtype: torch.dtype, case: str) -> None:
    batch, heads, kv_heads, length, size, of_tables, more = IN_PLACE[case]
    q, k = (heads_first(batch, count, length, size, dtype) for count in (heads, kv_heads))
    if more:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    arguments = {"q": q, "k": k, **tables(of_tables, length, size, dtype), **more}
    found = npu_ops.run("rope_", **arguments)
    assert found.reasons == [] and found.launches == ["ApplyRotaryPosEmb"]
    for result, expected in zip(found.results, npu_ops.run("rope", **arguments).results, strict=True):
        assert torch.equal(result.contiguous(), expected)


REFUSED_IN_PLACE = {
    "fp16": (torch.float16, 1, 8, 64, {}, "fp16 in place"),
    "a head of 80": (torch.float32, 1, 8, 80, {}, "a head that is neither 64 nor 128, in place"),
    "pairs": (torch.float32, 1, 8, 64, {"layout": "interleaved"}, "pairs in place"),
    "many heads": (torch.bfloat16, 1, 160, 64, {}, "too many heads in place"),
    "one table for prompts": (torch.bfloat16, 2, 8, 64, {}, "one table for all rows, in place"),
}


@pytest.mark.parametrize("case", REFUSED_IN_PLACE)
def test_in_place_what_the_operator_does_not_take_runs_as_the_reference(case: str) -> None:
    dtype, batch, heads, size, more, reason = REFUSED_IN_PLACE[case]
    length = 3 if batch > 1 else 1
    q, k = (heads_first(batch, count, length, size, dtype) for count in (heads, 2))
    arguments = {"q": q, "k": k, **tables(1, length, size, dtype), **more}
    found = npu_ops.run("rope_", **arguments)
    assert found.reasons == [reason]
    expected = [q.clone(), k.clone()]
    rope_(expected[0], expected[1], *[arguments[name] for name in ("cos", "sin")], **more)
    for result, want in zip(found.results, expected, strict=True):
        torch.testing.assert_close(result, want, rtol=0, atol=2 * torch.finfo(dtype).eps)
