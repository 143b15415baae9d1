"""Rerouting expressions inside a method keeps everything else of the method."""

import functools
import inspect
import traceback

import pytest
import torch
from torch import nn

from liteboost_adaptor.engine.rewrite import Routes, forwarding, rewrap, rewrite
from liteboost_adaptor.engine.source import SourceUnavailable


def helper(x):
    return x + 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate, self.act = nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4), nn.SiLU()

    def forward(self, x, scale=2.0, *, flag=False, **kwargs):
        """Documentation that stays."""
        residual = x
        x = self.act(self.gate(x)) * self.up(x)
        x = residual + x
        residual = x
        x = self.norm(x)
        x = x * scale
        if flag:
            x = helper(x)
        return x, residual


def counting(counts, name, function):
    def run(*args):
        counts[name] = counts.get(name, 0) + 1
        return function(*args)

    return run


@pytest.fixture
def routed():
    counts = {}
    routes = Routes(
        call={
            "up": counting(counts, "up", lambda m, x: m(x)),
            "gate": counting(counts, "gate", lambda m, x: m(x)),
        },
        product={"act": counting(counts, "act", lambda m, a, b: m(a) * b)},
        residual={"norm": counting(counts, "norm", lambda m, a, b: (m(a + b), a + b))},
        function={"helper": (helper, counting(counts, "helper", helper))},
    )
    return rewrite(Block.forward, routes), counts


def test_every_pattern_is_met_and_the_result_is_the_same(routed):
    rewritten, counts = routed
    block, x = Block(), torch.randn(3, 4)
    for flag in (False, True):
        expected = block(x, 3.0, flag=flag, unused=1)
        found = rewritten.function(block, x, 3.0, flag=flag, unused=1)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counts == {"up": 2, "gate": 2, "act": 2, "norm": 2, "helper": 1}
    assert rewritten.met == {
        "call": {"up", "gate"},
        "product": {"act"},
        "residual": {"norm"},
        "function": {"helper"},
    }


def joinable(counts, join):
    """A replacement of a product that can be joined with those of two calls."""
    product = counting(counts, "act", lambda m, a, b: m(a) * b)
    product.of_calls = join
    return product


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.gate, self.up = nn.SiLU(), nn.Linear(4, 4), nn.Linear(4, 4)

    def joined(self, x):
        return self.act(self.gate(x)) * self.up(x)

    def exchanged(self, x):
        return self.up(x) * self.act(self.gate(x))

    def of_two(self, x, y):
        return self.act(self.gate(x)) * self.up(y)

    def of_an_expression(self, x):
        return self.act(self.gate(x + 1)) * self.up(x + 1)

    def of_one_layer(self, x):
        return self.act(self.gate(x)) * x

    def both_ways(self, x):
        return self.act(self.gate(x)) * self.up(x) + self.act(x) * x


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("joined", {"whole": 1}),
        ("exchanged", {"whole": 1}),
        ("of_two", {"gate": 1, "up": 1, "act": 1}),
        ("of_an_expression", {"gate": 1, "up": 1, "act": 1}),
        ("of_one_layer", {"gate": 1, "act": 1}),
        ("both_ways", {"whole": 1, "act": 1}),
    ],
)
def test_a_product_of_two_calls_of_one_name_is_joined(name, expected):
    counts = {}
    call = {child: counting(counts, child, lambda m, x: m(x)) for child in ("gate", "up")}
    whole = counting(counts, "whole", lambda act, gate, up, x: act(gate(x)) * up(x))

    def join(left, right):
        assert (left, right) == (call["gate"], call["up"])
        return whole

    block, arguments = Products(), torch.randn(2, 3, 4)[: 2 if name == "of_two" else 1]
    routes = Routes(call=call, product={"act": joinable(counts, join)})
    rewritten = rewrite(getattr(Products, name), routes)
    assert torch.equal(rewritten.function(block, *arguments), getattr(block, name)(*arguments))
    assert counts == expected
    assert rewritten.met["call"] == {"gate"} if name == "of_one_layer" else {"gate", "up"}
    assert rewritten.met["product"] == {"act"}


def test_a_product_that_is_not_joined_is_rerouted_in_parts():
    counts = {}
    call = {child: counting(counts, child, lambda m, x: m(x)) for child in ("gate", "up")}
    routes = Routes(call=call, product={"act": joinable(counts, lambda left, right: None)})
    block, x = Products(), torch.randn(3, 4)
    assert torch.equal(rewrite(Products.joined, routes).function(block, x), block.joined(x))
    assert counts == {"gate": 1, "up": 1, "act": 1}


def test_signature_defaults_and_documentation_stay(routed):
    function = routed[0].function
    assert inspect.signature(function) == inspect.signature(Block.forward)
    assert function.__doc__ == Block.forward.__doc__
    assert function.__globals__ is Block.forward.__globals__
    assert function.__qualname__ == "Block.forward"


def test_tracebacks_show_the_original_lines(routed):
    try:
        routed[0].function(Block(), "not a tensor")
    except TypeError as fault:
        frames = [f for f in traceback.extract_tb(fault.__traceback__) if f.name == "forward"]
    assert any("self.act(self.gate(x)) * self.up(x)" in frame.line for frame in frames)


def test_a_function_patched_later_by_someone_else_is_respected(routed, monkeypatch):
    rewritten, counts = routed
    monkeypatch.setitem(globals(), "helper", lambda x: x * 0)
    found, _ = rewritten.function(Block(), torch.ones(1, 4), flag=True)
    assert torch.equal(found, torch.zeros(1, 4))
    assert "helper" not in counts


def test_nothing_to_reroute():
    assert rewrite(Block.forward, Routes(call={"absent": print})) is None


class Shapes(nn.Module):
    """Residual additions of every shape the pattern must tell apart."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def keeps_both(self, a, b):
        total = a + b
        normed = self.norm(total)
        return normed, total

    def copies(self, a, b):
        total = a + b
        kept = total
        normed = self.norm(total)
        return normed, total, kept

    def overwrites(self, a, b):
        a = a + b
        a = self.norm(a)
        return a

    def uses_between(self, a, b):
        total = a + b
        total = total * 2
        normed = self.norm(total)
        return normed, total

    def subtracts(self, a, b):
        total = a - b
        normed = self.norm(total)
        return normed, total

    def normalises_another(self, a, b):
        total = a + b
        normed = self.norm(a)
        return normed, total


@pytest.mark.parametrize("name", ["keeps_both", "copies", "overwrites"])
def test_residual_shapes_that_fuse(name):
    calls = []
    fused = lambda m, a, b: calls.append(1) or (m(a + b), a + b)  # noqa: E731
    rewritten = rewrite(getattr(Shapes, name), Routes(residual={"norm": fused}))
    a, b = torch.randn(3), torch.randn(3)
    expected, found = getattr(Shapes(), name)(a, b), rewritten.function(Shapes(), a, b)
    assert len(calls) == 1
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["uses_between", "subtracts", "normalises_another"])
def test_residual_shapes_that_do_not(name):
    assert rewrite(getattr(Shapes, name), Routes(residual={"norm": print})) is None


class HandsOn(nn.Module):
    """As adapters call the layer they wrap: with whatever else came in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, *args, **kwargs):
        kwargs.pop("ours", None)
        return self.layer(x, *args, **kwargs)


def test_a_call_is_rerouted_only_while_nothing_else_is_handed_on():
    counts = {}
    routes = Routes(call={"layer": counting(counts, "layer", lambda m, x: m(x))})
    rewritten = rewrite(HandsOn.forward, routes)
    assert rewritten.met == {"call": {"layer"}}
    module, x = HandsOn(), torch.randn(1, 2)
    for extras in ({}, {"ours": 1}):
        assert torch.equal(rewritten.function(module, x, **extras), module(x, **extras))
    assert counts == {"layer": 2}
    for args, kwargs in (((1,), {}), ((), {"theirs": 1})):
        with pytest.raises(TypeError, match="forward"):
            rewritten.function(module, x, *args, **kwargs)
    assert counts == {"layer": 2}, "what takes one argument was called with more"


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        wrapper.calls += 1
        return function(self, *args, **kwargs)

    wrapper.calls = 0
    return wrapper


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 2)

    @decorated
    @torch.no_grad()
    def forward(self, x):
        return self.up(x)


def test_wrappers_are_repeated():
    seen = []
    routes = Routes(call={"up": lambda m, x: seen.append(torch.is_grad_enabled()) or m(x)})
    rewritten = rewrite(Decorated.forward, routes).function
    module, x = Decorated(), torch.randn(1, 2)
    assert torch.equal(rewritten(module, x), module(x))
    assert seen == [False]


def test_a_wrapper_that_hides_what_it_wraps_cannot_be_repeated():
    class Hidden:
        target = None

    def wrapper(self, x):
        return Hidden.target(self, x)

    wrapper.__wrapped__ = Hidden.target = Block.forward
    with pytest.raises(SourceUnavailable, match="cannot be repeated"):
        rewrap(wrapper, Block.forward)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, x):
        return x + 1


class CallsSuper(Base):
    def forward(self, x):
        return self.up(super().forward(x))


def test_super_and_comprehensions_survive():
    rewritten = rewrite(CallsSuper.forward, Routes(call={"up": lambda m, x: m(x)})).function
    module, x = CallsSuper(), torch.randn(1, 2)
    assert torch.equal(rewritten(module, x), module(x))


class Rebinds(nn.Module):
    def forward(self, x):
        self = self.child  # noqa: PLW0642
        return self.up(x)


def test_a_method_that_rebinds_self_is_refused():
    with pytest.raises(SourceUnavailable, match="assigns to self"):
        rewrite(Rebinds.forward, Routes(call={"up": print}))


def test_forwarding_keeps_names_and_defaults():
    def original(self, hidden_states, unsqueeze_dim=1):
        return hidden_states

    forwarded = forwarding(original, lambda *args: args)
    assert forwarded(1, hidden_states=2) == (1, 2, 1)
    assert forwarded(1, 2, unsqueeze_dim=5) == (1, 2, 5)


class Ordered(nn.Module):
    """Its factors note when they are computed."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
        self.order = []

    def noted(self, name, x):
        self.order.append(name)
        return x

    def act_first(self, x):
        return self.act(self.noted("gate", x)) * self.noted("up", x + 1)

    def act_second(self, x):
        return self.noted("up", x + 1) * self.act(self.noted("gate", x))

    def function_first(self, x):
        return nn.functional.silu(self.noted("gate", x)) * self.noted("up", x + 1)

    def function_second(self, x):
        return self.noted("up", x + 1) * nn.functional.silu(self.noted("gate", x))


@pytest.mark.parametrize("name", ["act_first", "act_second", "function_first", "function_second"])
def test_factors_are_computed_in_the_order_they_are_written_in(name):
    counts, block, x = {}, Ordered(), torch.randn(3)
    target = counting(counts, "product", lambda f, a, b: f(a) * b)
    routes = Routes(product={"act": target}, factor={"nn.functional.silu": target})
    expected = getattr(block, name)(x)
    order, block.order = block.order, []
    rewritten = rewrite(getattr(Ordered, name), routes)
    assert torch.equal(rewritten.function(block, x), expected)
    assert counts == {"product": 1}
    assert block.order == order == (["gate", "up"] if name.endswith("first") else ["up", "gate"])


class Receivers(nn.Module):
    """Calls of ``update`` on what was handed in, on what is its own, and on a dictionary."""

    def __init__(self):
        super().__init__()
        self.own = []

    def handed_in(self, cache, x):
        if cache is not None:
            x = cache.update(x, x + 1, layer=3)
        return x

    def own_only(self, x):
        return self.own.update(x, x)

    def dictionary(self, options, x):
        options.update({"x": x})
        return options


class Updated:
    def update(self, a, b, layer):
        return a, b, layer


def test_a_receiver_is_exchanged_and_nothing_else():
    seen, cache, caller = [], Updated(), Receivers()

    def receiver(found, module, is_handed_on):
        seen.append((found, module, is_handed_on))
        return found

    routes = Routes(receiver={"update": receiver})
    rewritten = rewrite(Receivers.handed_in, routes)
    assert rewritten.met == {"receiver": frozenset({"update"})}
    assert rewritten.function(caller, cache, 1) == (1, 2, 3)
    assert rewritten.function(Receivers(), None, 1) == 1
    assert seen == [(cache, caller, False)]
    assert rewrite(Receivers.own_only, routes) is None
    assert rewrite(Receivers.dictionary, routes) is None
