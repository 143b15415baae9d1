"""What a step does to the form of tensors, and what code is told of what stands for them."""

from __future__ import annotations

import numbers
import sys
import types
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from liteboost_adaptor.program import disguise
from liteboost_adaptor.program.disguise import disguised
from liteboost_adaptor.program.execution import Execution
from liteboost_adaptor.program.operators import is_sized_by_values
from liteboost_adaptor.program.passes import improve
from liteboost_adaptor.program.recording import Call, Recording, Slot
from liteboost_adaptor.program.symbolic_tensor import SymbolicTensor
from liteboost_adaptor.program.tensors import Written, memory, written_by

from .conftest import Pair, served

aten = torch.ops.aten


def changes(held: torch.Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    return [
        (aten.transpose_.default, (held, 0, 1)),
        (aten.unsqueeze_.default, (held, 0)),
        (aten.resize_.default, (held, [7])),
        (aten.set_.source_Tensor, (held, torch.ones(2))),
        (aten.as_strided_.default, (held, [2], [2], 1)),
        (aten.mul_.Scalar, (held, 2)),
    ]


@pytest.mark.parametrize("which", range(6))
def test_what_failed_half_way_gets_its_form_and_values_back(which: int) -> None:
    held = torch.arange(6.0).view(2, 3)
    func, args = changes(held)[which]
    written = Written()
    written.about_to(func, args, {})
    func(*args)
    assert written.is_reformed() == (func is not aten.mul_.Scalar)
    written.give_back()
    assert torch.equal(held, torch.arange(6.0).view(2, 3)) and held.stride() == (3, 1)
    assert not written.is_reformed()


def test_a_tensor_without_values_that_the_step_has_made_is_its_own() -> None:
    made, written = torch.empty(0), Written()
    written.made([made], [])
    written.about_to(aten.mul.out, (torch.ones(2), torch.ones(2)), {"out": made})
    assert written.is_own(made) and not written.tensors


def test_statistics_are_written_in_training_only() -> None:
    x, mean, var = torch.ones(2, 1, 3), torch.zeros(1), torch.ones(1)
    for training, count in ((True, 2), (False, 0)):
        args = (x, None, None, mean, var, training, 0.1, 1e-5)
        assert len(list(written_by(aten.native_batch_norm.default, args, {}))) == count


def test_views_that_negate_or_conjugate_show_other_values() -> None:
    x = torch.complex(torch.ones(3), torch.ones(3))
    assert memory(x.conj()) != memory(x) == memory(x.detach())
    assert memory(torch._neg_view(x)) != memory(x)


def test_variants_that_write_to_out_are_sized_by_values_as_what_they_are_variants_of() -> None:
    assert is_sized_by_values(aten._unique2.out, ())
    assert is_sized_by_values(aten.nonzero.default, ())
    assert not is_sized_by_values(aten.repeat_interleave.self_int, ())


def test_an_alias_that_is_returned_stays_an_object_of_its_own() -> None:
    def recorded() -> Recording:
        calls = [
            Call(aten.detach.default, (Slot(0),), {}, [1]),
            Call(aten.relu.default, (Slot(1),), {}, [2]),
        ]
        return Recording(calls=list(calls), count=3)

    shapes = {number: torch.ones(2) for number in range(3)}
    for returned, kept in (([2], 1), ([1, 2], 2)):
        recording = recorded()
        improve(recording, shapes, returned)
        assert len(recording.calls) == kept


def asked(n: Any, x: Any) -> list[bool]:
    found = [isinstance(n, int), isinstance(n, numbers.Integral), n.__class__ is int, type(n) is int]
    match n:
        case int():
            found.append(True)
        case _:
            found.append(False)
    return [*found, type(x) is torch.Tensor, type(x).__name__ == "Tensor", isinstance(asked, type)]


def test_what_stands_for_a_size_or_a_tensor_is_seen_as_that() -> None:
    size = ShapeEnv().create_unbacked_symint()
    stands = SymbolicTensor(torch.ones(2), torch.ones(2))
    module = types.ModuleType("of_a_user")
    space = vars(module) | {"numbers": numbers, "torch": torch}
    function = types.FunctionType(asked.__code__, space)
    space["asked"] = function
    ran = Execution({asked.__code__: space})
    before = dict(vars(torch.SymInt))
    with disguised(ran, SymbolicTensor):
        assert function(size, stands) == [True] * 7 + [False]
        assert type(size) is torch.SymInt and type(stands) is SymbolicTensor
    assert function(size, stands)[0] is False
    assert dict(vars(torch.SymInt)) == before and "type" not in space
    assert sys.getprofile() is None


def test_one_thread_records_at_a_time() -> None:
    """What stands for ``type`` is seen by all threads: the step of another one is recorded later."""
    pair = Pair()
    pair.start()
    before = served()
    with disguise.one_at_a_time:
        pair.agree(6)
        assert served() == before
    pair.agree(6)
    assert served() > before
