"""The choice of blocks: sinks, window, density, causality, the best of the rest, always the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liteboost_adaptor.ops import block_selection
from liteboost_adaptor.ops.block_selection import select_blocks


def states(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, heads: int = 4
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(q_len + kv_len)
    query = torch.randn(2, q_len, heads, 16).to(dtype).transpose(1, 2)
    return query, torch.randn(2, 2, kv_len, 16).to(dtype)


def chosen(query: Tensor, key: Tensor, sparsity: float, **form: int | bool) -> Tensor:
    """``[batch, heads, query blocks, key blocks]``, after a look at the tables themselves."""
    select_idx, select_num_idx = select_blocks(query, key, sparsity, **form)
    blocks = -(-key.shape[2] // form.get("block", 128))
    assert select_idx.dtype == select_num_idx.dtype == torch.int64
    for row, count in zip(select_idx.flatten(0, 1).tolist(), select_num_idx.flatten().tolist(), strict=True):
        assert row[:count] == sorted(set(row[:count])) and set(row[count:]) <= {-1}
        assert all(0 <= number < blocks for number in row[:count])
    found = torch.zeros(*select_idx.shape[:2], blocks + 1, dtype=torch.bool)
    found.scatter_(-1, select_idx % (blocks + 1), True)
    return found[..., :blocks].unflatten(0, (query.shape[0], -1)).transpose(1, 2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(160, 160), (167, 167), (40, 333), (5, 5), (16, 17), (1, 90)])
def test_sinks_window_and_causality(q_len: int, kv_len: int, shared: bool) -> None:
    for sinks, window in ((1, 2), (0, 1), (3, 4)):
        form = {"block": 16, "sinks": sinks, "window": window, "shared": shared}
        found = chosen(*states(q_len, kv_len), 0.75, **form)
        assert found.shape[1] == (2 if shared else 4)
        for i in range(found.shape[2]):
            last = min((i + 1) * 16, q_len) - 1 + kv_len - q_len
            visible = last // 16 + 1
            assert not found[:, :, i, visible:].any()
            assert found[:, :, i, : min(sinks, visible)].all()
            assert found[:, :, i, max(0, visible - window) : visible].all()
            wanted = min(visible, max(math.floor(0.25 * visible + 0.5), sinks + window))
            assert (found[:, :, i].sum(-1) == wanted).all()


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
def test_density(sparsity: float) -> None:
    """Of 64 blocks, as 8,192 tokens have them: the share asked for, but for the first rows and roundings."""
    found = chosen(*states(1024, 1024), sparsity, block=16)
    kept = found.sum().item() / (2 * 4 * 64 * 65 / 2)
    assert 1 - sparsity <= kept <= 1 - sparsity + 0.04


def test_nothing_left_out_is_dense_attention() -> None:
    query, key = states(300, 300)
    tables = select_blocks(query, key, 0.0, block=32)
    dense = torch.ops.liteboost.attention(query, key, key, None, 0.25, True)
    sparse = torch.ops.liteboost.block_sparse_attention(query, key, key, *tables, [32, 32], 0.25, True)
    torch.testing.assert_close(sparse, dense, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sequence_major", [False, True])
def test_the_blocks_that_matter_are_found(dtype: torch.dtype, sequence_major: bool) -> None:
    """Keys of two blocks are what the queries of one head look for."""
    query, key = states(512, 512, dtype)
    query, key = query * 0.1, key * 0.1
    query[:, 1, 480:] += 2
    key[:, 0, 96:128] += 2
    key[:, 0, 224:256] += 1.5
    if sequence_major:
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        query = query.contiguous()
    for shared in (False, True):
        found = chosen(query, key, 0.7, block=32, shared=shared)  # 5 of 16: two beside sink and window
        assert found[:, 0 if shared else 1, 15].nonzero()[:, 1].view(2, 5).tolist() == [[0, 3, 7, 14, 15]] * 2


def test_always_the_same_and_equal_scores_by_position() -> None:
    query, key = states(640, 640)
    first = select_blocks(query, key, 0.75, block=16)
    assert all(
        torch.equal(*pair) for pair in zip(first, select_blocks(query, key, 0.75, block=16), strict=True)
    )
    found = chosen(torch.ones_like(query), torch.ones_like(key), 0.75, block=16)
    assert found[0, 0, 39].nonzero().flatten().tolist() == [*range(8), 38, 39]


def test_scores_are_not_held_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = states(333, 333)
    whole = select_blocks(query, key, 0.6, block=16)
    monkeypatch.setattr(block_selection, "QUERY_BLOCKS", 5)
    parts = select_blocks(query, key, 0.6, block=16)
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))


def test_large_values_in_half_precision() -> None:
    """Their sums over a block are beyond fp16; their means are not."""
    query, key = states(256, 256, torch.float16)
    key[:, :, 32:64] += 2000
    query = query.abs()
    assert chosen(query, key, 0.5, block=32)[:, :, 7, 1].all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_displaces_no_block_that_is_always_read(value: float, shared: bool) -> None:
    form = {"block": 16, "sinks": 1, "window": 2, "shared": shared}
    for spoiled in ("query", "key"):
        query, key = states(160, 160)
        {"query": query, "key": key}[spoiled][:, :, 70] = value
        found = chosen(query, key, 0.75, **form)
        for i in range(10):
            assert found[:, :, i, 0].all() and found[:, :, i, max(0, i - 1) : i + 1].all()
            # Four blocks are kept only where more than three may be: with NaN among the keys, theirs is one.
            if spoiled == "key" and math.isnan(value) and found[:, :, i].sum(-1).min() > 3:
                assert found[:, :, i, 70 // 16].all()
