"""Continuous batching of modules that update the paged cache themselves, as those of transformers 5.24 do."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import calls, tiny_models
from torch.nn import functional as F

import liteboost_adaptor
from liteboost_adaptor.huggingface import paged, paged_updates
from liteboost_adaptor.kv_cache import bind
from liteboost_adaptor.program import trusted_code

pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from program.test_ragged import RULE, batched, prompts, unserved
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention

PAGED = "paged.sdpa"


def projected(self: Any, hidden_states: torch.Tensor, embeddings: Any) -> tuple[torch.Tensor, ...]:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *embeddings)
    return query, key, value


def forward(
    self,
    hidden_states,
    position_embeddings=None,
    attention_mask=None,
    past_key_values=None,
    cache=None,
    **kwargs,
):
    """As in release 5.24; older ones hand the cache on to attention."""
    query, key, value = projected(self, hidden_states, position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    found, weights = attention(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    found = found.reshape(*hidden_states.shape[:-1], -1).contiguous()
    return self.o_proj(found), weights


def other_layer(
    self,
    hidden_states,
    position_embeddings=None,
    attention_mask=None,
    past_key_values=None,
    cache=None,
    **kwargs,
):
    """The cache counts layers in another order."""
    query, key, value = projected(self, hidden_states, position_embeddings)
    layer = self.config.num_hidden_layers - 1 - self.layer_idx
    if cache is not None:
        key, value = cache.update(key, value, layer, kwargs=kwargs)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    found, weights = attention(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    found = found.reshape(*hidden_states.shape[:-1], -1).contiguous()
    return self.o_proj(found), weights


def between(
    self,
    hidden_states,
    position_embeddings=None,
    attention_mask=None,
    past_key_values=None,
    cache=None,
    **kwargs,
):
    """Keys are changed before attention has them."""
    query, key, value = projected(self, hidden_states, position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    key = key * 2
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    found, weights = attention(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    found = found.reshape(*hidden_states.shape[:-1], -1).contiguous()
    return self.o_proj(found), weights


def behind(
    self,
    hidden_states,
    position_embeddings=None,
    attention_mask=None,
    past_key_values=None,
    cache=None,
    **kwargs,
):
    """Keys are used once more."""
    query, key, value = projected(self, hidden_states, position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    found, weights = attention(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    found = found.reshape(*hidden_states.shape[:-1], -1).contiguous() + key.mean()
    return self.o_proj(found), weights


@pytest.fixture
def as_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take the code of this file for that of a release."""
    known = trusted_code.is_known

    def is_known(code: types.CodeType, names: dict[str, Any]) -> bool:
        return names is globals() or known(code, names)

    monkeypatch.setattr(trusted_code, "is_known", is_known)


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    yield tiny_models.build("llama")


def test_pages_are_read_where_they_lie_and_steps_are_recorded(llama: Any, as_released: None) -> None:
    requests = prompts(llama)
    expected, alone = batched(llama, requests), batched(llama, requests[3:4])
    liteboost_adaptor.apply(llama, level=2)
    with calls.served() as first:
        assert batched(llama, requests) == expected
    assert first.rules[PAGED] > 0 and first.rules[RULE] > 0
    with calls.served() as second:
        assert batched(llama, requests) == expected
        assert batched(llama, requests[3:4]) == alone
    assert not unserved(first) | unserved(second)
    assert second.rules[RULE] > first.rules[RULE]


@pytest.mark.parametrize("body", [between, behind])
def test_a_module_that_reads_the_results_gets_them(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", body)
    model = tiny_models.build("llama")
    requests = prompts(model)
    expected = batched(model, requests, new=12)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests, new=12) == expected
    assert not served.rules[PAGED]


def test_the_layer_is_the_one_that_the_cache_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", other_layer)
    model = tiny_models.build("llama")
    requests = prompts(model)
    expected = batched(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests) == expected
    assert served.rules[PAGED] > 0


def test_without_recorded_steps(llama: Any) -> None:
    """Nobody has described the batch before attention is called."""
    requests = prompts(llama)
    expected = batched(llama, requests, new=12)
    liteboost_adaptor.apply(llama, level=2, disable=[RULE])
    with calls.served() as served:
        assert batched(llama, requests, new=12) == expected
    assert served.rules[PAGED] > 0 and not served.rules[RULE]


@pytest.mark.parametrize("is_before", [True, False])
def test_attention_of_others_gets_what_it_gets_without_us(llama: Any, is_before: bool) -> None:
    mapping, seen = ALL_ATTENTION_FUNCTIONS._global_mapping, []
    requests = prompts(llama)
    expected = batched(llama, requests, new=12)
    if not is_before:
        liteboost_adaptor.apply(llama, level=2)
    original = mapping["sdpa"]

    def theirs(module: Any, query: Any, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((key.shape, type(kwargs["cu_seq_lens_k"]), type(kwargs["max_length_k"])))
        return original(module, query, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:  # ours is not put back behind `undo`
        patched.setitem(mapping, "sdpa", theirs)
        if is_before:
            liteboost_adaptor.apply(llama, level=2)
        assert batched(llama, requests, new=12) == expected
    assert seen and all(kinds == [torch.Tensor, int] for _, *kinds in seen)


def refused(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("liteboost::paged_attention: a test has refused it")


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_the_op_refuses_is_gathered(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a window, whose oldest keys the new ones have overwritten by then."""
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(MistralAttention, "forward", forward)
    model = tiny_models.build(family)
    requests = prompts(model)
    expected = batched(model, requests, new=20)
    liteboost_adaptor.apply(model, level=2, disable=[RULE])
    monkeypatch.setattr(paged.paged, "attend", refused)
    with calls.served() as served:
        assert batched(model, requests, new=20) == expected
    assert not served.rules[PAGED]


def test_a_patch_of_what_attention_calls_acts(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = prompts(llama)
    expected = batched(llama, requests, new=12)
    liteboost_adaptor.apply(llama, level=2, disable=[RULE])
    sdpa, called = F.scaled_dot_product_attention, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    assert batched(llama, requests, new=12) == expected
    assert called


class Pages:
    """A cache of another kind that counts what it is asked."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]) -> Any:
        self.calls.append(layer)
        return torch.cat([key, key], 2), torch.cat([value, value], 2)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    monkeypatch.setattr(bind, "_others", [])
    monkeypatch.setattr(paged_updates, "_is_paged", lambda cache: isinstance(cache, Pages))
    paged_updates.put_off(lambda module: True)
    yield Pages()
    paged_updates.drop()


def receiver(cache: Any, is_handed_on: bool = True) -> Any:
    ((are, found),) = bind._others
    assert are(cache)
    return found(cache, torch.nn.Identity(), is_handed_on)


def some() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)


def test_an_update_is_left_to_attention(pages: Pages) -> None:
    key, value = some()
    assert receiver(pages, False) is pages
    found = receiver(pages).update(key, value, 5, kwargs={})
    assert found[0] is key and found[1] is value and not pages.calls
    update = paged_updates.given(key, value)
    assert update is not None and update.cache is pages and update.layer == 5
    assert paged_updates.given(value, key) is None and paged_updates.given(key, key) is None
    original = paged_updates.gathering(lambda module, query, key, value, *rest, **more: (key, value))
    key_read, value_read = original(None, None, key, value)
    assert key_read.shape[2] == value_read.shape[2] == 6 and pages.calls == [5]
    assert original(None, None, key, value)[0] is key and pages.calls == [5]


def test_no_update_outlives_its_forward(pages: Pages) -> None:
    key, value = some()

    def failing() -> None:
        receiver(pages).update(key, value, 1, kwargs={})
        raise KeyError("a hook of the user's")

    with pytest.raises(KeyError):
        paged_updates.finishing(failing)()
    assert paged_updates.given(key, value) is None
    with pytest.raises(paged_updates.PagedUpdateError, match="exchanged while a model called it"):
        paged_updates.finishing(lambda: receiver(pages).update(key, value, 1, kwargs={}))()
    receiver(pages).update(key, value, 1, kwargs={})
    receiver(pages)
    assert paged_updates.given(key, value) is None and not pages.calls


def test_calls_of_another_form_are_made_at_once(pages: Pages) -> None:
    key, value = some()
    for arguments in ((key, value, torch.tensor(1)), (key, key, 1)):
        found, _ = receiver(pages).update(*arguments, kwargs={})
        assert found.shape[2] == 6
    assert len(pages.calls) == 2
