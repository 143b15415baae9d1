"""A model sharded over processes computes what one process computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import ranks
from support import families, tiny_models

import liteboost_adaptor
from liteboost_adaptor.errors import ParallelError
from liteboost_adaptor.parallel.tensor import layout

pytestmark = pytest.mark.usefixtures("native_only")

#: On 2 ranks in the first tier: fused qkv, biases, experts, latent attention, sinks, norms over all heads,
#: three that have no plan of their own, and one without attention.
FIRST = (
    *("llama", "qwen2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "olmo2"),
    *("gpt2", "bert", "opt", "phi", "gpt_neox", "falcon", "mamba"),
)
#: Two heads of keys and values: with four ranks, two hold the same one.
FIRST_ON_FOUR = ("llama", "phi3", "olmo2")
#: Whose collectives are counted.
COUNTED = (
    *("llama", "mixtral", "gpt_oss", "olmo2", "phi", "gpt_neox", "cohere", "falcon"),
    *("qwen2_moe", "deepseek_v3"),
)
#: Those that run attention and MLP beside each other.
PARALLEL = ("phi", "gpt_neox", "cohere", "falcon")
#: Those with an expert that all tokens are given to, beside the others, and in how many of their layers.
SHARED_EXPERTS = {"qwen2_moe": 2, "deepseek_v3": 1}
#: Whose steps are recorded: plain, experts, norms over all heads, attention beside the MLP, latent attention.
RECORDED = ("llama", "gpt_oss", "olmo2", "phi", "deepseek_v3")


@functools.cache
def of_two_ranks() -> list[dict[str, Any]]:
    """What each of two ranks found, by one start of them."""
    return ranks.run(2, "parallel.jobs:first_tier", FIRST, COUNTED, "llama", RECORDED, timeout=900)


def check(results: list[dict[str, dict]], names: tuple[str, ...]) -> None:
    wrong = {
        name: result
        for name, result in results[0].items()
        if "fault" in result or not result["same_tokens"] or not result["distance"] <= 1e-5
    }
    assert not wrong
    assert set(results[0]) == set(names)
    for found in results:  # the same bits on every rank
        assert {name: result["distance"] for name, result in found.items()} == {
            name: result["distance"] for name, result in results[0].items()
        }


def test_families_on_two_ranks() -> None:
    results = [found["families"] for found in of_two_ranks()]
    check(results, FIRST)
    assert results[0]["llama"]["held"] < 0.51


def test_families_on_four_ranks() -> None:
    results = ranks.run(4, "parallel.jobs:family_results", FIRST_ON_FOUR, timeout=900)
    check(results, FIRST_ON_FOUR)
    # On four ranks two hold the same heads of keys and values.
    assert results[0]["llama"]["held"] < 0.28


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_every_family(size: int) -> None:
    names = [name for name in families.buildable() if size in families.world_sizes(name)]
    assert len(names) > 150
    check(ranks.run(size, "parallel.jobs:family_results", names, timeout=7200), tuple(names))


def test_collectives_are_those_of_the_plan() -> None:
    for found in (each["collectives"] for each in of_two_ranks()):
        assert set(found) == set(COUNTED)
        for name in COUNTED:
            called, planned, layers = (found[name][key] for key in ("called", "planned", "layers"))
            assert called == {"all_reduce": sum(planned.values()) - planned["head"], "all_gather": 1}, name
            # Beside the embedding: two a layer, or one for attention and MLP beside each other; with norms
            # over all heads one for each norm, and one for a shared expert.
            norms = planned.get("norm", 0)
            expected = (1 if name in PARALLEL else 2) * layers + SHARED_EXPERTS.get(name, 0)
            assert called["all_reduce"] - 1 - norms == expected, name
            assert norms == (2 * layers if name == "olmo2" else 0), name


def test_steps_are_recorded_with_what_ranks_exchange() -> None:
    for found in (each["steps"] for each in of_two_ranks()):
        assert set(found) == set(RECORDED)
        for name, result in found.items():
            assert result["served"] >= 5 and result["distance"] <= 1e-5, name


WHOLE_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")


def test_whole_experts_on_ranks(tmp_path: Path) -> None:
    for name in WHOLE_EXPERTS:
        tiny_models.build(name).save_pretrained(tmp_path / name)
    results = ranks.run(2, "parallel.jobs:expert_parallel", str(tmp_path), WHOLE_EXPERTS)
    for found in results:
        for name, result in found.items():
            assert result["distance"] <= 1e-5 and result["same"] and result["recorded"] >= 5, name
            assert result["roles"]["experts"] == len(result["experts"]) > 0, name
            sums = sum(result["roles"].values()) - result["roles"]["head"]
            assert result["collectives"] == {"all_reduce": sums, "all_gather": 1}, name
    for name in WHOLE_EXPERTS:
        count = tiny_models.build(name).model.layers[-1].mlp.experts.num_experts
        assert results[0][name]["experts"][-1] + results[1][name]["experts"][-1] == count
        saved, whole = (tmp_path / f"{name}-saved", tmp_path / name)
        assert (saved / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_experts_are_whole_where_their_channels_do_not_fit() -> None:
    with torch.device("meta"):
        model = tiny_models._from_config("mixtral")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:, :66])
        experts.down_proj = torch.nn.Parameter(experts.down_proj[:, :, :33])
        experts.intermediate_dim = 33
    how = layout.infer_layout(model).plan(2)
    assert "experts" in how.roles.values() and "sum_output" not in how.roles.values()
    assert how.local_shape("model.layers.0.mlp.experts.down_proj", (4, 64, 33), 1) == (2, 64, 33)


def test_behaviour() -> None:
    results = ranks.run(2, "parallel.jobs:behaviour")
    assert results[0]["sampled"] == results[1]["sampled"]
    assert [found["heard"] for found in results] == [4, -1]
    for found in results:
        assert found["streamed"] == "nothing raised"
        assert "training mode" in found["not_in_training"]
        assert "sharded already" in found["twice"]
        assert found["copied"] and found["pickled"] and not found["gradients"]
        assert "different inputs" in found["other_inputs"]
        assert "different model" in found["other_models"]
        # Ours still serve: all but the layers that exchange, which call the op themselves.
        for rule, (before, after) in found["served"].items():
            assert before == after or rule == "linear.call", rule
        before, after = found["served"]["linear.call"]
        assert 0 < after < before


def test_rounding_in_16_bits() -> None:
    for found in (each["rounding"] for each in of_two_ranks()):
        assert 0 < found["sharded"] <= 1.5 * found["alone"]


def test_without_a_launcher_it_says_how_to_start() -> None:
    with pytest.raises(ParallelError, match="torchrun --nproc-per-node"):
        liteboost_adaptor.shard(tiny_models.build("llama"))
