"""What is done around the steps of ``generate_batch``: the size of its cache, and its garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.huggingface import batching, huge_pages

cache_module = pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason="this transformers has another paged cache",
    exc_type=ImportError,
)

from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import continuous_api  # noqa: E402

NEW = 4
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]


@pytest.fixture
def llama() -> Any:
    return tiny_models.build("llama")


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Blocks and tokens of a batch of each cache that is made."""
    made: list[tuple[int, int]] = []
    cls = continuous_api.PagedAttentionCache

    class Noted(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append((self.num_blocks, self.max_batch_tokens))

    monkeypatch.setattr(continuous_api, "PagedAttentionCache", Noted)
    return made


def batched(model: Any, config: Any = None, **kwargs: Any) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        PROMPTS, generation_config=settings, continuous_batching_config=config, warmup=False, **kwargs
    )
    assert not any(each.error for each in outputs.values())
    return [each.generated_tokens for each in outputs.values()]


def test_the_cache_is_as_large_as_its_requests(llama: Any, caches: list[tuple[int, int]]) -> None:
    small = {
        "page_size": 8,
        "max_memory_percent": 0.02,
        "max_batch_tokens": 256,
    }  # what transformers takes of the memory is filled
    expected = batched(llama, ContinuousBatchingConfig(**small))
    liteboost_adaptor.apply(llama, level=2)
    config = ContinuousBatchingConfig(page_size=8)
    assert batched(llama, config) == expected
    assert config.num_blocks is None and config.max_batch_tokens is None
    assert batched(llama, ContinuousBatchingConfig(page_size=8, max_batch_tokens=16)) == expected
    assert batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=50)) == expected
    pages = 10 + 1  # 1.2 times 1 + 6 + 1, and some more
    (whole, _), (sized, tokens), (_, limited), (given, fewest) = caches
    assert (
        pages <= sized < pages + 4 and tokens == fewest == 64 and limited == 16 and given >= 50
    )  # sectors are whole
    assert whole > 10 * sized


@pytest.mark.parametrize("windows, whole", [(43, 9), (28, 9)])
def test_kinds_of_layers_that_share_pages_in_large_pieces(
    windows: int, whole: int, caches: list[tuple[int, int]]
) -> None:
    """Of Beam, and of others: a piece is as large as seven pages of all layers; each kind takes its own."""
    config = tiny_models.tiny_config("gemma3_text")
    config.num_hidden_layers = windows + whole
    config.layer_types = ["sliding_attention"] * windows + ["full_attention"] * whole
    config.sliding_window = 16
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def texts(prompts: list[list[int]], config: Any) -> list[list[int]]:
        outputs = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=config, warmup=False
        )
        assert [each.error for each in outputs.values()] == [None] * len(prompts)
        return [each.generated_tokens for each in outputs.values()]

    requests = [PROMPTS[:1], PROMPTS * 4]
    expected = [texts(each, ContinuousBatchingConfig(page_size=8, num_blocks=150)) for each in requests]
    liteboost_adaptor.apply(model, level=2)
    caches.clear()
    assert [texts(each, ContinuousBatchingConfig(page_size=8)) for each in requests] == expected
    assert all(blocks < 100 for blocks, _ in caches)


def test_the_cache_takes_memory_where_it_is_used(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caches: list[tuple[int, int]]
) -> None:
    expected = batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=50))
    made: list[int] = []
    original = huge_pages.zeros

    def zeros(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return original(nbytes)

    monkeypatch.setattr(huge_pages, "zeros", zeros)
    monkeypatch.setattr(batching, "_LEAST_BYTES", 1000)
    liteboost_adaptor.apply(llama, level=2)
    kept: list[int] = []
    places: set[int] = set()
    from_allocator = torch.ops.liteboost._kept_zeros

    def kept_zeros(nbytes: int) -> list[torch.Tensor]:
        kept.append(nbytes)
        zeros = from_allocator(nbytes)
        places.update(each.data_ptr() for each in zeros)
        return zeros

    monkeypatch.setattr(torch.ops.liteboost, "_kept_zeros", kept_zeros)
    monkeypatch.setattr(batching, "_collections", batching._Collections())  # the first lets go of its cache
    for _ in range(2):  # in new memory, and in that of the first
        assert batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=50)) == expected
    assert len(kept) == 2 and kept[0] > 1000 and not made
    assert len(places) == 1
    torch.ops.liteboost._set_caching_allocator(0)
    assert batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=50)) == expected
    assert made == kept[:1]
    with batching._CacheOnHugePages():
        memory = torch.zeros(3 << 20, dtype=torch.uint8, device="cpu")
        others = [
            torch.zeros(999, dtype=torch.uint8, device="cpu"),
            torch.zeros(5000, dtype=torch.int8, device="cpu"),
            torch.zeros(5000, dtype=torch.uint8, device="meta"),
            torch.zeros(50, 60, dtype=torch.uint8),
        ]
    assert made[1:] == [3 << 20] and memory.shape == (3 << 20,) and not memory.any()
    memory.fill_(7)
    assert [each.dtype for each in others] == [torch.uint8, torch.int8, torch.uint8, torch.uint8]
    with pytest.raises(RuntimeError, match="allocate"), batching._CacheOnHugePages():
        torch.zeros(1 << 60, dtype=torch.uint8, device="cpu")  # as torch says it


def test_what_the_caller_says_stays(llama: Any, caches: list[tuple[int, int]]) -> None:
    liteboost_adaptor.apply(llama, level=2)
    batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=32))
    assert caches[0][0] >= 64 and caches[0][1] == 32
    few = ContinuousBatchingConfig(page_size=8)
    endless = GenerationConfig(max_new_tokens=None)
    assert batching.sized(llama, PROMPTS, endless, few, None) is few
    assert batching.sized(llama, PROMPTS, endless, few, 7).num_blocks
    for prompts, tokens in (([[5] * 700] * 3, 2048), ([[5]] * 3000, 3000), ([[5] * 9] * 100, 900)):
        assert batching.sized(llama, prompts, endless, few, 1).max_batch_tokens == tokens
    assert batching.sized(llama, [], endless, few, 7) is few


def test_more_than_memory_holds_is_left_to_transformers(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ContinuousBatchingConfig(page_size=8)
    assert batching.sized(llama, PROMPTS, None, config, 8) is not config
    needed = batching._bytes_of_a_cache(llama, (12 + 1) * 8, 64, len(PROMPTS))
    assert needed > 2 * 64 * (13 * 8 + 64) * 4, "masks count"
    monkeypatch.setattr(batching, "_free_memory", lambda: int(needed / batching._LARGEST) - 8)
    assert batching.sized(llama, PROMPTS, None, config, 8) is config
    monkeypatch.undo()
    limited = ContinuousBatchingConfig(page_size=8, max_memory_percent=0.02)
    assert batching.sized(llama, PROMPTS, None, limited, 8).num_blocks is None


def test_many_prompts_with_little_memory_are_served(llama: Any) -> None:
    liteboost_adaptor.apply(llama, level=2)
    settings = GenerationConfig(max_new_tokens=1024, do_sample=False, eos_token_id=4, pad_token_id=0)
    config = ContinuousBatchingConfig(max_memory_percent=0.02)
    outputs = llama.generate_batch([[5] * 30] * 20, settings, config, warmup=False)
    assert len(outputs) == 20 and not any(each.error for each in outputs.values())


def test_a_manager_that_is_kept_is_sized_by_transformers(llama: Any, caches: list[tuple[int, int]]) -> None:
    liteboost_adaptor.apply(llama, level=2)
    config = ContinuousBatchingConfig(page_size=8, max_memory_percent=0.02, max_batch_tokens=256)
    batched(llama, config, persistent_manager=True)
    llama.destroy_cached_continuous_batching_manager()
    assert caches[0][0] > 100


@pytest.fixture
def thawed() -> Iterator[None]:
    """Without what all tests of ours set aside."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_garbage_of_a_call_only(llama: Any, thawed: None) -> None:
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            looked.append(gc.get_freeze_count())

    gc.callbacks.append(note)
    try:
        batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=20))
        assert looked and not any(looked)
        liteboost_adaptor.apply(llama, level=2)
        looked.clear()
        batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=20))
        assert any(looked) and not gc.get_freeze_count()
        with batching.set_aside(), batching.set_aside():
            assert gc.get_freeze_count()
        assert not gc.get_freeze_count()
        with batching.set_aside():
            made = [[] for _ in range(100_000)]
            gc.freeze()  # as one does before a fork
        assert gc.get_freeze_count() > len(made)
        gc.unfreeze()
        looked.clear()
        liteboost_adaptor.undo()
        batched(llama, ContinuousBatchingConfig(page_size=8, num_blocks=20))
        assert looked and not any(looked)
    finally:
        gc.callbacks.remove(note)


def test_what_somebody_has_frozen_stays_frozen() -> None:
    count = gc.get_freeze_count()
    assert count > 1000
    with batching.set_aside():
        assert gc.get_freeze_count() > count - 1000  # some may be let go of
    assert gc.get_freeze_count() > count - 1000


class _Cycle:
    def __init__(self) -> None:
        self.self = self


def test_what_was_dropped_before_a_call_is_let_go(monkeypatch: pytest.MonkeyPatch, thawed: None) -> None:
    collections = batching._Collections()
    monkeypatch.setattr(batching, "_collections", collections)
    dropped = weakref.ref(_Cycle())
    with batching.set_aside():
        gc.collect()
        assert dropped() is not None
    assert dropped() is None  # the first time, and when it is due
    collections._takes = float("inf")
    for failed in ([], [True]):
        dropped = weakref.ref(_Cycle())
        with batching.set_aside() as told:
            told.extend(failed)
        assert (dropped() is None) == bool(failed)
    dropped = weakref.ref(_Cycle())
    with pytest.raises(KeyError), batching.set_aside():
        raise KeyError
    assert dropped() is None


def test_memory_is_looked_through_for_a_share_of_what_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = [0.0], []

    def look() -> None:
        looked.append(now[0])
        now[0] += 0.2

    monkeypatch.setattr(batching.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(batching.gc, "collect", look)
    collections = batching._Collections()
    for _ in range(50):
        now[0] += 100.0  # what passes between calls does not count
        collections.collect(False, 1.0)
    assert len(looked) == 3, "the first time, and after 20 seconds of calls each"
    collections.collect(True, 0.0)
    assert len(looked) == 4
