"""Continuous batching of a sharded model: the texts of one process, with requests that rank 0 gives."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parallel import ranks
from parallel.test_loading import save
from support import tiny_models

from liteboost_adaptor.errors import ParallelError
from liteboost_adaptor.parallel import continuous_batching
from liteboost_adaptor.parallel.tensor import layout

pytestmark = pytest.mark.usefixtures("native_only")

#: Separate and fused projections, windows, experts, one KV head, norms of queries and keys.
FAMILIES = (
    "llama",
    "gpt2",
    "phi3",
    "gemma3_text",
    "mixtral",
    "falcon",
    "qwen3",
    "gpt_neox",
    "gpt_oss",
    "olmo2",
)


def check(results: list[dict[str, dict]]) -> None:
    for found in results:
        for name, texts in found.items():
            assert texts["held"] < 0.8, name
            assert texts["found"] == texts["expected"], name


@pytest.mark.full
def test_families(tmp_path: Path) -> None:
    save(tmp_path, FAMILIES)
    check(ranks.run(2, "parallel.jobs_batching:texts", str(tmp_path), list(FAMILIES), LITEBOOST_TP="2"))


def test_requests_are_those_of_rank_0(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    results = ranks.run(2, "parallel.jobs_batching:behaviour", str(tmp_path), LITEBOOST_TP="2")
    for found in results:
        assert found["held"] < 0.8 and found["paged"] > 0 and found["recorded"] > 10
        # A manager gives texts on all ranks, though only rank 0's requests count.
        assert found["found"] == found["by hand"] == found["after"] == found["expected"]
        assert found["sampled"] == results[0]["sampled"] != found["expected"]
        assert "different inputs" in found["other prompts"] and "different inputs" in found["other tensors"]
        assert all("different settings" in said for said in found["other settings"]), found["other settings"]


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ranks_with_prompts_of_their_own_part(tmp_path: Path, by_hand: bool) -> None:
    save(tmp_path, ("llama",))
    results = ranks.run(2, "parallel.jobs_batching:apart", str(tmp_path / "llama"), by_hand)
    assert all(found["found"] == found["expected"] for found in results)
    assert results[0]["found"] != results[1]["found"]


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [("llama", 2, True), ("falcon", 4, True), ("gpt2", 2, True), ("qwen3_next", 2, True), ("phi3", 2, True)],
)
def test_whether_a_rank_has_a_part_of_the_kv_heads(name: str, size: int, expected: bool) -> None:
    model = tiny_models.build(name)
    plan = layout.infer_layout(model, {}).plan(size, False)
    config = model.config.get_text_config()
    assert continuous_batching._shards_kv_heads(model, plan, config, size) is expected


def test_a_cache_that_would_have_other_heads_on_each_rank_is_refused() -> None:
    model = tiny_models.build("llama")  # 2 KV heads, which 4 ranks hold twice
    plan = layout.infer_layout(model, {}).plan(4, False)
    with pytest.raises(ParallelError, match=r"2 KV heads over 4 processes.*divides"):
        continuous_batching._shards_kv_heads(model, plan, model.config, 4)


def test_the_loop_is_given_what_transformers_starts_it_with() -> None:
    """Its inference mode, since 5.24."""
    given: list[dict[str, Any]] = []
    group = SimpleNamespace(inside=contextlib.nullcontext)
    manager = SimpleNamespace(background_thread_status=SimpleNamespace(fatal_error=None))
    continuous_batching._run_together(group, manager, lambda **kwargs: given.append(kwargs))
    continuous_batching._run_together(
        group, manager, lambda **kwargs: given.append(kwargs), use_inference_mode=True
    )
    assert given == [{}, {"use_inference_mode": True}]
