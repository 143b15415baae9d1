"""Ranks that share the tokens of a prompt compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel import ranks
from support import families, tiny_models

from liteboost_adaptor.errors import ParallelError
from liteboost_adaptor.parallel.sequence import hooks
from liteboost_adaptor.parallel.sequence.ulysses import HeadShards

pytestmark = pytest.mark.usefixtures("native_only")

#: In the first tier: windows (beside full attention that no layer has, and of no token for none), a softcap,
#: sinks, norms of queries and keys, latent attention, experts, layers that run in a loop.
FIRST = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "ministral", "qwen2_moe", "dory")
FIRST_ON_FOUR = ("llama", "gemma3_text")
#: Ring attention, Ulysses, both, and each with sharded weights. Of two heads of keys and values each of four
#: ranks has one.
ON_TWO = ({"cp": 2}, {"sp": 2})
ON_FOUR = ({"cp": 4}, {"sp": 4}, {"sp": 2, "cp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "sp": 2})
#: All three at once; replicas beside them are for `generate`, see test_replicas.py.
ON_EIGHT = ({"tp": 2, "sp": 2, "cp": 2},)
#: A length that does not divide evenly; the window of the tiny models is shorter than a rank's part.
LENGTH = 43


def check(results: list[dict[str, Any]], names: tuple[str, ...], kinds: tuple[dict[str, int], ...]) -> None:
    assert set(results[0]) == {f"{name} {sizes}" for name in names for sizes in kinds}
    wrong = {
        name: found
        for name, found in results[0].items()
        if "fault" in found or not found["tokens"] or not max(found["distances"]) <= 1e-5
    }
    assert not wrong
    for found in results:  # the same bits on every rank
        for name, each in found.items():
            assert each["distances"] == results[0][name]["distances"], name


def test_families_on_two_ranks() -> None:
    results = ranks.run(2, "parallel.jobs_sequence:of_families", FIRST, ON_TWO, LENGTH)
    check(results, FIRST, ON_TWO)


def test_families_on_four_ranks() -> None:
    results = ranks.run(4, "parallel.jobs_sequence:of_families", FIRST_ON_FOUR, ON_FOUR, LENGTH)
    check(results, FIRST_ON_FOUR, ON_FOUR)
    assert results[0]["llama {'tp': 2, 'cp': 2}"]["held"] < 0.51


def test_whole_experts_and_shared_prompts() -> None:
    kinds = ({"tp": 2, "cp": 2, "ep": True},)
    check(
        ranks.run(4, "parallel.jobs_sequence:of_families", ("mixtral",), kinds, LENGTH), ("mixtral",), kinds
    )


#: Of what rounding keys and values does to logits, see tests/quantization/test_kv8.py.
SHARE = 0.25


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        (2, ({"tp": 2}, {"cp": 2}, {"sp": 2})),
        pytest.param(4, ({"tp": 2, "cp": 2}, {"sp": 2, "cp": 2}), marks=pytest.mark.full),
    ],
)
def test_a_cache_of_integers(size: int, kinds: tuple[dict[str, int], ...]) -> None:
    """Ranks round what one process rounds, also of a prompt that they share."""
    results = ranks.run(size, "parallel.jobs_sequence:kv8", ("llama", "gpt_oss"), kinds, LENGTH)
    for found in results:
        assert len(found) == 2 * len(kinds)
        for name, each in found.items():
            assert each["effect"] > 1e-4 and each["served"] > 0, name
            assert each["distance"] <= max(SHARE * each["effect"], 2e-5), (name, each)


@pytest.mark.full
def test_families_on_eight_ranks() -> None:
    results = ranks.run(8, "parallel.jobs_sequence:of_families", FIRST_ON_FOUR, ON_EIGHT, LENGTH, timeout=900)
    check(results, FIRST_ON_FOUR, ON_EIGHT)


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"sp": 2}], ids=str)
def test_behaviour(sizes: dict[str, int]) -> None:
    results = ranks.run(2, "parallel.jobs_sequence:behaviour", sizes)
    assert results[0]["sampled"] == results[1]["sampled"]
    assert sum(found["held"] for found in results) == 21  # each token's keys are on one rank
    for found in results:
        assert found["seen"] == 21
        for name in ("beams", "short", "no cache", "long", "copied"):
            assert found[name], name
        for name in ("second turn", "states", "without a cache", "last three"):
            assert found[name] <= 1e-5, name
        assert found["rounding"]["shared"] <= 1.5 * found["rounding"]["alone"]
        refused = found["refused"]
        assert refused.pop("afterwards") == "nothing raised"
        assert "StaticCache" in refused["static cache"]
        assert "output_attentions" in refused["attentions"] and "labels" in refused["labels"]
        assert "cu_seq_lens_q" in refused["positions"]
        assert "grad mode" in refused["grad mode"] and "after undo()" in refused["undone"]
        assert all("ParallelError" in text and "LITEBOOST_SP=1" in text for text in refused.values())


def test_what_mixes_tokens_elsewhere_is_refused() -> None:
    names = ("mamba", "lfm2", "qwen3_next", "t5", "rwkv", "blt")
    window = "llama with a window in the cache"
    for found in ranks.run(2, "parallel.jobs_sequence:refused", (*names, window), {"cp": 2}):
        assert "ParallelError" in found[window] and "only the cache knows of" in found[window]
        for name in names:
            assert found[name].startswith("ParallelError"), name
            assert "cannot share its prompts" in found[name] or "cannot share the prompts" in found[name]
            assert "LITEBOOST_SP=1 and LITEBOOST_CP=1" in found[name]


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"sp": 2}], ids=str)
def test_keys_that_no_cache_holds_are_refused_where_one_is_kept(sizes: dict[str, int]) -> None:
    for found in ranks.run(2, "parallel.jobs_sequence:last_loop", sizes):
        assert found["distance"] <= 1e-5
        assert "ParallelError" in found["refused"] and "keys that its cache does not hold" in found["refused"]


def test_the_cache_is_found_under_either_name() -> None:
    """transformers 5.24 calls it `cache`, also where it holds states alone."""

    class Renamed(torch.nn.Module):
        def forward(self, input_ids: Any = None, cache: Any = None) -> None: ...

    llama = tiny_models.build("llama")
    assert hooks._cache_parameter(Renamed()) == "cache"
    assert hooks._cache_parameter(llama) in ("cache", "past_key_values")
    assert hooks._cache_parameter(torch.nn.Linear(2, 2)) == ""
    assert hooks._keeps_keys(llama) and hooks._keeps_keys(tiny_models.build("qwen3_next"))
    assert not hooks._keeps_keys(tiny_models.build("mamba"))


def test_heads_of_keys_go_where_their_queries_are() -> None:
    assert HeadShards.of(8, 4, 2).key_value == [[0, 1], [2, 3]]
    assert HeadShards.of(8, 2, 4).key_value == [[0], [0], [1], [1]]
    # Of three groups of two, each rank has one whole and half of another: its queries bring their own.
    assert HeadShards.of(6, 3, 2).key_value == [[0, 0, 1], [1, 2, 2]]
    with pytest.raises(ParallelError, match="Sizes that work: 1, 2, 3, 6"):
        HeadShards.of(6, 2, 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [{"cp": 2}, {"sp": 2}, {"cp": 4}, {"sp": 4}, {"sp": 2, "cp": 2}, {"tp": 2, "cp": 2}], ids=str
)
def test_long_prompt(sizes: dict[str, int]) -> None:
    size = int(torch.tensor(list(sizes.values())).prod())
    results = ranks.run(size, "parallel.jobs_sequence:long_prompt", sizes, 4096)
    parts = size // sizes.get("tp", 1)
    for found in results:
        assert found["tokens"] and found["distance"] <= 1e-5
        alone, shared = found["bytes"]
        # Of the prompt each rank has its part; the rest is what exchanging takes.
        assert shared < (1.3 / parts + 0.1) * alone, found["bytes"]


@pytest.mark.full
def test_every_family_is_right_or_refused() -> None:
    names = tuple(families.buildable())
    results = ranks.run(2, "parallel.jobs_sequence:of_families", names, ON_TWO, LENGTH, timeout=7200)
    served = {name: found for name, found in results[0].items() if "fault" not in found}
    refused = {name: found["fault"] for name, found in results[0].items() if "fault" in found}
    wrong = {
        name: found
        for name, found in served.items()
        if not found["tokens"] or not max(found["distances"]) <= 1e-5
    }
    failed = {name: fault for name, fault in refused.items() if not fault.startswith("ParallelError")}
    assert not wrong and not failed
    assert len(served) > len(names)  # more than half of them, each under both
