"""Attributes and buffers that a step itself exchanges."""

from __future__ import annotations

from ..idiom import OUTER, Theme

THEME = Theme(__name__)
add = THEME.add

add(
    "buffer_in_place",
    init="self.register_buffer('total_@n', torch.zeros(1))",
    forward="""
        self.total_@n.add_(x.mean())
        x = x + 0.1 * self.total_@n
    """,
)
add(
    "buffer_exchanged",
    init="self.register_buffer('total_@n', torch.zeros(1))",
    forward="""
        self.total_@n = self.total_@n * 0.9 + x.mean()
        x = x + 0.1 * self.total_@n
    """,
)
add(
    "tensor_attribute_exchanged",
    init="self.total_@n = torch.zeros(1)",
    forward="""
        self.total_@n = self.total_@n * 0.9 + x.mean()
        x = x + 0.1 * self.total_@n
    """,
)
add(
    "saw_the_end",
    sites=OUTER,
    init="self.saw_@n = torch.zeros(1, dtype=torch.bool)",
    forward="""
        if ids is not None:
            self.saw_@n = (ids[:1, -1] > 56)
    """,
    after="user.log.append([bool(p.saw_@n) for p in model.modules() if hasattr(p, 'saw_@n')])",
)
add(
    "last_sign",
    init="self.sign_@n = torch.ones(1)",
    forward="""
        before = self.sign_@n
        self.sign_@n = (x[0, -1, :1] > -0.8).float()
        x = x * (1 + 0.2 * before)
    """,
)
add(
    "token_shift",
    init="self.last_@n = torch.zeros(1)",
    forward="""
        before = self.last_@n
        self.last_@n = x[0, -1, @i].detach().round().reshape(1)
        x = x + 0.1 * before
    """,
)
add(
    "last_hidden",
    init="self.last_@n = None",
    forward="""
        before = x if self.last_@n is None else self.last_@n
        self.last_@n = x[:, -1:]
        x = x + 0.1 * before.mean()
    """,
)
add(
    "item_attribute",
    init="self.level_@n = 0.0",
    forward="""
        x = x * (1 + 0.1 * math.tanh(self.level_@n))
        self.level_@n = float(x.mean())
    """,
)
add(
    "equal_number_attribute",
    init="self.flag_@n = 0",
    forward="""
        x = x * (1.2 if self.flag_@n else 1.0)
        self.flag_@n = int(x[0, -1, @i] > -0.7)
    """,
)
add(
    "equal_tuple_attribute",
    init="self.pair_@n = (0, 0)",
    forward="""
        self.pair_@n = (int(x[0, -1, 0] > -0.8), x.shape[1])
        x = x * (1 + 0.1 * self.pair_@n[0])
    """,
)
add(
    "list_attribute",
    init="self.history_@n = []",
    forward="""
        self.history_@n.append(x.shape[1])
        x = x * (1 + 0.001 * len(self.history_@n))
    """,
)
add(
    "dict_attribute_of_tensors",
    init="self.table_@n = {}",
    forward="""
        before = self.table_@n.get("last", 0.0)
        self.table_@n["last"] = x.mean()
        x = x + 0.1 * before
    """,
)
