"""Continuous batching of modules that update the paged cache themselves, as those of transformers 5.24 do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import calls, tiny_models

import liteboost_adaptor
from liteboost_adaptor.huggingface import paged_updates
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


def forward(
    self,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As in release 5.24; older ones hand the cache on to attention."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
    key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    cos, sin = position_embeddings
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    key, value = between(key, value)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
    found, weights = attention(
        self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
    )
    behind(self.layer_idx, key, value)
    return self.o_proj(found.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def between(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value


def behind(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    pass


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


def touched(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key * 1, value


def measured(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert key.shape == value.shape and key.shape[2] >= 1
    return key, value


def exchanged(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, key


def one_of_two(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value.mul(2)


def in_place(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value += 1
    return key, value


@pytest.mark.parametrize("change", [touched, measured, exchanged, one_of_two, in_place])
def test_whoever_reads_the_results_gets_them(
    llama: Any, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "between", change)
    requests = prompts(llama)
    expected = batched(llama, requests, new=12)
    liteboost_adaptor.apply(llama, level=2)
    with calls.served() as served:
        assert batched(llama, requests, new=12) == expected
    assert not served.rules[PAGED]


@pytest.mark.parametrize("window", [None, 8])
def test_results_may_be_read_behind_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a window, whose oldest keys the new ones have overwritten."""
    monkeypatch.setattr(LlamaAttention, "forward", forward)
    monkeypatch.setattr(MistralAttention, "forward", forward)
    model = tiny_models.build("mistral" if window else "llama")
    model.config.sliding_window = window
    seen: list[torch.Tensor] = []

    def keep(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        seen.extend((key + 0, value + 0) if layer else ())

    monkeypatch.setitem(globals(), "behind", keep)
    requests = prompts(model)
    expected = batched(model, requests, new=12)
    theirs, seen[:] = list(seen), []
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests, new=12) == expected
    assert served.rules[PAGED] > 0 and len(seen) == len(theirs)
    for found, want in zip(seen, theirs, strict=True):
        torch.testing.assert_close(found, want)


def test_attention_of_others_gets_the_results(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen = []

    def theirs(module: Any, query: Any, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(key.shape[2])
        return original(module, query, key, *args, **kwargs)

    requests = prompts(llama)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", theirs)
    expected = batched(llama, requests, new=12)
    theirs_alone, seen[:] = list(seen), []
    liteboost_adaptor.apply(llama, level=2)
    assert batched(llama, requests, new=12) == expected
    assert seen in ([], theirs_alone)  # not asked, or of what all requests read
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if ours is not theirs:
        original, seen[:] = ours, []
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", theirs)
        assert batched(llama, requests, new=12) == expected
        assert len(seen) == len(theirs_alone)


def test_a_call_that_is_not_served_gets_the_results(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = prompts(llama)
    expected = batched(llama, requests, new=12)
    liteboost_adaptor.apply(llama, level=2)
    monkeypatch.setattr(paged_updates, "taken", lambda key, value: None)
    with calls.served() as served:
        assert batched(llama, requests, new=12) == expected
    assert not served.rules[PAGED]


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
    paged_updates.finish()


def receiver(cache: Any) -> Any:
    ((are, found),) = bind._others
    assert are(cache)
    return found(cache, torch.nn.Identity())


def test_an_update_is_made_once_and_not_before_it_is_read(pages: Pages) -> None:
    key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    first, second = receiver(pages).update(key, value, 5, kwargs={})
    assert pages.calls == [] and isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert torch.equal(first + 0, torch.cat([key, key], 2))
    assert second.shape == (1, 2, 6, 4)
    torch.testing.assert_close(torch.ops.aten.sum(second), 2 * value.sum())
    assert torch.equal(torch.stack([first, second])[1], torch.cat([value, value], 2))
    assert pages.calls == [5]
    paged_updates.finish()
    assert pages.calls == [5]


def test_what_nobody_reads_is_written_all_the_same(pages: Pages) -> None:
    key = torch.randn(1, 2, 3, 4)
    receiver(pages).update(key, key, 1, kwargs={})
    receiver(pages).update(key, key, 2, kwargs={})
    assert pages.calls == [1]
    paged_updates.finish()
    assert pages.calls == [1, 2]


def test_a_forward_leaves_nothing_to_be_written(pages: Pages) -> None:
    key = torch.randn(1, 2, 3, 4)
    called = paged_updates.finishing(lambda: receiver(pages).update(key, key, 3, kwargs={}))
    assert called() is not None and pages.calls == [3]


def test_results_are_told_apart(pages: Pages) -> None:
    key = torch.randn(1, 2, 3, 4)
    one, two = (receiver(pages).update(key, key, layer, kwargs={}) for layer in (0, 1))
    assert paged_updates.taken(*two).layer == 1
    for pair in ((one[0], two[1]), (two[1], two[0]), (two[0], key), (key, key)):
        assert paged_updates.taken(*pair) is None


def test_calls_of_another_form_are_made_at_once(pages: Pages) -> None:
    key = torch.randn(1, 2, 3, 4)
    found, _ = receiver(pages).update(key, key, torch.tensor(1), kwargs={})
    assert type(found) is torch.Tensor and len(pages.calls) == 1
    with pytest.raises(TypeError):
        receiver(pages).update(key, key, 1)
