"""Which blocks of keys a block of queries reads: the choice that `block_sparse_attention` is given.

Queries and keys are averaged over blocks. Of the blocks that a block of queries may see, the first ones
(sinks) and the last ones (its own and those just before) are always read; the others by the products of the
averages, largest first, until the share that is asked for is reached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Blocks of queries whose scores are held at a time, so that memory grows with the length of the keys.
QUERY_BLOCKS = 64


def select_blocks(
    query: Tensor,
    key: Tensor,
    sparsity: float,
    block: int = 128,
    sinks: int = 1,
    window: int = 2,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose, for causal attention, the blocks of keys that each block of queries reads.

    The same input gives the same choice. Of blocks with equal scores the earlier one is taken; a block whose
    score is NaN is taken first, so that NaN in it reaches those that see it.

    Args:
        query: ``[batch, num_heads, q_len, head_dim]``.
        key: ``[batch, num_kv_heads, kv_len, head_dim]`` with ``kv_len >= q_len``.
        sparsity: Share of the blocks that may be seen which is left out, ``0 <= sparsity < 1``. Rounded to
            whole blocks for each block of queries, and less where ``sinks`` and ``window`` ask for more.
        block: Positions in a block of queries, and of keys.
        sinks: Blocks at the beginning that are always read.
        window: Blocks at the end of what may be seen that are always read; at least 1.
        shared: Choose once for the query heads of a group, by the mean of their probabilities.

    Returns:
        ``select_idx`` ``[batch * query_blocks, heads, most]``, padded with -1, and ``select_num_idx``
        ``[batch * query_blocks, heads]``, both int64; ``heads`` is ``num_heads``, or with ``shared``
        ``num_kv_heads``.

    Source:
        Means of blocks as their representatives: Jiang et al. 2024 (MInference), arXiv:2407.02490; sinks and
        window: Xiao et al. 2023, arXiv:2309.17453.
    """
    pooled_keys = _means(key, block).transpose(-1, -2).unsqueeze(2)  # [B, K, 1, D, key blocks]
    pooled = _means(query, block).unflatten(1, (key.shape[1], -1))  # [B, K, G, query blocks, D]
    visible, kept = _budget(query.shape[2], key.shape[2], sparsity, block, sinks, window)
    most = max(kept)
    lists = []
    for start in range(0, len(kept), QUERY_BLOCKS):
        scores = pooled[..., start : start + QUERY_BLOCKS, :] @ pooled_keys * query.shape[3] ** -0.5
        seen = torch.tensor(visible[start : start + QUERY_BLOCKS], device=key.device)[:, None]
        keep = torch.tensor(kept[start : start + QUERY_BLOCKS], device=key.device)[:, None]
        lists.append(_choose(scores, seen, keep, sinks, window, most, shared))
    select_idx = torch.cat(lists, dim=1).flatten(0, 1)
    return select_idx, (select_idx >= 0).sum(-1)


def _means(states: Tensor, block: int) -> Tensor:
    """``[batch, heads, blocks, dim]`` in fp32: the mean of each block, the last of which may be shorter."""
    whole = states.shape[2] // block * block
    means = [_sums(states[:, :, :whole], block).float() / block] if whole else []
    if whole < states.shape[2]:
        means.append(states[:, :, whole:].float().mean(2, keepdim=True))
    return torch.cat(means, dim=2)


def _sums(states: Tensor, block: int) -> Tensor:
    """``[batch, heads, blocks, dim]``. Which of two ways is the faster depends on how heads lie in memory."""
    if states.dtype == torch.float16:
        states = states.float()  # sums may be beyond its range
    if states.stride(1) < states.stride(2):  # beside each other, as a projection leaves them
        rows = states.transpose(1, 2).unflatten(1, (-1, block))
        return rows.flatten(3).sum(2).unflatten(-1, states.shape[1::2]).transpose(1, 2)
    ones = torch.ones(1, block, dtype=states.dtype, device=states.device)
    return (ones @ states.unflatten(2, (-1, block))).squeeze(3)


def _budget(
    q_len: int, kv_len: int, sparsity: float, block: int, sinks: int, window: int
) -> tuple[list[int], list[int]]:
    """For each block of queries how many blocks of keys it may see, and how many of them it reads."""
    visible, kept = [], []
    for start in range(0, q_len, block):
        last = min(start + block, q_len) - 1 + kv_len - q_len
        seen = last // block + 1
        wanted = math.floor((1 - sparsity) * seen + 0.5)
        visible.append(seen)
        kept.append(min(seen, max(wanted, sinks + window)))
    return visible, kept


def _choose(
    scores: Tensor, visible: Tensor, keep: Tensor, sinks: int, window: int, most: int, shared: bool
) -> Tensor:
    """``[batch, query blocks, heads, most]``: the chosen blocks, ascending, padded with -1.

    Args:
        scores: ``[batch, num_kv_heads, groups, query blocks, key blocks]``.
        visible: ``[query blocks, 1]``.
        keep: ``[query blocks, 1]``.
        sinks, window, shared: As `select_blocks`.
        most: The longest list.
    """
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    # Finite, so that it displaces none that is always read: NaN sorts before infinity.
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).max)
    scores = scores.masked_fill(blocks >= visible, -math.inf)
    if shared:
        scores = scores.softmax(-1).mean(2, keepdim=True).masked_fill(blocks >= visible, -math.inf)
    always = (blocks < sinks) | (blocks >= visible - window)
    scores = scores.masked_fill(always & (blocks < visible), math.inf).flatten(1, 2)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen = chosen.scatter(-1, order, (blocks < keep).expand_as(order))
    ascending = torch.where(chosen, blocks, len(blocks)).sort(-1).values[..., :most]
    return ascending.masked_fill(ascending == len(blocks), -1).transpose(1, 2)
