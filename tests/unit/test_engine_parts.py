"""Undo stack, class swap, probe: each by itself."""

import copy
import pickle
import types

import pytest
import torch
from torch import nn

from liteboost_adaptor.engine import swap
from liteboost_adaptor.engine.probe import probe
from liteboost_adaptor.engine.undo_stack import UndoStack


class Parent:
    def inherited(self):
        return "parent"


class Child(Parent):
    def own(self):
        return "child"


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("liteboost_test_targets")
    made.Child, made.function = Child, len
    monkeypatch.setitem(__import__("sys").modules, made.__name__, made)
    return made


def test_attributes_come_back_as_they_were(module):
    before = dict(vars(Child))
    stack = UndoStack()
    for path in ("Child.own", "Child.inherited", "function"):
        stack.set_attribute(module.__name__, path, lambda original: lambda *args: "ours")
    assert Child().own() == Child().inherited() == module.function() == "ours"
    assert Parent().inherited() == "parent"
    assert stack.undo_all() == []
    assert dict(vars(Child)) == before
    assert module.function is len
    assert len(stack) == 0


def test_what_someone_else_changed_since_is_left(module):
    stack = UndoStack()
    stack.set_attribute(module.__name__, "function", lambda original: lambda: "ours")
    module.function = theirs = lambda: "theirs"
    (sentence,) = stack.undo_all()
    assert module.function is theirs
    assert "liteboost_test_targets.function" in sentence


def test_mapping_entries_come_back():
    mapping = {"a": 1}
    stack = UndoStack()
    stack.set_item(mapping, "a", 2, "a")
    stack.set_item(mapping, "b", 3, "b")
    assert mapping == {"a": 2, "b": 3}
    assert stack.undo_all() == []
    assert mapping == {"a": 1}


def test_calls_are_made_when_the_rest_is_taken_back():
    mapping, stack, seen = {}, UndoStack(), []
    stack.add_undo(lambda: seen.append(dict(mapping)))
    stack.set_item(mapping, "a", 1, "a")
    assert seen == [] and stack.undo_all() == []
    assert seen == [{}]  # last first


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def test_swap_and_restore():
    leaf = Leaf()
    made = swap.subclass(Leaf, {"forward": lambda self, x: x * 0}, "mark")
    swap.swap(leaf, made)
    assert isinstance(leaf, Leaf)
    assert type(leaf).__name__ == "Leaf"
    assert swap.mark_of(leaf) == "mark"
    assert torch.equal(leaf(torch.ones(3)), torch.zeros(3))
    assert swap.mark_of(Leaf()) is None
    assert swap.restore(leaf)
    assert type(leaf) is Leaf
    assert not swap.restore(leaf)


def test_copies_and_pickles_are_of_the_original_class():
    leaf = Leaf()
    swap.swap(leaf, swap.subclass(Leaf, {"forward": lambda self, x: x * 0}, "mark"))
    for made in (copy.deepcopy(leaf), copy.copy(leaf), pickle.loads(pickle.dumps(leaf))):
        assert type(made) is Leaf
        assert torch.equal(made.weight, leaf.weight)
    assert b"liteboost" not in pickle.dumps(leaf)


def cases(dtype):
    generator = torch.Generator().manual_seed(0)
    yield "random", None, (torch.randn(64, 64, generator=generator).to(dtype),)


def early(x):
    return (x.float() * 1.7).to(x.dtype) * torch.tensor(1.3, dtype=x.dtype)


def late(x):
    return (x.float() * 1.7 * torch.tensor(1.3, dtype=x.dtype).float()).to(x.dtype)


@pytest.mark.parametrize(
    ("replacement", "same_rounding", "reason"),
    [
        (early, True, ""),
        (late, True, "rounding order"),
        (late, False, ""),
        (lambda x: -early(x), False, "relative error"),
        (lambda x: early(x)[:1], True, "in place of"),
        (lambda x: early(x) / 0, True, "not finite"),
        (lambda x: early(x).double(), True, "float64"),
    ],
)
def test_probe(replacement, same_rounding, reason):
    found = probe(early, replacement, cases, same_rounding)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_probe_the_original_does_not_survive():
    def raises(x):
        raise ValueError("no such input")

    assert "no such input" in probe(raises, early, cases, True)
