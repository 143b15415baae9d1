"""Lengths that Python decides or computes by."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "one_shape_decides",
    forward="x = x * (1.2 if x.shape[1] > 1 else 0.9)",
)
add(
    "length_decides",
    sites=OUTER,
    forward="""
        if cache is not None and cache.get_seq_length() % 7 == @i:
            x = x * 1.4
    """,
)
add(
    "length_scales",
    sites=OUTER,
    forward="""
        if cache is not None:
            x = x * (1 + 0.01 * cache.get_seq_length())
    """,
)
add(
    "log_of_the_length",
    sites=OUTER,
    forward="""
        if cache is not None:
            x = x * math.log(2 + cache.get_seq_length())
    """,
)
add(
    "length_in_a_dict",
    sites=OUTER,
    module="TABLE_@n = {20: 1.5, 30: 0.5, 41: 2.0}",
    forward="""
        if cache is not None:
            x = x * TABLE_@n.get(cache.get_seq_length(), 1.0)
    """,
)
add(
    "length_in_a_set",
    sites=OUTER,
    forward="""
        if cache is not None and cache.get_seq_length() in {17, 23, 31, 44}:
            x = x + @v
    """,
)
add(
    "length_as_text",
    sites=OUTER,
    forward="""
        if cache is not None and str(cache.get_seq_length()).endswith("3"):
            x = x + @v
    """,
)
add(
    "length_indexes_a_table",
    sites=OUTER,
    module="TABLE_@n = torch.linspace(0, 1, 100)",
    forward="""
        if cache is not None:
            x = x + TABLE_@n[cache.get_seq_length()]
    """,
)
add(
    "length_as_a_tensor",
    sites=OUTER,
    forward="""
        if cache is not None:
            x = x + 0.01 * torch.tensor([cache.get_seq_length()])
    """,
)
add(
    "length_indexes_a_list",
    sites=OUTER,
    module="LIST_@n = [i % 4 * 0.1 for i in range(200)]",
    forward="""
        if cache is not None:
            x = x + LIST_@n[cache.get_seq_length()]
    """,
)
