"""Cases of block-sparse attention: ragged blocks, several sequences, heads that choose alone or in groups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..case import Case, Kind, makes_cases

#: (batch, heads, kv heads, queries, keys, head size, queries in a block, keys in a block)
SIZES = (
    (1, 2, 2, 128, 256, 64, 128, 128),
    (2, 4, 2, 70, 150, 128, 64, 128),
    (2, 4, 1, 33, 300, 64, 128, 128),
)


@makes_cases("block_sparse_attention", "", "causal")
def block_sparse_attention(kind: Kind) -> Iterator[Case]:
    for size in SIZES:
        batch, heads, kv_heads, queries, keys, head, query_block, key_block = size
        rows, blocks = batch * -(-queries // query_block), -(-keys // key_block)
        for choosing in dict.fromkeys((heads, kv_heads)):
            select_idx, select_num_idx = _lists(kind, rows, choosing, blocks)
            for order, make in (("", kind.normal), (", positions before heads", kind.swapped)):
                yield Case(
                    f"{list(size)}, {choosing} choices{order}",
                    {
                        "query": make(batch, heads, queries, head),
                        "key": make(batch, kv_heads, keys, head),
                        "value": make(batch, kv_heads, keys, head),
                        "select_idx": select_idx,
                        "select_num_idx": select_num_idx,
                        "block_shape": [query_block, key_block],
                        "scaling": 1.5 * head**-0.5,
                        "is_causal": kind.layout == "causal",
                    },
                )


def _lists(kind: Kind, rows: int, heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Different blocks for each, of the first head of the first row none."""
    chosen = kind.integers(2, rows, heads, blocks).bool()
    chosen[..., -1] |= ~chosen.any(-1)
    chosen[0, 0] = False
    numbers = torch.where(chosen, torch.arange(blocks, device="cpu"), blocks).sort(-1).values
    return numbers.masked_fill(numbers == blocks, -1), chosen.sum(-1)
