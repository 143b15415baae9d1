"""Which calls may move down to the product that uses their result, and which functions are factors."""

from __future__ import annotations

import ast
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from liteboost_adaptor.engine import expressions
from liteboost_adaptor.engine.rewrite import Routes, rewrite

MOVES = {
    "used in the next statement": """
        gate = self.act(self.up(x))
        return self.down(gate * self.up(x))""",
    "past a linear layer": """
        gate = self.act(self.up(x))
        x = self.down(x)
        x = gate * x
        return x""",
    "right factor": """
        gate = self.act(x)
        return self.up(x) * gate""",
    "overwritten by the product": """
        x = self.act(x)
        x = x * self.up(y)
        return x + x""",
    "inside a branch": """
        if y is not None:
            gate = self.act(x)
            x = gate * y
        return x""",
}
STAYS = {
    "used twice": """
        gate = self.act(x)
        return gate * y + gate""",
    "squared": """
        gate = self.act(x)
        return gate * gate""",
    "not a factor": """
        gate = self.act(x)
        return gate + y""",
    "past a call that may write": """
        gate = self.act(x)
        y = self.mystery(x)
        return gate * y""",
    "past an unknown function": """
        gate = self.act(x)
        y = helper(x)
        return gate * y""",
    "past a write in place": """
        gate = self.act(x)
        x += 1
        return gate * y""",
    "past a store to an element": """
        gate = self.act(x)
        x[0] = 1
        return gate * y""",
    "past a method": """
        gate = self.act(x)
        x.zero_()
        return gate * y""",
    "in another block": """
        gate = self.act(x)
        if y is not None:
            x = gate * y
        return x""",
    "maybe never used": """
        gate = self.act(x)
        return gate * y if y is not None else x""",
    "used after the product by another name's value": """
        x = self.act(x)
        y = x * y
        return x + y""",
    "read in a nested function": """
        gate = self.act(x)
        y = gate * y
        return (lambda: gate)() + y""",
    "a parameter's name, read before": """
        z = x + 1
        x = self.act(z)
        w = x * y
        return w""",
    "in a loop": """
        for _ in range(2):
            gate = self.act(x)
            x = gate * y
        return x""",
}


def definition(body: str) -> ast.FunctionDef:
    text = "def forward(self, x, y=None):" + textwrap.indent(textwrap.dedent(body), "    ")
    return ast.parse(text).body[0]


@pytest.mark.parametrize("body", MOVES.values(), ids=MOVES)
def test_a_call_moves_past_what_cannot_change_its_argument(body: str) -> None:
    found = expressions.delayed_calls(definition(body), "self", {"act"}, {"up", "down"})
    assert len(found.statements) == len(found.factors) == 1
    assert expressions.child_called(next(iter(found.factors.values())), "self") == "act"


@pytest.mark.parametrize("body", STAYS.values(), ids=STAYS)
def test_any_other_call_stays_where_it_is(body: str) -> None:
    found = expressions.delayed_calls(definition(body), "self", {"act"}, {"up", "down"})
    assert not found.statements and not found.factors


def test_a_call_stays_where_no_child_is_known_to_be_pure() -> None:
    body = MOVES["past a linear layer"]
    assert not expressions.delayed_calls(definition(body), "self", {"act"}, set()).statements


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.up, self.gate = nn.SiLU(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        gate = self.act(self.gate(x))
        x = self.up(x)
        x = x * gate
        x = self.act(x)
        x = x * x.sum()
        return F.silu(x) * torch.sigmoid(self.up(x)) * F.silu(x, inplace=False)


def test_the_rewritten_method_computes_the_same() -> None:
    seen = []

    def product(act, gate, up):
        seen.append(act)
        return act(gate) * up

    layer, x = Late(), torch.randn(3, 4)
    routes = Routes(
        call={"up": lambda child, x: child(x), "gate": lambda child, x: child(x)},
        product={"act": product},
        factor={"F.silu": product, "torch.sigmoid": product},
    )
    rewritten = rewrite(Late.forward, routes)
    assert torch.equal(rewritten.function(layer, x), layer(x))
    assert seen.count(layer.act) == 1 and len(seen) == 2, "x.sum() reads the activated value"
    assert rewritten.met["product"] == {"act"}
    assert rewritten.met["factor"] <= {"F.silu", "torch.sigmoid"}


def test_names_are_resolved_through_modules_only() -> None:
    names = {"F": F, "torch": torch, "holder": Late(), "silu": F.silu}
    assert expressions.resolve("F.silu", names) is F.silu
    assert expressions.resolve("torch.nn.functional.silu", names) is F.silu
    assert expressions.resolve("silu", names) is F.silu
    assert expressions.resolve("holder.act", names) is None
    assert expressions.resolve("missing.silu", names) is None


@pytest.mark.parametrize(
    "text",
    [
        "F.silu(x, inplace=True) * y",
        "x.sigmoid() * y",
        "F.silu(*x) * y",
        "F.silu(x) + y",
        "F.silu(x, True) * y",
    ],
)
def test_what_is_no_factor(text: str) -> None:
    assert not expressions.callees_in_products(definition(f"return {text}"), {"self", "x", "y"})


HANDED_ON = {
    "self.act(x, *args, **kwargs)": ["args", "kwargs"],
    "self.act(x, *args)": ["args"],
    "self.act(x, **kwargs)": ["kwargs"],
}
NOT_HANDED_ON = (
    "self.act(x)",
    "self.act(x, args)",
    "self.act(x, *kwargs)",
    "self.act(x, **args)",
    "self.act(x, *args, y, **kwargs)",
    "self.act(x, *args, y=y, **kwargs)",
    "self.act(x, *args, *args)",
    "self.act(x, *other)",
    "self.act(*args, **kwargs)",
    "self.act(x + y, *args, **kwargs)",
    "self.part.act(x, *args, **kwargs)",
    "act(x, *args, **kwargs)",
    "(lambda *args: self.act(x, *args))(y)",
    "[kwargs := {'y': y}, self.act(x, **kwargs)][1]",
)


def handed_on(text: str) -> list[tuple[str, list[str]]]:
    function = ast.parse(f"def forward(self, x, y=None, *args, **kwargs):\n    return {text}").body[0]
    found = [expressions.child_handed_extras(node, function, "self") for node in ast.walk(function)]
    return [(name, extras) for name, extras in found if name]


@pytest.mark.parametrize("text", HANDED_ON)
def test_what_came_in_is_handed_on_to_a_child(text: str) -> None:
    assert handed_on(text) == [("act", HANDED_ON[text])]


@pytest.mark.parametrize("text", NOT_HANDED_ON)
def test_anything_else_beside_the_argument_is_not(text: str) -> None:
    assert handed_on(text) == []
