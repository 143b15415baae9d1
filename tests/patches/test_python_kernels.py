"""A kernel of aten that was registered from Python, whenever and by whomever, is what runs."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from support import calls, numbers, processes, tiny_models

import liteboost_adaptor
from liteboost_adaptor import watch

TOLERANCE = 2e-5
OTHER = "liteboost_test_python_kernels"


class Pair:
    """A model with us, and the same without."""

    def __init__(self) -> None:
        self.plain, self.served = tiny_models.build("llama"), tiny_models.build("llama")
        self.served.load_state_dict(self.plain.state_dict())
        self.inputs = tiny_models.example_inputs(self.plain)
        liteboost_adaptor.apply(self.served)
        liteboost_adaptor.undo(self.plain)  # and left alone when it is called

    def forwards(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits with us and without."""
        with torch.no_grad():
            found, expected = (
                model(**self.inputs, use_cache=False).logits for model in (self.served, self.plain)
            )
        return found, expected

    def is_served(self) -> bool:
        with calls.served() as served:
            self.forwards()
        return bool(served.rules) and not served.fallbacks


def mm(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,jk->ijk", self, other).sum(1) * 1.125


@contextmanager
def libraries(count: int, namespace: str = "aten") -> Iterator[list[torch.library.Library]]:
    """Libraries of ``namespace``, gone at the end; torch does not warn of what they override."""
    made = [torch.library.Library(namespace, "IMPL" if namespace == "aten" else "DEF") for _ in range(count)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield made
    finally:
        for library in made:
            library._destroy()


def test_a_kernel_registered_from_python_is_what_runs() -> None:
    pair = Pair()
    seen: list[int] = []

    def counting(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return mm(self, other)

    with libraries(1) as (library,):
        library.impl("mm", counting, "CPU")
        found, expected = pair.forwards()
    assert seen and len(seen) % 2 == 0
    assert numbers.relative(found, expected) <= TOLERANCE
    seen.clear()
    assert pair.is_served()


def test_of_two_kernels_for_one_operator_the_one_that_is_left_runs() -> None:
    """Torch lists kernels as a set, from which the first library that goes takes that of the other, too."""
    pair = Pair()
    with libraries(2) as both:
        for library in both:
            library.impl("mm", mm, "CPU", allow_override=True)
        for library in reversed(both):
            found, expected = pair.forwards()
            assert numbers.relative(found, expected) <= TOLERANCE
            library._destroy()
    assert pair.is_served()


def test_of_two_kernels_one_may_go_before_anybody_looks() -> None:
    pair = Pair()
    assert pair.is_served()
    with libraries(2) as (first, last):
        for library in (first, last):
            library.impl("mm", mm, "CPU", allow_override=True)
        first._destroy()
        assert "aten/mm/CPU" not in torch.library._impls
        found, expected = pair.forwards()
        assert numbers.relative(found, expected) <= TOLERANCE
    assert pair.is_served()


def test_a_kernel_that_comes_while_another_goes_is_what_runs() -> None:
    """The set is as large as before."""
    pair = Pair()
    with libraries(1, OTHER) as (other,), libraries(1) as (library,):
        other.define("nothing(Tensor x) -> Tensor")
        other.impl("nothing", torch.clone, "CPU")
        assert pair.is_served()
        before = len(torch.library._impls)
        other._destroy()
        library.impl("mm", mm, "CPU")
        assert len(torch.library._impls) == before
        found, expected = pair.forwards()
        assert numbers.relative(found, expected) <= TOLERANCE
    assert pair.is_served()


def test_a_kernel_that_comes_while_another_goes_between_undo_and_apply_is_what_runs() -> None:
    """Nobody counts meanwhile."""
    pair = Pair()
    with libraries(1, OTHER) as (other,), libraries(1) as (library,):
        other.define("nothing(Tensor x) -> Tensor")
        other.impl("nothing", torch.clone, "CPU")
        assert pair.is_served()
        liteboost_adaptor.undo()
        other._destroy()
        library.impl("mm", mm, "CPU")
        liteboost_adaptor.apply(pair.served)
        found, expected = pair.forwards()
        assert numbers.relative(found, expected) <= TOLERANCE
    assert pair.is_served()


def test_a_kernel_that_goes_while_another_comes_between_undo_and_apply_is_forgotten() -> None:
    pair = Pair()
    with libraries(1, OTHER) as (other,), libraries(1) as (library,):
        library.impl("mm", mm, "CPU")
        assert not pair.is_served()
        liteboost_adaptor.undo()
        library._destroy()
        other.define("nothing(Tensor x) -> Tensor")
        other.impl("nothing", torch.clone, "CPU")
        liteboost_adaptor.apply(pair.served)
        assert pair.is_served()


@pytest.mark.parametrize("form", ["in C++", "in Python"])
def test_a_watch_sees_a_kernel_that_comes_while_another_goes(form: str) -> None:
    Pair()  # from then on registrations are counted
    here = watch.Watch([watch.place_in_module(vars(F), "silu")])
    assert type(here.ask) is types.BuiltinFunctionType
    ask = here.ask if form == "in C++" else here._written_out()
    with libraries(1, OTHER) as (other,), libraries(1) as (library,):
        other.define("nothing(Tensor x) -> Tensor")
        other.impl("nothing", torch.clone, "CPU")
        assert ask() == ""
        other._destroy()
        library.impl("mm", mm, "CPU")
        assert ask() == "a kernel of aten::mm was registered by someone else"
    assert ask() == ""


def test_kernels_registered_before_the_package_came_are_known() -> None:
    """Also those that torch has forgotten, as another library that had them is gone."""
    text = """
import types
import warnings
import torch
warnings.simplefilter("ignore")
libraries = [torch.library.Library("aten", "IMPL") for _ in range(2)]
for library in libraries:
    library.impl("mm", lambda a, b: a @ b, "CPU", allow_override=True)
libraries[0]._destroy()
import liteboost_adaptor
from liteboost_adaptor import python_kernels
from support import tiny_models
liteboost_adaptor.apply(tiny_models.build("llama"))
found = [python_kernels.someone_elses()]
libraries[1]._destroy()
found.append(python_kernels.someone_elses())
import json
print(json.dumps(found))
"""
    found = processes.python_json(text, is_forked=True)
    assert found == ["a kernel of aten::mm was registered by someone else", ""]


def test_what_counts_registrations_is_taken_back_with_the_rest() -> None:
    text = """
import torch
original = torch.library.Library.impl
import liteboost_adaptor
from support import tiny_models
liteboost_adaptor.apply(tiny_models.build("llama"))
found = [torch.library.Library.impl is original]
liteboost_adaptor.undo()
found.append(torch.library.Library.impl is original)
import json
print(json.dumps(found))
"""
    assert processes.python_json(text, is_forked=True) == [False, True]
