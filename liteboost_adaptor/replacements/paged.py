"""Attention over a paged cache: block tables out of the slots that a batch reads and writes, and the op.

A slot is a row of the memory of a cache as one layer sees it, ``page * page_rows + row``. Descriptions of a
batch lie on the CPU and are made once for all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ops = torch.ops.liteboost
#: Rows of a mask compared at a time, so that memory does not grow with their number.
_MASK_ROWS = 256
#: The most rows of a page that an NPU's operator takes with packed queries.
_NPU_PAGE_ROWS = 128
#: Whether keys are added up in the order of their positions. See `keep_order`.
_keeps_order = False


def keep_order(is_kept: bool) -> None:
    """Have the keys of a window added up in the order of their positions, whatever that of their pages is.

    So they are outside of a paged cache: a token's bits are then those that it has there.
    """
    # Of the process, as the kernels' number of rows is.
    global _keeps_order  # noqa: PLW0603
    _keeps_order = is_kept


@dataclass(frozen=True)
class Batch:
    """The requests of one forward pass.

    Attributes:
        sums_q: ``[requests + 1]`` int64: where the queries of each begin in the packed ones.
        sums_k: The same of the keys.
    """

    sums_q: Tensor
    sums_k: Tensor

    @property
    def q_lens(self) -> Tensor:
        return self.sums_q.diff()

    @property
    def kv_lens(self) -> Tensor:
        return self.sums_k.diff()

    @property
    def is_decode(self) -> bool:
        """Whether every request has one query."""
        return bool((self.q_lens == 1).all())

    def ends_of_keys(self) -> Tensor:
        """For each query the place of its own key among all keys: queries are the last keys of a request."""
        behind = self.sums_k[1:] - self.sums_q[1:]
        return behind.repeat_interleave(self.q_lens) + torch.arange(int(self.sums_q[-1]))


def table_in_order(batch: Batch, read: Tensor, write: Tensor, page_rows: int) -> Tensor | None:
    """The block table of requests whose keys fill their pages one after the other.

    Args:
        batch: The requests.
        read: The slot of each key, request by request; more may follow.
        write: The slot of each query's own key; more may follow.
        page_rows: Rows of a page.

    Returns:
        ``[requests, most pages]`` int64, or None where the slots are not those of whole pages in order, or a
        query's own key is not the one that it is told to read last.
    """
    tokens, keys = int(batch.sums_q[-1]), int(batch.sums_k[-1])
    if read.shape[0] < keys or write.shape[0] < tokens:
        return None
    if not torch.equal(read[batch.ends_of_keys()], write[:tokens]):
        return None
    return _table_of_slots(batch, read[:keys], page_rows)


def _table_of_slots(batch: Batch, read: Tensor, page_rows: int) -> Tensor | None:
    """The table by which keys are read in the order of these slots, or None where there is none."""
    place = torch.arange(read.shape[0]) - batch.sums_k[:-1].repeat_interleave(batch.kv_lens)
    row = place % page_rows
    first = torch.div(read[row == 0], page_rows, rounding_mode="floor")
    which = (row == 0).cumsum(0) - 1
    if not torch.equal(read, first[which] * page_rows + row):
        return None
    return _rows_of_table(first, -(-batch.kv_lens // page_rows))


def table_of_ring(batch: Batch, read: Tensor, write: Tensor, page_rows: int, own: int) -> Tensor | None:
    """The block table of requests of one query that see all they have of a window, in any order.

    A window's pages are a ring: the newest key takes the place of the one that has slid out. To a query that
    sees them all the order of keys does not matter but for rounding: the pages are read where they are, whole
    ones first, or, where order is kept (`keep_order`), as the keys lie.

    Args:
        batch: The requests; each has one query.
        read: The slot of each key, request by request, and ``own`` for the query's own.
        write: The slot of each query's own key.
        page_rows: Rows of a page.
        own: What stands in ``read`` for a key that is not in the cache yet.

    Returns:
        ``[requests, most pages]`` int64, or None where the slots do not fill pages from their first rows on,
        all but one page whole; while order is kept, where they do not do so in the order of the keys.
    """
    tokens, keys = int(batch.sums_q[-1]), int(batch.sums_k[-1])
    if read.shape[0] < keys or write.shape[0] < tokens:
        return None
    last = batch.sums_k[1:] - 1
    if not bool((read[last] == own).all()):
        return None
    read = read[:keys].clone()
    read[last] = write[:tokens]
    if _keeps_order:
        return _table_of_slots(batch, read, page_rows)
    tables = []
    for slots in read.split(batch.kv_lens.tolist()):
        places = slots.sort().values
        whole = torch.div(places, page_rows, rounding_mode="floor")
        pages, counts = whole.unique_consecutive(return_counts=True)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        expected = whole * page_rows + torch.arange(places.shape[0]) - first
        if not torch.equal(places, expected) or int((counts < page_rows).sum()) > 1:
            return None
        tables.append(pages[(counts < page_rows).to(torch.int8).argsort(stable=True)])
    return _rows_of_table(torch.cat(tables), torch.tensor([len(table) for table in tables]))


def _rows_of_table(pages: Tensor, counts: Tensor) -> Tensor:
    """Pages of one request after the other as a table; 0 behind the last one of each."""
    table = pages.new_zeros(counts.shape[0], max(int(counts.max()), 1))
    table[torch.arange(table.shape[1]) < counts[:, None]] = pages
    return table


def is_causal_mask(mask: Tensor, batch: Batch, window: int) -> bool:
    """Whether a float mask hides what its requests' causality and window hide, and changes nothing else.

    Args:
        mask: ``[1, 1, tokens, keys]``: 0 where a key is seen, else the lowest number of its dtype or less.
            Rows and columns may follow.
        batch: The requests.
        window: How many keys a query sees at most, itself among them; 0 for all before it.
    """
    tokens, keys = int(batch.sums_q[-1]), int(batch.sums_k[-1])
    if mask.dim() != 4 or mask.shape[:2] != (1, 1) or not mask.is_floating_point():
        return False
    if mask.shape[2] < tokens or mask.shape[3] < keys:
        return False
    numbers = torch.arange(batch.sums_q.shape[0] - 1)
    end, owner_q = batch.ends_of_keys(), numbers.repeat_interleave(batch.q_lens)
    owner_k = torch.full((mask.shape[3],), -1)
    owner_k[:keys] = numbers.repeat_interleave(batch.kv_lens)
    place, owner_k = torch.arange(mask.shape[3], device=mask.device), owner_k.to(mask.device)
    low = torch.finfo(mask.dtype).min
    for first in range(0, tokens, _MASK_ROWS):
        rows = mask[0, 0, first : min(first + _MASK_ROWS, tokens)]
        ages = end[first : first + _MASK_ROWS].to(mask.device)[:, None] - place
        seen = (owner_q[first : first + _MASK_ROWS].to(mask.device)[:, None] == owner_k) & (ages >= 0)
        if window > 0:
            seen &= ages < window
        if not bool(torch.where(seen, rows == 0, rows <= low).all()):
            return False
    return True


def attend(
    query: Tensor,
    states: Sequence[Tensor],
    batch: Batch,
    table: Tensor | None,
    scaling: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """`paged_attention` in the shapes of an attention function, ``[1, tokens, heads, head_dim]``.

    Args:
        query: ``[1, heads, tokens, head_dim]``, packed.
        states: Keys and values: pages ``[pages, page_rows, kv_heads, d]`` with a table, else packed as the
            queries are, ``[1, kv_heads, keys, d]``.
        batch: The requests.
        table: The pages of each request, or None.
        scaling: Factor of the dot products.
        window: How many keys a query sees at most; 0 for all before it.
        sinks: ``[heads]``, or None.
    """
    if table is None:
        states = [packed.transpose(1, 2) for packed in states]
    packed = query[0].transpose(0, 1)
    mixed = ops.paged_attention(
        packed, *states, batch.sums_q, batch.sums_k, table, scaling, True, window, 0.0, sinks
    )
    return mixed.unsqueeze(0)


def split_pages(page_rows: int) -> int:
    """Into how many pages one is split, so that an NPU's operator takes them."""
    return (
        page_rows // _NPU_PAGE_ROWS if page_rows > _NPU_PAGE_ROWS and page_rows % _NPU_PAGE_ROWS == 0 else 1
    )


def split_table(table: Tensor, parts: int) -> Tensor:
    """The table of pages that were split into ``parts`` each."""
    return (table[..., None] * parts + torch.arange(parts)).flatten(1)
