"""Whatever an original calls may be replaced, before a model is bound or later: whoever replaces it is asked.

The places are those that the watches of bound replacements name, so a rule that is added is tested here
for whatever its original calls.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import wrapt
from support import calls, numbers, processes, tiny_models
from support.replaced import replaced
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama import modeling_llama

import liteboost_adaptor
from liteboost_adaptor import watch

#: One of each kind of attention, norm, MLP and experts that there are rules for.
FAMILIES = ("llama", "gemma2", "lfm2", "gpt_oss", "qwen3_next", "gptj", "falcon_h1", "deepseek_v3", "bloom")
TOLERANCE = 2e-5


def forward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


#: Not by what tensors or modules of torch call, which are replaced here.
_scaled = torch._C._VariableFunctions.mul


def changing(original: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """``original`` with results larger by an eighth, where they are floats; named as what it wraps."""

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        result = original(*args, **kwargs)
        is_float = type(result) is torch.Tensor and result.dtype in (torch.float32, torch.bfloat16)
        return _scaled(result, 1.125) if is_float else result

    return changed


def callable_places() -> list[watch.Place]:
    """What the replacements that are bound at the moment stand for, as far as it is functions.

    But for indexing (test_patched_indexing.py).
    """
    places = (place for place in watch.watched_places() if place.name not in INDEXING)
    return [place for place in places if isinstance(place.value(), _FUNCTIONS)]


#: Set on a class and taken away again, they stay behind in part: torch.tensor([torch.tensor(1.0)]) raises.
INDEXING = ("__getitem__", "__setitem__", "__delitem__")


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)


class Pair:
    """A model with us, and the same without."""

    def __init__(self, family: str) -> None:
        gc.collect()  # watches of models that are gone
        self.plain, self.served = tiny_models.build(family), tiny_models.build(family)
        self.served.load_state_dict(self.plain.state_dict())
        self.inputs = tiny_models.example_inputs(self.plain)
        liteboost_adaptor.apply(self.served)
        liteboost_adaptor.undo(self.plain)  # and left alone when it is called
        self.places = callable_places()
        assert len(self.places) > 20

    def fault(self, place: watch.Place, binds_after: bool = False) -> str:
        """How the two differ where ``place`` is replaced, or an empty string."""
        seen: list[int] = []
        with replaced(place, changing(place.value(), seen)):
            try:
                expected = forward(self.plain, self.inputs)
            except Exception as fault:  # noqa: BLE001 - torch itself does not bear this one replaced
                return "" if isinstance(fault, RecursionError) else self._raises(place, type(fault))
            count = len(seen)
            if binds_after:
                liteboost_adaptor.apply(self.served)
            seen.clear()
            found = forward(self.served, self.inputs)
        distance = numbers.relative(found, expected)
        if expected.isfinite().all() and not distance <= TOLERANCE:
            return f"{place}: {distance:.2g} from the original with the same patch"
        return f"{place}: called {count} times without us, never with us" if count and not seen else ""

    def _raises(self, place: watch.Place, kind: type[Exception]) -> str:
        try:
            forward(self.served, self.inputs)
        except kind:
            return ""
        return f"{place}: no {kind.__name__} with us"

    def faults(self, every: int = 1, binds_after: bool = False) -> list[str]:
        found = [self.fault(place, binds_after) for place in self.places[::every]]
        assert (
            numbers.relative(forward(self.served, self.inputs), forward(self.plain, self.inputs)) <= TOLERANCE
        )
        return [fault for fault in found if fault]


def test_every_callee_of_llama_replaced_after_binding() -> None:
    assert not Pair("llama").faults()


def test_callees_of_llama_replaced_after_the_first_call() -> None:
    pair = Pair("llama")
    forward(pair.served, pair.inputs)
    assert not pair.faults(every=5)


def test_callees_of_llama_replaced_before_binding() -> None:
    assert not Pair("llama").faults(every=7, binds_after=True)


@pytest.mark.full
@pytest.mark.parametrize("binds_after", [False, True], ids=["after binding", "before binding"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_callee_of_every_kind(family: str, binds_after: bool) -> None:
    assert not Pair(family).faults(binds_after=binds_after)


def test_every_callee_is_watched_by_some_replacement() -> None:
    """That the table above is what it is thought to be."""
    Pair("llama")
    found = {str(place) for place in callable_places()}
    assert found >= {
        "torch.nn.functional.linear",
        "torch.nn.functional.silu",
        "torch._C._nn.silu",
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.rsqrt",
        "torch.Tensor.__add__",
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.modules.linear.Linear._call_impl",
        "transformers.models.llama.modeling_llama.rotate_half",
        "transformers.integrations.sdpa_attention.repeat_kv",
    }


def test_the_status_names_who_was_replaced_and_serves_again_afterwards() -> None:
    pair = Pair("llama")
    place = watch.place_in_module(vars(F), "silu")
    with replaced(place, changing(F.silu, [])), calls.served() as served:
        forward(pair.served, pair.inputs)
    assert served.fallbacks == {("mlp.silu", "torch.nn.functional.silu was replaced by someone else"): 2}
    with calls.served() as served:
        forward(pair.served, pair.inputs)
    assert not served.fallbacks and "mlp.silu" in served.rules


def test_a_method_set_on_the_instance_after_binding_is_called() -> None:
    model = tiny_models.build("gemma2")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    model.model.norm._norm = lambda x: x * 7
    found = forward(model, inputs)
    liteboost_adaptor.undo()
    assert numbers.relative(found, forward(model, inputs)) <= TOLERANCE


def _proxy(original: Callable[..., Any]) -> Any:
    return wrapt.FunctionWrapper(original, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs) * 1.125)


def _mock(original: Callable[..., Any]) -> Any:
    return mock.MagicMock(side_effect=lambda *args, **kwargs: original(*args, **kwargs) * 1.125)


@pytest.mark.parametrize("kind", [_proxy, _mock, lambda original: functools.partial(_larger, original)])
@pytest.mark.parametrize("name", ["linear", "silu", "scaled_dot_product_attention"])
def test_what_takes_a_functions_place_may_be_any_object(kind: Callable[..., Any], name: str) -> None:
    pair = Pair("llama")
    with replaced(watch.place_in_module(vars(F), name), kind(getattr(F, name))):
        expected, found = forward(pair.plain, pair.inputs), forward(pair.served, pair.inputs)
    assert numbers.relative(found, expected) <= TOLERANCE


def _larger(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * 1.125


def test_a_call_replaced_on_an_instance_is_made() -> None:
    pair = Pair("llama")
    for model in (pair.plain, pair.served):
        layer = model.model.layers[0].mlp.up_proj
        layer._call_impl = lambda x, layer=layer: layer.forward(x) * 3
    assert numbers.relative(forward(pair.served, pair.inputs), forward(pair.plain, pair.inputs)) <= TOLERANCE


def test_code_put_into_a_function_counts() -> None:
    pair = Pair("llama")
    code = modeling_llama.rotate_half.__code__

    def rotate_half(x):
        return x * 0.5

    modeling_llama.rotate_half.__code__ = rotate_half.__code__
    try:
        expected, found = forward(pair.plain, pair.inputs), forward(pair.served, pair.inputs)
    finally:
        modeling_llama.rotate_half.__code__ = code
    assert numbers.relative(found, expected) <= TOLERANCE


class Scaling(TorchFunctionMode):
    """Makes the results of some functions larger."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions, self.count = functions, 0

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in self.functions:
            return result
        self.count += 1
        return result * 1.125


class ScalingOperators(TorchDispatchMode):
    def __init__(self, *operators: Any) -> None:
        super().__init__()
        self.operators, self.count = operators, 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket not in self.operators:
            return result
        self.count += 1
        return result * 1.125


aten = torch.ops.aten
MODES: dict[str, Callable[[], Any]] = {
    "function mode on F.linear": lambda: Scaling(F.linear),
    "function mode on sdpa": lambda: Scaling(F.scaled_dot_product_attention),
    "function mode on silu and rsqrt": lambda: Scaling(F.silu, torch.rsqrt),
    "function mode on operators of tensors": lambda: Scaling(torch.Tensor.mul, torch.Tensor.add),
    "dispatch mode on mm": lambda: ScalingOperators(aten.mm, aten.addmm),
    "dispatch mode on silu and rsqrt": lambda: ScalingOperators(aten.silu, aten.rsqrt),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_what_it_sees_without_us(mode: str) -> None:
    pair = Pair("llama")
    forward(pair.served, pair.inputs)
    with MODES[mode]() as theirs:
        expected = forward(pair.plain, pair.inputs)
    with MODES[mode]() as ours, calls.served() as served:
        found = forward(pair.served, pair.inputs)
    assert theirs.count and ours.count == theirs.count
    assert torch.equal(found, expected)
    reasons = {reason for _, reason in served.fallbacks}
    assert reasons == {f"a {mode.split(' on ')[0]} ({type(ours).__name__})"}


def test_the_flop_counter_counts_what_it_counts_without_us() -> None:
    pair = Pair("llama")
    counts = []
    for model in (pair.plain, pair.served):
        with FlopCounterMode(display=False) as counter:
            forward(model, pair.inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_modes_that_change_no_result_are_no_reason() -> None:
    pair = Pair("llama")

    class Noting(TorchDispatchMode):
        sees_liteboost_ops = True

        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(function.namespace)
            return function(*args, **(kwargs or {}))

    seen: set[str] = set()
    for mode in (torch.device("cpu"), Noting()):
        with mode, calls.served() as served:
            forward(pair.served, pair.inputs)
        assert served.rules and not served.fallbacks
    assert "liteboost" in seen


@pytest.mark.parametrize("name", ["linear", "silu", "scaled_dot_product_attention"])
def test_replaced_before_we_are_imported(name: str) -> None:
    found = processes.python(_BEFORE_IMPORT.replace("NAME", name), is_forked=True)
    assert found.stdout.split() == ["same", "called"], found.stdout + found.stderr


_BEFORE_IMPORT = """
import functools, os
import torch, torch.nn.functional as F
from support import numbers, tiny_models
original, seen = F.NAME, []
@functools.wraps(original)
def NAME(*args, **kwargs):
    seen.append(1)
    return original(*args, **kwargs).mul(1.125)
F.NAME = NAME
model = tiny_models.build("llama")
inputs = tiny_models.example_inputs(model)
with torch.no_grad():
    expected = model(**inputs).logits
    import liteboost_adaptor
    count = len(seen)
    liteboost_adaptor.apply(model)
    found = model(**inputs).logits
print("same" if numbers.relative(found, expected) <= 2e-5 else "other")
print("called" if count and len(seen) == 2 * count else f"called {len(seen)} times")
"""
