"""Continuous batching on the paged attention op: the tokens of ``generate``, and who computed them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import threading
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import calls, state, tiny_models

import liteboost_adaptor
from liteboost_adaptor.replacements import paged

batching = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from transformers import GenerationConfig  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402
from transformers.integrations import eager_paged  # noqa: E402

NEW_TOKENS = 6
WEIGHTS = "attention weights wanted"
#: Of 20 requests: one token, less than a page, its end, several pages, more than a batch takes at once.
LENGTHS = (1, 3, 15, 16, 17, 2, 40, 61, 32, 33, 7, 90, 5, 48, 21, 9, 64, 11, 28, 4)
#: Family -> the rule that serves it: plain, norms in the attention, a window in some layers or all, sinks.
FAMILIES = {
    "llama": "paged.sdpa",
    "qwen3": "paged.sdpa",
    "gemma3_text": "paged.sdpa",
    "mistral": "paged.sdpa",
    "gpt_oss": "paged.eager",
}


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


def settings() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def outputs_of(model: torch.nn.Module, requests: list[list[int]], **config: Any) -> list[Any]:
    """What continuous batching gives, request by request."""
    config = {"page_size": 16, "num_blocks": 100, "max_batch_tokens": 64, **config}
    outputs = model.generate_batch(
        requests,
        generation_config=settings(),
        continuous_batching_config=ContinuousBatchingConfig(**config),
        warmup=False,
    )
    assert len(outputs) == len(requests)
    assert not any(output.error for output in outputs.values())
    return list(outputs.values())


def batched(model: torch.nn.Module, requests: list[list[int]], **config: Any) -> list[list[int]]:
    return [output.generated_tokens for output in outputs_of(model, requests, **config)]


def one_by_one(model: torch.nn.Module, requests: list[list[int]]) -> list[list[int]]:
    with torch.no_grad():
        return [
            model.generate(torch.tensor([request]), generation_config=settings())[0, len(request) :].tolist()
            for request in requests
        ]


@contextlib.contextmanager
def gathered() -> Iterator[Counter[str]]:
    """Counts what the op makes needless: keys gathered out of the cache, and transformers' attention.

    Nothing is replaced for it: the originals would run. Batches are computed by threads of their own.
    """
    found: Counter[str] = Counter()
    builtins = {"index_select": "index_select", "scaled_dot_product_attention": "sdpa"}
    repeat_kv = calls.code_of(eager_paged.repeat_kv)

    def observe(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and (name := getattr(argument, "__name__", "")) in builtins:
            found[builtins[name]] += 1
        elif event == "call" and frame.f_code is repeat_kv:
            found["eager"] += 1

    before = threading.getprofile()
    threading.setprofile(observe)
    try:
        yield found
    finally:
        threading.setprofile(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_requests_get_the_tokens_of_generate(family: str) -> None:
    model = tiny_models.build(family)
    requests = prompts(model.config.vocab_size)
    expected = one_by_one(model, requests)
    with gathered() as before:
        assert batched(model, requests) == expected
    assert before["index_select"] and before["sdpa"] + before["eager"]
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served, gathered() as after:
        assert batched(model, requests) == expected
    layers = model.config.get_text_config().num_hidden_layers
    assert served.rules[FAMILIES[family]] >= NEW_TOKENS * layers
    assert not [rule for rule, _ in served.fallbacks if rule.startswith("paged")]
    assert not after["sdpa"] and not after["eager"]
    # Windows are put before the new keys of a chunk by the cache itself; else nothing is gathered.
    windows = getattr(model.config.get_text_config(), "sliding_window", None)
    assert after["index_select"] < before["index_select"] if windows else not after["index_select"]


def test_windows_are_read_in_place_while_all_requests_decode() -> None:
    model = tiny_models.build("mistral")
    assert 1 < model.config.sliding_window < 20
    requests = prompts(model.config.vocab_size)[:4]
    expected = one_by_one(model, requests)
    liteboost_adaptor.apply(model, level=2)
    for page_size in (5, 16):
        with calls.served() as served, gathered() as found:
            # All prompts in one batch, without a cache to read; then one token of each at a time.
            assert batched(model, requests, max_batch_tokens=256, page_size=page_size) == expected
        assert served.rules["paged.sdpa"] == NEW_TOKENS * model.config.num_hidden_layers
        assert not found


@pytest.mark.parametrize("page_size", [7, 256])
def test_any_page_size(page_size: int) -> None:
    model = tiny_models.build("qwen3")
    requests = prompts(model.config.vocab_size)
    expected = one_by_one(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests, page_size=page_size) == expected
    assert served.rules["paged.sdpa"] and not served.fallbacks


def test_shared_prefixes_and_too_few_pages() -> None:
    """Prompts that begin alike share pages; a cache too small for all makes some wait and begin again."""
    model = tiny_models.build("llama")
    generator = torch.Generator().manual_seed(5)
    beginning = torch.randint(3, model.config.vocab_size, (40,), generator=generator).tolist()
    requests = [beginning + request for request in prompts(model.config.vocab_size)[:8]]
    expected = one_by_one(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests, num_blocks=14) == expected
    assert served.rules["paged.sdpa"] and not served.fallbacks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_as_the_original(dtype: torch.dtype) -> None:
    """Log-probabilities of the tokens against those of the same weights in float64."""
    model = tiny_models.build("llama").to(dtype)
    requests = prompts(model.config.vocab_size)
    exact = outputs_of(copy.deepcopy(model).double(), requests, return_logprobs=True)
    before = outputs_of(model, requests, return_logprobs=True)
    liteboost_adaptor.apply(model, level=2, disable="norm.*,rope.*,mlp.*,linear.*")
    with calls.served() as served:
        after = outputs_of(model, requests, return_logprobs=True)
    assert served.rules["paged.sdpa"] and not served.fallbacks
    errors = torch.tensor(
        [
            (original.logprobs[i] - true.logprobs[i], ours.logprobs[i] - true.logprobs[i])
            for true, original, ours in zip(exact, before, after, strict=True)
            for i in range(NEW_TOKENS)
            # Behind another token there is nothing to compare.
            if true.generated_tokens[: i + 1]
            == original.generated_tokens[: i + 1]
            == ours.generated_tokens[: i + 1]
        ]
    )
    assert len(errors) > 0.5 * NEW_TOKENS * len(requests)
    original, ours = errors.norm(dim=0)
    assert 0 < ours <= 1.5 * original


def test_undo_and_levels() -> None:
    model = tiny_models.build("llama")
    requests = prompts(model.config.vocab_size)[:3]
    untouched = state.Snapshot(model)
    for level in (1, 2, 1):
        liteboost_adaptor.apply(model, level=level)
        with calls.served() as served:
            batched(model, requests)
        assert bool(served.rules["paged.sdpa"]) == (level == 2)
    liteboost_adaptor.undo()
    with calls.served() as served, gathered() as found:
        batched(model, requests)
    assert not served.rules and found["sdpa"]
    assert not untouched.differences()


def test_a_level_2_model_behind_one_of_level_1_is_served() -> None:
    first, second = tiny_models.build("llama"), tiny_models.build("llama")
    requests = prompts(first.config.vocab_size)[:3]
    liteboost_adaptor.apply(first, level=1)
    liteboost_adaptor.apply(second, level=2)
    with calls.served() as served:
        batched(second, requests)
    assert served.rules["paged.sdpa"]
    assert not any(row.state == "foreign" for row in liteboost_adaptor.status().rules)


def test_a_mask_of_somebody_elses_is_handed_back() -> None:
    """A model that adds to the mask before its layers: only the batch's own is known to be causality."""
    model = tiny_models.build("llama")
    requests = prompts(model.config.vocab_size)[:5]

    def bias(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        if mask is None:
            return None
        mask = mask - 0.01 * torch.arange(mask.shape[-1], dtype=mask.dtype)
        return args, {**kwargs, "attention_mask": mask}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(bias, with_kwargs=True)
    expected = batched(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests) == expected
    assert not served.rules["paged.sdpa"]
    assert {why for rule, why in served.fallbacks if rule == "paged.sdpa"} == {
        "a mask that is not the batch's own"
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_a_hook_changes_in_place(mode: Any) -> None:
    """Tensors of inference mode do not count their changes: the mask is compared in each layer."""
    requests = prompts(90)[5:9]

    def texts(level: int) -> list[list[list[int]]]:
        model = tiny_models.build("llama", seed=1)
        liteboost_adaptor.apply(model, level=level)
        found = []
        for is_hooked in (False, True):
            if is_hooked:
                model.model.layers[1].register_forward_pre_hook(_hides_the_first_key, with_kwargs=True)
            with mode():
                found.append(batched(model, requests))
        return found

    expected = texts(0)
    assert expected[0] != expected[1]
    assert texts(2) == expected


def _hides_the_first_key(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    mask = kwargs["attention_mask"]
    mask[..., :1].fill_(torch.finfo(mask.dtype).min)


def test_weights_of_eager_attention_are_there_for_hooks() -> None:
    """Without a hook nobody reads them, and eager is served, too."""
    model, seen = tiny_models.build("llama", seed=1, attn_implementation="eager"), []
    requests = prompts(90)[:3]
    expected = batched(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as counted:
        assert batched(model, requests) == expected
    assert counted.rules["paged.eager"] and ("paged.eager", WEIGHTS) not in counted.fallbacks
    reader = model.model.layers[0].self_attn
    reader.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[1]))
    with calls.served() as counted:
        assert batched(model, requests) == expected
    assert ("paged.eager", WEIGHTS) in counted.fallbacks
    assert seen and all(isinstance(weights, torch.Tensor) for weights in seen)


def test_a_cache_that_writes_otherwise_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    update = batching.FullAttentionCacheAllocator.update

    def doubled(self: Any, key_states: Any, value_states: Any, *args: Any) -> Any:
        return update(self, key_states, value_states * 2, *args)

    model = tiny_models.build("llama")
    requests = prompts(model.config.vocab_size)[:3]
    monkeypatch.setattr(batching.FullAttentionCacheAllocator, "update", doubled)
    expected = batched(model, requests)
    liteboost_adaptor.apply(model, level=2)
    with calls.served() as served:
        assert batched(model, requests) == expected
    assert not served.rules["paged.sdpa"]
    assert {why for rule, why in served.fallbacks if rule == "paged.sdpa"} == {
        "FullAttentionCacheAllocator.update is not known"
    }


def _emptied(original: Any) -> Any:
    """``original``, of whose first result nothing is left but zeros, called as the original is."""

    def emptied(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (result[0] * 0, *result[1:]) if isinstance(result, tuple) else result * 0

    return emptied


@pytest.mark.parametrize("is_before", [True, False], ids=["before the first batch", "later"])
@pytest.mark.parametrize("name", ["index_select", "PagedAttentionCache.update"])
def test_whoever_replaces_how_a_cache_is_read_is_asked(
    name: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = importlib.import_module("transformers.generation.continuous_batching.cache")
    holder = torch if name == "index_select" else cache.PagedAttentionCache
    attribute = name.rpartition(".")[2]
    model = tiny_models.build("llama")
    requests = prompts(model.config.vocab_size)[:5]
    ordinary = batched(model, requests)
    with monkeypatch.context() as patch:
        patch.setattr(holder, attribute, _emptied(getattr(holder, attribute)))
        expected = batched(model, requests)
    assert expected != ordinary
    liteboost_adaptor.apply(model, level=2)
    if not is_before:
        assert batched(model, requests) == ordinary
    with monkeypatch.context() as patch, calls.served() as served:
        patch.setattr(holder, attribute, _emptied(getattr(holder, attribute)))
        assert batched(model, requests) == expected
    assert any(rule == "paged.sdpa" for rule, _ in served.fallbacks)
    with calls.served() as served:
        assert batched(model, requests) == ordinary
    assert served.rules["paged.sdpa"] and not served.fallbacks


# ---- what a batch is described by ----


def described(q_lens: list[int], kv_lens: list[int]) -> paged.Batch:
    return paged.Batch(*(torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens)))


def test_tables_of_pages_in_order() -> None:
    batch = described([2, 1], [5, 4])
    read = torch.tensor([12, 13, 14, 15, 4, 20, 21, 22, 23, 99])
    write = torch.tensor([15, 4, 23, 99])
    table = paged.table_in_order(batch, read, write, 4)
    assert table.tolist() == [[3, 1], [5, 0]]
    for place in (1, 4, 8):  # not in order, not the first row of a page, not what is written
        wrong = read.clone()
        wrong[place] += 1
        assert paged.table_in_order(batch, wrong, write, 4) is None
    assert paged.table_in_order(batch, read, write + 1, 4) is None
    assert paged.table_in_order(batch, read[:8], write, 4) is None


def test_tables_of_rings() -> None:
    """A window of 6 in pages of 4: after 8 tokens the ring begins again."""
    own = 1
    batch = described([1, 1], [6, 3])
    read = torch.tensor([15, 20, 21, 12, 13, own, 8, 9, own])
    write = torch.tensor([14, 10])
    assert paged.table_of_ring(batch, read, write, 4, own).tolist() == [[3, 5], [2, 0]]
    assert paged.table_of_ring(batch, read, torch.tensor([22, 10]), 4, own) is None  # two pages not whole
    assert paged.table_of_ring(batch, read, write, 4, 7) is None


def test_tables_of_rings_in_the_order_of_keys() -> None:
    """Of windows that are no multiple of a page: one that is not whole may lie anywhere in the ring."""
    own = 1
    paged.keep_order(True)
    try:
        for slots, table in (
            ([20, 21, 22, 23, 12, 13], [[5, 3]]),  # before it goes round
            ([12, 13, 14, 15, 20, 21], [[3, 5]]),
            ([12, 13, 20, 21, 22, 23], None),  # the next key takes the first place of the last page
            ([21, 22, 23, 12, 13, 20], None),
            ([20, 21, 22, 23, 13, 12], None),
        ):
            read = torch.tensor([*slots[:-1], own])
            found = paged.table_of_ring(described([1], [6]), read, torch.tensor(slots[-1:]), 4, own)
            assert (None if found is None else found.tolist()) == table, slots
    finally:
        paged.keep_order(False)


@pytest.mark.parametrize("window", [0, 3])
def test_masks_are_compared_whole(window: int) -> None:
    from transformers.generation.continuous_batching.utils import build_attention_mask

    batch = described([4, 1, 300], [7, 5, 310])
    mask = torch.full((1, 1, 305, 322), torch.finfo(torch.float32).min)
    build_attention_mask(mask, batch.sums_q.tolist(), batch.sums_k.tolist(), window or 1)
    assert paged.is_causal_mask(mask, batch, window)
    assert not paged.is_causal_mask(mask, batch, 2)
    padded = torch.nn.functional.pad(mask, (0, 3, 0, 2), value=torch.finfo(torch.float32).min)
    assert paged.is_causal_mask(padded, batch, window)
    for row, column in ((0, 0), (0, 6), (4, 11), (304, 0), (304, 321), (150, 200)):
        changed = mask.clone()
        changed[0, 0, row, column] = -1.0
        assert not paged.is_causal_mask(changed, batch, window)
