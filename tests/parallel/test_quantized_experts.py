"""Experts of integers, sharded over ranks: by channels, by whole experts; read, rounded, saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import ranks
from safetensors import safe_open
from support import tiny_models
from transformers import MixtralConfig, MixtralForCausalLM

from liteboost_adaptor import cli, config
from liteboost_adaptor.checkpoint.files import requests
from liteboost_adaptor.parallel.tensor import layout, quantized
from liteboost_adaptor.parallel.tensor.shard_spec import copy_shard
from liteboost_adaptor.quantization import LiteBoostConfig, offline, quantize_model
from liteboost_adaptor.quantization.checkpoint.checksums import DIGESTS, tensors_of

pytestmark = pytest.mark.usefixtures("native_only")

LENGTH = 16
NAME = "mixtral quantized/model.safetensors"
#: Model -> how it is quantized, (experts, gate and up, down) of each rank.
FORMS: dict[str, tuple[tuple, list[list[list[int]]]]] = {
    # Ranks meet inside of groups of 64: 192 channels.
    "mixtral": (("w4a16", 64, False), [[[4, 192, 64], [4, 64, 96]]] * 2),
    # Transposed, interleaved, with biases; three runs of 32 channels for two ranks, and no other way.
    "gpt_oss": (("w4a16",), [[[4, 64, 64], [4, 32, 64]], [[4, 64, 128], [4, 64, 64]]]),
    # One scale for a row that both ranks have a part of.
    "qwen3_moe": (("w8a16",), [[[4, 48, 64], [4, 64, 24]]] * 2),
}


def mixtral(channels: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": channels, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))


def built(folder: Path, names: tuple[str, ...] = tuple(FORMS)) -> dict[str, Any]:
    """Checkpoints of models and of what they are quantized to; the forms for a job."""
    for name in names:
        model = mixtral(192) if name == "mixtral" else tiny_models.build(name)
        model.save_pretrained(folder / name)
        offline.quantize_folder(folder / name, folder / f"{name} quantized", LiteBoostConfig(*FORMS[name][0]))
    return {name: FORMS[name][0] for name in names}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def digests(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        return json.loads(file.metadata()[DIGESTS])


def assert_same_checkpoint(found: Path, wanted: Path) -> None:
    mine, theirs = tensors(found), tensors(wanted)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    said = digests(wanted)
    assert digests(found) == {name: said[name] for name in theirs}
    configs = [json.loads((each / "config.json").read_text()) for each in (found, wanted)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def figures(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", str(folder), "--tp", "2", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_ranks_divide_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forms = built(tmp_path)
    job = ("parallel.jobs_quantized:experts", str(tmp_path), forms, LENGTH)
    (alone,) = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")
    for rank, found in enumerate(ranks.run(2, *job)):
        for name, each in found.items():
            one = alone[name]
            assert each["shapes"] == FORMS[name][1][rank] * (len(one["shapes"]) // 2), name
            assert each["tokens"] == one["tokens"] and each["recorded"] > 0, name
            expected = torch.tensor(one["logits"])
            for logits in (each["logits"], each["rounded"]):
                assert (torch.tensor(logits) - expected).norm() <= 1e-5 * expected.norm(), name
            planned = figures(tmp_path / f"{name} quantized", capsys)
            assert planned["weights"][rank] == each["held"] < 0.65 * one["held"], name
            assert planned["all_weights"] == one["held"]
            assert planned["exchanges"] == each["roles"]
            sums = sum(each["roles"].values()) - each["roles"]["head"]
            assert each["collectives"] == {"all_reduce": sums, "all_gather": 1}, name
    for name in forms:
        for kind in ("saved", "rounded"):
            assert_same_checkpoint(tmp_path / f"{name} {kind}", tmp_path / f"{name} alone")


def test_a_rank_reads_its_part_and_checks_its_share(tmp_path: Path) -> None:
    built(tmp_path, ("mixtral",))
    model = quantize_model(mixtral(192), LiteBoostConfig(*FORMS["mixtral"][0]))
    weights, found = quantized.weights_of(model), tensors_of([str(tmp_path / NAME)])
    with quantized.as_plain(model):
        how = layout.infer_layout(model, quantized.granularities_of(weights)).plan(2)
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.0.mlp.experts.{name}"
        spec = weights[full].specs(how.shardings[full], 2)["weight"]
        tensor = found[f"{full}.weight"]
        before = requests.bytes
        parts = [spec.read(tensor, rank, checks=False)[...] for rank in range(2)]
        whole = tensor[...]
        assert requests.bytes - before == 2 * whole.nbytes  # once in parts, and once whole
        held = spec.empty_global(parts[0])
        for part, ranges in zip(parts, spec.ranges, strict=True):
            copy_shard(held, part, spec.dim, ranges)
        assert torch.equal(spec.without_repeats(held), whole)
        before = requests.bytes
        assert torch.equal(spec.read(tensor, 1)[...], parts[1])
        assert requests.bytes - before == whole.nbytes + parts[1].nbytes


def test_a_byte_that_has_changed_is_found_by_one_of_the_ranks(tmp_path: Path) -> None:
    built(tmp_path, ("mixtral",))
    folder = tmp_path / "mixtral quantized"
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if "experts" in name and name.endswith("weight")]
    for index, name in enumerate(names[:2]):
        twin = tmp_path / str(index)
        shutil.copytree(folder, twin)
        data = bytearray((twin / "model.safetensors").read_bytes())
        start = int.from_bytes(data[:8], "little") + 8
        data[start + json.loads(data[8:start])[name]["data_offsets"][1] - 1] ^= 1
        (twin / "model.safetensors").write_bytes(data)
        said = ranks.run(2, "parallel.jobs_quantized:changed", str(twin))
        assert sum(text.startswith("CheckpointError") for text in said) == 1, said
        assert all(name in text and "is not what was written there" in text for text in said), said


def test_experts_of_integers_are_whole_where_their_channels_do_not_fit() -> None:
    model = quantize_model(mixtral(96), LiteBoostConfig("w4a16"))
    weights = quantized.weights_of(model)
    with quantized.as_plain(model):
        found = layout.infer_layout(model, quantized.granularities_of(weights))
    how = found.plan(2)
    assert "experts" in how.roles.values() and "sum_output" not in how.roles.values()
    assert not quantized.why_not(weights, how)
    name = "model.layers.0.mlp.experts.down_proj"
    assert weights[name].local(how.shardings[name], 1, 2).shape.shape == (2, 64, 96)
    assert {spec.ranges for spec in weights[name].specs(how.shardings[name], 2).values()} == {
        (((0, 128),), ((128, 256),))
    }
    assert any("runs of 32 channels of experts" in need.what for need in found.requirements)


def test_a_plan_says_what_models_that_are_quantized_while_they_are_read_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path, ("qwen3_moe",))
    wanted = figures(tmp_path / "qwen3_moe quantized", capsys)
    plain = figures(tmp_path / "qwen3_moe", capsys)
    monkeypatch.setattr(config, "settings", lambda: config.read({"LITEBOOST_QUANT": "w8a16"}))
    assert figures(tmp_path / "qwen3_moe", capsys)["weights"] == wanted["weights"] < plain["weights"]


@pytest.mark.full
def test_four_ranks_and_whole_experts(tmp_path: Path) -> None:
    forms = {"four bits": ("w4a16", 64, False), "eight": ("w8a16",)}
    for name, form in forms.items():
        mixtral(256).save_pretrained(tmp_path / name)
        offline.quantize_folder(tmp_path / name, tmp_path / f"{name} quantized", LiteBoostConfig(*form))
    job = ("parallel.jobs_quantized:experts", str(tmp_path), forms, LENGTH)
    (alone,) = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")
    for settings in ({}, {"LITEBOOST_EP": "1"}):
        for found in ranks.run(4, *job, **settings):
            for name, each in found.items():
                expected = torch.tensor(alone[name]["logits"])
                for logits in (each["logits"], each["rounded"]):
                    assert (torch.tensor(logits) - expected).norm() <= 1e-5 * expected.norm(), name
                assert each["tokens"] == alone[name]["tokens"]
                assert {shape[0] for shape in each["shapes"]} == ({1} if settings else {4})
        for name in forms:
            for kind in ("saved", "rounded"):
                assert_same_checkpoint(tmp_path / f"{name} {kind}", tmp_path / f"{name} alone")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_models_that_every_rank_has_loaded_are_divided_in_place(tmp_path: Path, scheme: str) -> None:
    for name in ("gpt2", "mixtral"):
        model = mixtral(192) if name == "mixtral" else tiny_models.build(name)
        model.save_pretrained(tmp_path / "plain" / name)
        offline.quantize_folder(tmp_path / "plain" / name, tmp_path / name, LiteBoostConfig(scheme, head=16))
        for found in ranks.run(2, "parallel.jobs_quantized:in_place", str(tmp_path / name)):
            assert found["distance"] <= 1e-5 and found["held"] < 0.6
        assert_same_checkpoint(tmp_path / f"{name} in place", tmp_path / f"{name} alone")
