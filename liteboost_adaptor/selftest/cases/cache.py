"""Cases of a cache: one token a sequence, as decoding has it, and more; a block a sequence, and pages.

Caches are full of numbers, so that what is written beside its place shows, and heads lie behind positions in
memory, as the operators of an NPU want them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..case import Case, Kind, makes_cases

#: (blocks, heads, block size, head size, size of a value's head, sequences, tokens of each)
SIZES = (
    (1, 2, 32, 64, 64, 1, 1),
    (3, 4, 16, 128, 64, 3, 1),
    (2, 3, 24, 64, 64, 2, 7),
    (5, 2, 16, 64, 128, 2, 20),
    (4, 1, 16, 64, 64, 3, 2),
)


@makes_cases("kv_append")
def kv_append(kind: Kind) -> Iterator[Case]:
    for blocks, heads, block_size, size, value_size, batch, length in SIZES:
        label = (
            f"{batch} x {length} tokens of {heads} heads into {blocks} x {block_size}, {size}, {value_size}"
        )
        yield Case(
            label,
            {
                "keys": kind.swapped(blocks, heads, block_size, size),
                "values": kind.swapped(blocks, heads, block_size, value_size),
                "key": kind.swapped(batch, heads, length, size),
                "value": kind.normal(batch, heads, length, value_size),
                "slots": kind.different(blocks * block_size, batch, length),
            },
        )
