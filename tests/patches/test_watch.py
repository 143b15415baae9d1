"""What a watch takes for torch's own, and what for somebody else's."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.replaced import replaced
from torch import nn
from transformers.models.llama import modeling_llama

from liteboost_adaptor import watch
from liteboost_adaptor.engine import callees


def test_torchs_own_functions_are_known_as_such() -> None:
    """Of the namespaces in which originals look, everything that computes on tensors."""
    spaces: list[tuple[Any, Callable[..., watch.Place]]] = [
        (vars(F), watch.place_in_module),
        (vars(torch._C._nn), watch.place_in_module),
        (torch.Tensor, watch.place_in_class),
        (nn.Linear, watch.place_in_class),
        (nn.LayerNorm, watch.place_in_class),
    ]
    foreign = []
    for space, place_in in spaces:
        for name in dir(space) if isinstance(space, type) else list(space):
            place = place_in(space, name)
            kinds = (types.BuiltinFunctionType, types.MethodDescriptorType)
            if isinstance(place.value(), kinds) and watch.Watch([place])():
                foreign.append(str(place))
    assert not foreign


def _functions_of(space: dict[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in list(space.items()):
        is_public = isinstance(value, types.FunctionType) and not name.startswith("_")
        if is_public and value.__module__.startswith("torch.nn."):
            yield name, value


def test_nothing_that_torchs_own_functions_call_is_taken_for_somebody_elses() -> None:
    """Of every function and module of torch that an original may call, whatever those call in turn."""
    reasons = {}
    for name, function in _functions_of(vars(F)):
        place = watch.place_in_module(vars(F), name)
        reasons[name] = watch.Watch([place, *callees.of_function(function)])()
    for name, kind in vars(nn.modules).items():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            reasons[name] = watch.Watch(callees.of_function(kind.forward, kind))()
    assert len(reasons) > 250
    assert not {name: reason for name, reason in reasons.items() if reason}


@pytest.mark.parametrize("space", [torch.special, torch.linalg, torch.fft], ids=lambda space: space.__name__)
def test_functions_named_after_their_module_are_torchs_own(space: types.ModuleType) -> None:
    names = [name for name, value in vars(space).items() if type(value) is types.BuiltinFunctionType]
    names = [name for name in names if not name.startswith("_")]
    places = [watch.place_in_module(vars(space), name) for name in names]
    assert len(places) > 15 and watch.Watch(places)() == ""
    asked = watch.Watch(places)
    with replaced(places[0], vars(space)[names[1]]):
        assert asked() == f"{places[0]} was replaced by someone else"


def test_what_torch_makes_of_functions_is_looked_into() -> None:
    """Results of torch's own factories have the factory's code, whatever they were made of."""
    from torch._jit_internal import boolean_dispatch

    place = watch.place_in_module(vars(F), "max_pool2d")
    asked = watch.Watch([place])
    assert asked() == ""
    of_a_users = boolean_dispatch(
        arg_name="return_indices",
        arg_index=6,
        default=False,
        if_true=F.max_pool2d_with_indices,
        if_false=lambda *args, **kwargs: args[0] * 2,
        module_name="torch.nn.functional",
        func_name="max_pool2d",
    )
    for value in (of_a_users, torch.no_grad()(F.max_pool2d), functools.partial(F.max_pool2d)):
        with replaced(place, value):
            assert asked() == f"{place} was replaced by someone else"


def test_a_method_that_torch_npu_keeps_under_another_name_is_torchs_own() -> None:
    """torch_npu 2.9.0 puts its own `type` on tensors, which calls this."""
    place = watch.place_in_class(torch.Tensor, "type_raw")
    with replaced(place, torch.Tensor.type):
        assert watch.Watch([place])() == ""
    with replaced(place, torch.Tensor.to):
        assert watch.Watch([place])() == f"{place} was replaced by someone else"


def test_importing_a_part_of_a_package_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    package, part = types.ModuleType("lazy"), types.ModuleType("lazy.part")
    for kind in ("torch.lazy", "lazy"):
        package.__name__ = kind
        vars(package).pop("part", None)
        place = watch.place_in_module(vars(package), "part")
        asked = watch.Watch([place])
        with replaced(place, part):
            assert asked() == f"{place} was replaced by someone else"
        assert asked() == ""
        monkeypatch.setitem(sys.modules, f"{kind}.part", part)
        with replaced(place, part):
            assert asked() == ""
        with replaced(place, types.ModuleType("part")):
            assert asked() == f"{place} was replaced by someone else"


def test_operators_count_with_their_reflections() -> None:
    names = {place.name for place in callees.of_operators("mul")}
    assert names == {"__mul__", "__rmul__"}


def _names(function: Callable[..., Any]) -> set[str]:
    return {str(place) for place in callees.of_function(function)}


def test_what_is_read_is_the_code_that_runs_and_not_its_text() -> None:
    def exchanged(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) * torch.tanh(x)

    assert "torch.relu" in _names(exchanged)
    exchanged.__code__ = other.__code__
    assert _names(exchanged) == _names(other) >= {"torch.tanh", "torch.Tensor.cumsum"}
    assert "torch.relu" not in _names(exchanged)
    made: dict[str, Any] = {"torch": torch}
    exec("def without_text(x): return x.cumsum(0) * torch.tanh(x)", made)
    assert {"torch.tanh", "torch.Tensor.cumsum", "torch.Tensor.__mul__"} <= _names(made["without_text"])


def test_a_function_that_is_met_deep_down_first_is_read_where_it_is_called() -> None:
    lines = [f"def deep{n}(x): return deep{n + 1}(x)" for n in range(4)]
    lines += ["def deep4(x): return last(x)", "def last(x): return inner(x)"]
    lines += ["def inner(x): return torch.relu(x)", "def whole(x):\n    x = deep0(x)\n    return last(x)"]
    made: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), made)
    assert "torch.relu" in _names(made["whole"])


def test_in_python_and_in_cpp_a_watch_says_the_same() -> None:
    places = [
        watch.place_in_module(vars(F), "silu"),
        watch.place_in_class(torch.Tensor, "softmax"),
        watch.place_in_class(torch.Tensor, "__torch_function__"),
        watch.place_in_class(nn.Linear, "_call_impl"),
        watch.place_in_module(vars(modeling_llama), "rotate_half"),
        watch.place_in_module(vars(modeling_llama), "no_such_name"),
    ]
    here = watch.Watch(places)
    for each in [ask for ask in (here.ask, here._written_out()) if ask is not None]:
        assert each() == ""
        for place in places:
            with replaced(place, lambda *args: None):
                assert each() == f"{place} was replaced by someone else"
            assert each() == ""


def test_places_are_compared_by_where_they_are_and_not_by_what_is_there() -> None:
    first, second = watch.place_in_module({"name": 1}, "name"), watch.place_in_module({"name": 1}, "name")
    assert first != second
    assert not first == second
    assert first == watch.place_in_module(first.space, "name")
    assert not first != watch.place_in_module(first.space, "name")
