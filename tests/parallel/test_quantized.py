"""Models of integers, quantized offline and sharded over two ranks as they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel import ranks
from safetensors.torch import save_file
from support import stored_weights, tiny_models
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor.checkpoint.files import File, Slice
from liteboost_adaptor.parallel.checkpoint.quantized_reads import _checked_by
from liteboost_adaptor.quantization import LiteBoostConfig, offline

pytestmark = pytest.mark.usefixtures("native_only")

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
FORMS = {
    "w8a16": ("w8a16",),
    # Ranks meet in the middle of a group: 704 channels.
    "w4a16 asymmetric": ("w4a16", 64, False),
}
LENGTH = 24


def test_two_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    for name, form in FORMS.items():
        offline.quantize_folder(MODEL, tmp_path / name, LiteBoostConfig(*form))
    _gptq(tmp_path / "gptq")
    folders = [str(tmp_path / name) for name in (*FORMS, "gptq")]
    (alone,) = ranks.run(1, "parallel.jobs_quantized:load", folders, LENGTH, WORLD_SIZE="1", LITEBOOST_TP="1")
    for found in ranks.run(2, "parallel.jobs_quantized:load", folders, LENGTH):
        for folder in folders:
            one, part = alone[folder], found[folder]
            assert part["sharded"] and not one["sharded"]
            assert part["tokens"] == one["tokens"] and part["recorded"] > 0
            for name in ("logits", "shifted"):
                logits, expected = torch.tensor(part[name]), torch.tensor(one[name])
                assert (logits - expected).norm() <= 1e-5 * expected.norm()
            assert one["shifted"] != one["logits"]
            assert part["layers"] == one["layers"] and part["held"] == one["held"] / 2


def test_integer_activations_are_as_near_as_in_one_process(tmp_path: Path) -> None:
    """Ranks scale the part of an activation that they hold by itself: other roundings, no larger ones."""
    offline.quantize_folder(MODEL, tmp_path / "w8a8", LiteBoostConfig("w8a8"))
    folders = [str(tmp_path / "w8a8"), str(MODEL)]
    (alone,) = ranks.run(1, "parallel.jobs_quantized:load", folders, LENGTH, WORLD_SIZE="1", LITEBOOST_TP="1")
    exact = torch.tensor(alone[folders[1]]["logits"])
    one = (torch.tensor(alone[folders[0]]["logits"]) - exact).norm()
    results = [each[folders[0]] for each in ranks.run(2, "parallel.jobs_quantized:load", folders, LENGTH)]
    for found in results:
        assert found["sharded"] and found["held"] == alone[folders[0]]["held"] / 2
        assert found["recorded"] > 0
        assert found["tokens"] == results[0]["tokens"] and found["logits"] == results[0]["logits"]
        assert 0 < (torch.tensor(found["logits"]) - exact).norm() <= 1.2 * one


def _gptq(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    stored_weights.write(folder, model, config, stored_weights.random, stored_weights.gptq)


def test_what_cannot_be_divided_is_whole_on_every_rank(tmp_path: Path) -> None:
    """Layers that take 96 columns: no rank has half of a group of 32; and an MLP of 32 channels, one run of
    4 bits: values could be sharded, integers not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folders = []
    for hidden_size, intermediate_size in ((96, 128), (64, 32)):
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "vocab_size": 96}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        plain, quantized = tmp_path / f"{hidden_size} plain", tmp_path / f"{hidden_size} quantized"
        model.save_pretrained(plain)
        offline.quantize_folder(plain, quantized, LiteBoostConfig("w4a16"))
        folders.append(str(quantized))
    first, second = ranks.run(2, "parallel.jobs_quantized:load", folders, 4)
    assert first == second and not any(first[folder]["sharded"] for folder in folders)


def test_scales_that_are_wrong_on_one_rank_end_all(tmp_path: Path) -> None:
    """Written with checksums that are right, so that nothing but the value says it."""
    offline.quantize_folder(MODEL, tmp_path / "whole", LiteBoostConfig("w8a16"))
    liteboost_adaptor.apply()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    model.model.layers[1].self_attn.q_proj.scales[-1] = float("inf")
    model.save_pretrained(tmp_path / "wrong")
    first, second = ranks.run(2, "parallel.jobs_quantized:refused", str(tmp_path / "wrong"))
    assert first.startswith("ParallelError: rank 1 has failed, and the others end with it. QuantizationError")
    assert second.startswith("QuantizationError: the checkpoint does not hold what its quantization_config")
    assert "layers.1.self_attn.q_proj.scales has values that are infinite" in second


def test_on_each_host_one_rank_checks_a_tensor(tmp_path: Path) -> None:
    save_file(
        {name: torch.zeros(rows, 4) for name, rows in zip("abcd", (8, 8, 4, 4), strict=True)}, tmp_path / "x"
    )
    file = File(str(tmp_path / "x"))
    tensors = {name: Slice(file, name, digest="something") for name in file.entries}
    tensors["no checksum"] = Slice(file, "a")
    by_rank = [_checked_by(rank, tensors, {}, ["one", "one", "other", "other"]) for rank in range(4)]
    for near in (by_rank[:2], by_rank[2:]):
        assert near[0] | near[1] == set("abcd") and not near[0] & near[1]
        assert sum(tensors[name].shape[0] for name in near[0]) == 12
    assert _checked_by(0, tensors, {}, ["one"]) == set("abcd")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_families_of_integers_on_two_ranks(tmp_path: Path, scheme: str) -> None:
    names = ("qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "gpt_neox", "mixtral", "deepseek_v3")
    for name in names:
        tiny_models.build(name).save_pretrained(tmp_path / "plain" / name)
        offline.quantize_folder(tmp_path / "plain" / name, tmp_path / name, LiteBoostConfig(scheme, head=16))
    folders = [str(tmp_path / name) for name in names]
    (alone,) = ranks.run(1, "parallel.jobs_quantized:load", folders, 4, WORLD_SIZE="1", LITEBOOST_TP="1")
    for found in ranks.run(2, "parallel.jobs_quantized:load", folders, 4):
        for folder in folders:
            logits, expected = (torch.tensor(each[folder]["logits"]) for each in (found, alone))
            assert (logits - expected).norm() <= 1e-5 * expected.norm(), folder


@pytest.mark.full
def test_whole_experts_beside_layers_of_integers(tmp_path: Path) -> None:
    tiny_models.build("mixtral").save_pretrained(tmp_path / "plain")
    offline.quantize_folder(tmp_path / "plain", tmp_path / "new", LiteBoostConfig("w8a16"))
    folders = [str(tmp_path / "new")]
    (alone,) = ranks.run(1, "parallel.jobs_quantized:load", folders, 4, WORLD_SIZE="1", LITEBOOST_TP="1")
    for found in ranks.run(2, "parallel.jobs_quantized:load", folders, 4, LITEBOOST_EP="1"):
        part, one = found[folders[0]], alone[folders[0]]
        logits, expected = torch.tensor(part["logits"]), torch.tensor(one["logits"])
        assert part["sharded"] and (logits - expected).norm() <= 1e-5 * expected.norm()
