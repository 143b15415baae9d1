"""Experts that are one parameter, as integers: values, loading, saving, offline, fallbacks."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from support import families, numbers, tiny_models
from support.calls import faults_of_steps
from support.processes import python_json

import liteboost_adaptor
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, offline, quantize_model
from liteboost_adaptor.quantization.layers import QuantizedExperts, WeightShape
from liteboost_adaptor.quantization.schemes import QuantScheme, quantize
from liteboost_adaptor.report import report

IDS = torch.arange(5, 25)[None]
#: Experts one below the other, kept one by one in files; and transposed, interleaved, with biases.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
SCHEMES = [QuantScheme("w8a16"), QuantScheme("w4a16"), QuantScheme("w4a16", 64, symmetric=False)]


def load(folder: Path, **arguments) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **arguments).eval()


def experts_of(model: torch.nn.Module) -> dict[str, QuantizedExperts]:
    return {name: each for name, each in model.named_modules() if isinstance(each, QuantizedExperts)}


def assert_same_state(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    state, wanted = found.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in wanted.items())


def layer(scheme: QuantScheme, is_transposed: bool = False) -> tuple[QuantizedExperts, torch.Tensor]:
    """Of four experts, ``[out, in]`` = [32, 64], and the parameter it was made of."""
    parameter = torch.randn(4, 64, 32) if is_transposed else torch.randn(4, 32, 64)
    shape = WeightShape.of(parameter, is_transposed)
    made = QuantizedExperts(shape, scheme, parameter.dtype, "meta").eval()
    made.fill(shape.quantize(parameter, scheme, "the experts"))
    return made, parameter


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.symmetric}")
def test_an_expert_is_rounded_as_a_linear_layer_is(scheme: QuantScheme, is_transposed: bool) -> None:
    made, parameter = layer(scheme, is_transposed)
    assert made.shape == parameter.shape and made.ndim == 3
    for arranged in (False, True):
        whole = made.dequantized_parameter()
        assert whole.shape == parameter.shape
        for expert in range(4):
            plain = parameter[expert].t() if is_transposed else parameter[expert]
            alone = quantize(plain.contiguous(), scheme).dequantize()
            assert torch.equal(whole[expert], alone.t() if is_transposed else alone)
            assert torch.equal(made[expert], whole[expert])
            assert torch.equal(made[torch.tensor(expert)], whole[expert])
        assert torch.equal(made[torch.tensor([2, 2, 0])], whole[[2, 2, 0]])
        assert torch.equal(made.transpose(-1, -2), whole.mT) and torch.equal(made.mT, whole.mT)
        ones = torch.ones(4, 1, made.shape[1])
        assert torch.equal(torch.bmm(ones, made), torch.bmm(ones, whole))
        if not arranged:
            made.prepack()
            assert made.is_packed


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.symmetric}")
def test_in_tiles_or_not_the_products_are_the_same(scheme: QuantScheme, no_grad: None) -> None:
    made, _ = layer(scheme)
    x, index = torch.randn(6, 64), torch.tensor([[0, 3], [4, 1], [2, 2], [1, 4], [0, 0], [3, 2]])
    bias = torch.randn(4, 32)
    saved = made.product(x, bias, index)
    made.prepack()
    tiles = made.product(x, bias, index)
    assert numbers.relative(tiles, saved) <= 2e-6
    assert bool((tiles[index == 4] == 0).all()) and bool((saved[index == 4] == 0).all())


def test_casts_copies_and_state(no_grad: None) -> None:
    made, _ = layer(QuantScheme("w4a16"))
    made.prepack()
    state = made.state_dict()
    assert state["weight"].shape == (4 * 32, 32) and state["scales"].shape == (4 * 32, 2)
    other, _ = layer(QuantScheme("w4a16"))
    other.load_state_dict(state)
    assert torch.equal(other.dequantized_parameter(), made.dequantized_parameter())
    again = copy.deepcopy(made).to(torch.float16)
    assert again.dtype == torch.float16 and again.scales.dtype == torch.bfloat16
    assert torch.equal(again.weight, made.weight)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_saved_and_offline_they_are_the_same(family: str, scheme: str, tmp_path: Path) -> None:
    tiny_models.build(family).bfloat16().save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    loaded = load(tmp_path / "plain", quantization_config=LiteBoostConfig(scheme))
    found = experts_of(loaded)
    assert found and all(each.is_packed for each in found.values())
    assert_same_state(quantize_model(load(tmp_path / "plain"), LiteBoostConfig(scheme)), loaded)
    loaded.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert experts_of(again).keys() == found.keys()
    assert_same_state(again, loaded)
    done = offline.quantize_folder(tmp_path / "plain", tmp_path / "offline", LiteBoostConfig(scheme))
    assert {each.name for each in done.errors} >= found.keys()
    assert_same_state(load(tmp_path / "offline"), loaded)
    tokens = loaded.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(again.generate(IDS, max_new_tokens=8, do_sample=False), tokens)


SCRIPT = """
import json, sys
import torch
import liteboost_adaptor
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
print(json.dumps(model.generate(torch.arange(5, 25)[None], max_new_tokens=8, do_sample=False).tolist()))
"""


def test_a_fresh_process_writes_the_same_text(tmp_path: Path) -> None:
    model = quantize_model(tiny_models.build("gpt_oss").bfloat16(), LiteBoostConfig("w4a16"))
    model.save_pretrained(tmp_path)
    liteboost_adaptor.apply(model, level=2)
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert python_json(SCRIPT, str(tmp_path), is_forked=True, LITEBOOST_LEVEL="2") == expected.tolist()


def test_a_step_reads_integers_and_is_recorded_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize_model(tiny_models.build("mixtral").bfloat16(), LiteBoostConfig("w4a16"))
    liteboost_adaptor.apply(model, level=2)
    monkeypatch.setattr(QuantizedExperts, "dequantized_parameter", lambda self: pytest.fail("dequantized"))
    experts, step = report.counter("experts.grouped_mm"), report.counter("step.program")
    before = experts.calls, step.calls, experts.fallbacks.copy(), step.fallbacks.copy()
    model.generate(IDS, max_new_tokens=40, do_sample=False)
    assert experts.calls > before[0] and step.calls > before[1]
    assert experts.fallbacks == before[2]
    assert not faults_of_steps(step.fallbacks - before[3])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_transformers_own_code_multiplies_the_same_weights(family: str, implementation: str) -> None:
    model = tiny_models.build(family)
    quantize_model(model, LiteBoostConfig("w8a16"))
    liteboost_adaptor.undo(model)
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    for each in (model, twin):
        each.set_experts_implementation(implementation)
    inputs = families.inputs_of(model, 13, (0, 3))
    with torch.no_grad():
        assert numbers.relative(model(**inputs).logits, twin(**inputs).logits) <= 2e-6


def test_gradients_pass_through_the_weights_dequantized() -> None:
    model = quantize_model(tiny_models.build("qwen3_moe"), LiteBoostConfig("w8a16"))
    liteboost_adaptor.apply(model, level=2)
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    gradients = []
    for each in (model, twin):
        states = each.get_input_embeddings()(IDS).detach().requires_grad_()
        each(inputs_embeds=states).logits.square().sum().backward()
        gradients.append(states.grad)
    assert numbers.relative(*gradients) <= 1e-4


def test_what_does_not_suit_stays_and_the_status_says_which() -> None:
    config = tiny_models.build("qwen3_moe").config
    config.moe_intermediate_size = 20
    model = quantize_model(type(tiny_models.build("qwen3_moe"))(config).eval(), LiteBoostConfig("w8a16"))
    assert all(name.endswith("down_proj") for name in experts_of(model))
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization" and row.reason]
    refused = [row.reason for row in rows if "model.layers.0.mlp.experts.gate_up_proj" in row.where]
    assert refused and "out_features = 40 of an expert is not a multiple of 16" in refused[0]
    model = quantize_model(tiny_models.build("qwen3_moe"), LiteBoostConfig("w4a16"))
    assert all(name.endswith("gate_up_proj") for name in experts_of(model))
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization" and row.reason]
    refused = [row.reason for row in rows if "model.layers.0.mlp.experts.down_proj" in row.where]
    assert refused and "in_features = 48 is not a multiple of the group size 32" in refused[0]


def test_experts_that_are_named_stay() -> None:
    for name in ("experts", "mlp.experts.gate_up_proj"):
        model = tiny_models.build("mixtral")
        quantize_model(model, LiteBoostConfig("w8a16", modules_to_not_convert=[name]))
        left = {found.rpartition(".")[2] for found in experts_of(model)}
        assert left == (set() if name == "experts" else {"down_proj"})


def test_missing_and_other_experts_are_errors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_models.build("gpt_oss").bfloat16().save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    whole = tensors.pop(name)
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match=f"{name} is missing"):
        load(tmp_path / "plain", quantization_config=LiteBoostConfig("w8a16"))
    save_file(
        tensors | {name: whole[:2].contiguous()}, tmp_path / "plain" / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(QuantizationError, match=rf"{name} of the checkpoint has shape \[2, "):
        load(tmp_path / "plain", quantization_config=LiteBoostConfig("w8a16"))


def test_dequantized_they_are_saved_as_any_checkpoint(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral").bfloat16()
    model.save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=LiteBoostConfig("w8a16"))
    model.dequantize(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "again")
    kept = [set(json.loads((tmp_path / name / "config.json").read_text())) for name in ("plain", "again")]
    assert "quantization_config" not in kept[1] - kept[0]
    from safetensors import safe_open

    names = []
    for name in ("plain", "again"):
        with safe_open(tmp_path / name / "model.safetensors", framework="pt") as file:
            names.append({each for each in file.keys() if "experts" in each})
    assert names[0] == names[1]
