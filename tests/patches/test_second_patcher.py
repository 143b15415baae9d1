"""Another library patches the same targets, before us or after us: its code runs, and the status says so."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import wrapt
from support import calls, numbers, state, tiny_models
from torch import nn
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama import modeling_llama

import liteboost_adaptor
from liteboost_adaptor.kv_cache.names import KV_CACHES

Count = list[int]


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute as a monkeypatching library does; put the very object back afterwards."""
    former = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def wraps_wrapper(original: Callable[..., Any], seen: Count) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    return wrapper


def plain_function(original: Callable[..., Any], seen: Count) -> Callable[..., Any]:
    """What Liger does: a function of their own, with another body and no trace of the original."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(self, *args, **kwargs)

    return forward


def wrapt_wrapper(original: Callable[..., Any], seen: Count) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(1)
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, wrapper)


WRAPPERS = {
    "functools.wraps": wraps_wrapper,
    "plain function": plain_function,
    "wrapt.FunctionWrapper": wrapt_wrapper,
}
TARGETS = {
    "norm": (modeling_llama.LlamaRMSNorm, "forward", 5),
    "mlp": (modeling_llama.LlamaMLP, "forward", 2),
    "attention": (modeling_llama.LlamaAttention, "forward", 2),
    "decoder layer": (modeling_llama.LlamaDecoderLayer, "forward", 2),
    "rope": (modeling_llama, "apply_rotary_pos_emb", 2),
}


@pytest.mark.parametrize("order", ["before us", "after us", "after the first forward"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("target", TARGETS)
def test_theirs_runs_as_often_as_without_us(target: str, wrapper: str, order: str) -> None:
    owner, name, expected_calls = TARGETS[target]
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    seen: Count = []
    with torch.no_grad():
        expected = model(**inputs).logits
        if order != "before us":
            liteboost_adaptor.apply(model)
        if order == "after the first forward":
            model(**inputs)
        with attribute(owner, name, WRAPPERS[wrapper](vars(owner)[name], seen)):
            if order == "before us":
                liteboost_adaptor.apply(model)
            found = model(**inputs).logits
            assert len(seen) == expected_calls
            found_again = model(**inputs).logits
            if order == "before us" and wrapper != "plain function":
                assert state.rows()["foreign"], "the status does not say that theirs was left"
    assert numbers.relative(found, expected) <= 2e-5
    assert torch.equal(found_again, found)
    liteboost_adaptor.undo()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("order", ["before us", "after us"])
def test_a_registered_sdpa_of_theirs_runs(order: str) -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    mapping = AttentionInterface._global_mapping
    original = mapping["sdpa"]
    seen: Count = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    try:
        if order == "before us":
            AttentionInterface.register("sdpa", theirs)
        liteboost_adaptor.apply(model)
        if order == "after us":
            AttentionInterface.register("sdpa", theirs)
        with torch.no_grad():
            model(**inputs)
        assert len(seen) == 2
        rows = state.rows("attention")
        assert "foreign" in rows or order == "after us"
        left = liteboost_adaptor.undo()
        assert mapping["sdpa"] is theirs
        if order == "after us":
            assert len(left) == 1 and "sdpa" in left[0]
    finally:
        mapping["sdpa"] = original


def test_an_attention_function_of_their_own_name_is_left_alone() -> None:
    seen: Count = []

    def theirs(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return AttentionInterface._global_mapping["sdpa"](module, query, *args, **kwargs)

    AttentionInterface.register("their_attention", theirs)
    try:
        model = tiny_models.build("llama", attn_implementation="their_attention")
        liteboost_adaptor.apply(model)
        with torch.no_grad():
            model(**tiny_models.example_inputs(model))
        assert len(seen) == 2
    finally:
        del AttentionInterface._global_mapping["their_attention"]


def test_hooks_on_every_module_fire_as_often_as_without_us() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    seen: Count = []
    parts = [part for part in model.modules() if not isinstance(part, nn.ModuleList)]
    handles = [part.register_forward_hook(lambda *_: seen.append(1)) for part in parts]
    handles += [part.register_forward_pre_hook(lambda *_: seen.append(1)) for part in parts]
    with torch.no_grad():
        expected = model(**inputs).logits
        calls_expected = len(seen)
        seen.clear()
        liteboost_adaptor.apply(model)
        found = model(**inputs).logits
    assert len(seen) == calls_expected == 2 * len(parts)
    assert numbers.relative(found, expected) <= 2e-5
    for handle in handles:
        handle.remove()


def test_hooks_that_change_values_count_whenever_they_are_set() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    layer = model.model.layers[0]
    for part in (layer.self_attn.q_proj, layer.post_attention_layernorm, layer.mlp.act_fn, model.lm_head):
        handle = part.register_forward_hook(lambda module, args, output: output * 1.5)
        with torch.no_grad():
            found = model(**inputs).logits
            with_us = type(layer)
            liteboost_adaptor.undo()
            expected = model(**inputs).logits
        assert numbers.relative(found, expected) <= 2e-5
        handle.remove()
        liteboost_adaptor.apply(model)
        assert with_us.__name__ == type(layer).__name__


def test_global_module_hooks_see_every_module() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        with torch.no_grad():
            model(**inputs)
            expected = sorted(seen)
            seen.clear()
            liteboost_adaptor.apply(model)
            model(**inputs)
        assert sorted(seen) == expected
    finally:
        handle.remove()


def _attention(self, hidden_states, attention_mask=None, **kwargs):
    assert attention_mask is None or attention_mask.ndim == 4
    return hidden_states * kwargs["position_embeddings"][0].mean(), None


def _mlp(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)))


def _layer(self, hidden_states, **kwargs):
    return hidden_states + self.mlp(self.input_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (modeling_llama.LlamaAttention, _attention),
        (modeling_llama.LlamaMLP, _mlp),
        (modeling_llama.LlamaDecoderLayer, _layer),
    ],
)
def test_code_put_into_a_method_counts(kind: type, other: Callable[..., Any]) -> None:
    served, plain = _served_and_plain()
    function = inspect.unwrap(kind.forward)
    former = function.__code__, function.__defaults__, function.__kwdefaults__
    before = _logits(served)
    try:
        function.__code__, function.__defaults__ = other.__code__, other.__defaults__
        expected, found = _logits(plain), _logits(served)
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = former
    assert numbers.relative(expected, before) > 1e-2
    assert numbers.relative(found, expected) <= 2e-5
    assert numbers.relative(_logits(served), before) <= 2e-5


def _served_and_plain() -> tuple[nn.Module, nn.Module]:
    plain = tiny_models.build("llama")
    served = copy.deepcopy(plain)
    liteboost_adaptor.apply(served)
    liteboost_adaptor.undo(plain)
    return served, plain


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40, 49)[None], use_cache=False).logits


def _by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (cos * 0.5, sin * 0.5)
        return original(self, *args, **kwargs)

    return forward


def _keyword_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, *, position_embeddings: Any, **rest: Any
    ) -> Any:
        return original(self, hidden_states * 0.5, position_embeddings, **rest)

    return forward


def _in_another_order(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: nn.Module,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        use_cache: bool = False,
        position_ids: Any = None,
        **caches: Any,
    ) -> Any:
        cache = next((caches[name] for name in KV_CACHES if name in caches), None)
        return original(self, hidden_states * 0.5, position_embeddings, attention_mask, cache)

    return forward


@pytest.mark.parametrize("kind", [_by_name, _keyword_only, _in_another_order])
def test_a_method_put_on_the_class_later_is_given_what_it_is_given_without_us(kind: Any) -> None:
    served, plain = _served_and_plain()
    before, original = _logits(served), modeling_llama.LlamaAttention.forward
    with attribute(modeling_llama.LlamaAttention, "forward", kind(original)):
        expected, found = _logits(plain), _logits(served)
    assert numbers.relative(expected, before) > 1e-2
    assert numbers.relative(found, expected) <= 2e-5


def test_a_function_replaced_for_a_time_is_no_part_of_what_is_bound_later() -> None:
    """A plan is made once for a class: the one made while ``F.silu`` is another serves no product of it."""
    others = ["rope.half", "norm.residual", "cache.append"]  # for which no test has made plans
    with attribute(nn.functional, "silu", lambda x, inplace=False: x):
        liteboost_adaptor.apply(tiny_models.build("llama"), disable=others)
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, disable=others)
    with torch.no_grad(), calls.served() as served:
        model(**tiny_models.example_inputs(model))
    assert served.rules["mlp.silu"] == model.config.num_hidden_layers
