"""What is loaded into quantized layers, and layers that become larger or smaller."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from support import numbers, stored_weights, tiny_models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import liteboost_adaptor
from liteboost_adaptor.errors import QuantizationError, StateError
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 72,
}
CONFIGS = {
    "w8a16": LiteBoostConfig("w8a16"),
    "w4a16": LiteBoostConfig("w4a16"),
    "w4a16 asymmetric, head 16": LiteBoostConfig("w4a16", symmetric=False, head=16),
    "w8a8": LiteBoostConfig("w8a8"),
    "w4a8": LiteBoostConfig("w4a8"),
    "kv8": LiteBoostConfig("w8a16+kv8"),
}
IDS = torch.tensor([[5, 9, 33, 71, 2, 60]])


def plain(tied: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def quantized(name: str, tied: bool = False) -> torch.nn.Module:
    return quantize_model(plain(tied), LiteBoostConfig(**CONFIGS[name].to_dict()))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["w8a16", "w8a8", "w4a8"])
def test_numbers_do_not_become_integers(name: str, assign: bool) -> None:
    model = quantized(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        StateError, match=r"weight of the state_dict is torch.float32, .*dequantize"
    ) as raised:
        model.load_state_dict(plain().state_dict(), strict=False, assign=assign)
    assert isinstance(raised.value, RuntimeError) and isinstance(raised.value, QuantizationError)
    layer = "model.layers.0.self_attn.q_proj"
    assert layer in str(raised.value)
    for part in ("weight", "scales"):
        assert torch.equal(model.state_dict()[f"{layer}.{part}"], before[f"{layer}.{part}"])
    plain_again = model.dequantize(dtype=torch.float32)
    plain_again.load_state_dict(plain().state_dict())


def test_integers_come_with_their_scales() -> None:
    state = quantized("w8a16").state_dict()
    part = {name: value for name, value in state.items() if not name.endswith("up_proj.scales")}
    with pytest.raises(StateError, match=r"up_proj.weight without model.layers.0.mlp.up_proj.scales"):
        quantized("w8a16").load_state_dict(part, strict=False)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].int()
    with pytest.raises(StateError, match=r"up_proj.weight of the state_dict is torch.int32"):
        quantized("w8a16").load_state_dict(state)
    for name in CONFIGS:  # and what fits still loads, also in part
        model = quantized(name)
        state = model.state_dict()
        assert not model.load_state_dict(state).missing_keys
        model.load_state_dict({key: state[key] for key in state if "layers.0.mlp" in key}, strict=False)


def test_integers_come_without_the_zero_points_of_others() -> None:
    model = quantized("w4a16")
    with pytest.raises(StateError, match=r"q_proj.zero_points, and this model's w4a16 has none"):
        model.load_state_dict(quantized("w4a16 asymmetric, head 16").state_dict(), strict=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_was_saved_is_dequantized(dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantize_model(plain().to(dtype), LiteBoostConfig("w8a16"))
    model.save_pretrained(tmp_path)
    weight = model.dequantize().model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == dtype and weight.is_floating_point()


@pytest.mark.parametrize("family", ["marian", "inkling2_text"])
def test_what_is_kept_is_what_a_checkpoint_can_hold(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    if family == "marian":
        from transformers import MarianMTModel

        model = MarianMTModel(model.config).eval()
    quantize_model(model, LiteBoostConfig("w8a16")).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert sum(isinstance(each, QuantizedLinear) for each in loaded.modules()) > 2
    for (name, kept), (_, read) in zip(
        sorted(model.state_dict().items()), sorted(loaded.state_dict().items()), strict=True
    ):
        assert torch.equal(kept, read), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_cannot_be_quantized_stays_whole(value: float, tmp_path: Path) -> None:
    model = plain()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(QuantizationError, match=r"layers.1.mlp.down_proj.* infinite or not a number"):
        quantize_model(model, LiteBoostConfig("w8a16"))
    assert not any(isinstance(each, QuantizedLinear) for each in model.modules())
    model.save_pretrained(tmp_path)
    with pytest.raises(QuantizationError, match=r"layers.1.mlp.down_proj.* infinite or not a number"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=LiteBoostConfig("w8a16"))


def test_a_layer_in_several_places_stays() -> None:
    model = plain()
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    quantize_model(model, LiteBoostConfig("w8a16"))
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert model.model.layers[1].mlp.up_proj is model.model.layers[0].mlp.up_proj
    assert isinstance(model.model.layers[1].mlp.gate_proj, QuantizedLinear)


def test_numbers_for_experts_are_refused() -> None:
    model = quantize_model(tiny_models.build("mixtral"), LiteBoostConfig("w8a16"))
    state = {
        name: value
        for name, value in tiny_models.build("mixtral").state_dict().items()
        if "experts" in name and "gate." not in name
    }
    assert state
    with pytest.raises(StateError, match=r"experts.* of the state_dict is a parameter"):
        model.load_state_dict(state, strict=False)
    model.load_state_dict(model.state_dict())
    copy.deepcopy(model).load_state_dict(model.state_dict())


def head_of(model: torch.nn.Module) -> torch.Tensor:
    head = model.get_output_embeddings()
    return head.dequantize() if isinstance(head, QuantizedLinear) else head.weight


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tokens", [75, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_more_and_fewer_tokens(name: str, tokens: int, tied: bool, tmp_path: Path) -> None:
    model = quantized(name, tied)
    ids = IDS.clamp(max=tokens - 1)
    with torch.no_grad():
        former = model(input_ids=ids).logits
    before = model.get_output_embeddings().state_dict()
    model.generate(IDS[:, :3], max_new_tokens=12, do_sample=False)
    embedding = model.resize_token_embeddings(tokens)
    assert embedding.weight.shape == (tokens, 64) and model.config.vocab_size == tokens
    head, shared = model.get_output_embeddings(), min(tokens, 72)
    assert head.out_features == tokens
    for part, value in head.state_dict().items():
        assert torch.equal(value[:shared], before[part][:shared]), part
    with torch.no_grad():
        found = model(input_ids=ids).logits
    assert found.shape[-1] == tokens
    assert numbers.relative(found[..., :shared], former[..., :shared]) <= 1e-6
    new = head_of(model)[shared:]
    assert not len(new) or numbers.relative(new.mean(0), head_of(model)[:shared].mean(0)) < 0.05
    text = model.generate(IDS[:, :3].clamp(max=tokens - 1), max_new_tokens=12, do_sample=False)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    assert torch.equal(
        again.generate(IDS[:, :3].clamp(max=tokens - 1), max_new_tokens=12, do_sample=False), text
    )


@pytest.mark.parametrize("mean_resizing", [False, True])
def test_new_rows_are_those_of_the_model_dequantized(mean_resizing: bool) -> None:
    model = quantized("w8a16")
    twin = copy.deepcopy(model).dequantize(dtype=torch.float32)
    liteboost_adaptor.undo(twin)
    for each in (model, twin):
        torch.manual_seed(3)
        each.resize_token_embeddings(96, mean_resizing=mean_resizing)
    assert torch.equal(model.model.embed_tokens.weight, twin.model.embed_tokens.weight)
    assert numbers.relative(head_of(model)[72:], twin.lm_head.weight[72:].detach()) <= 0.01


def test_to_a_multiple_and_to_the_same() -> None:
    model = quantized("w4a16")
    head = model.lm_head
    model.resize_token_embeddings(72)
    assert model.lm_head is head
    model.resize_token_embeddings(pad_to_multiple_of=64)
    assert model.lm_head.out_features == 128 and model.lm_head.is_packed == head.is_packed


@pytest.mark.parametrize(("bits", "act"), [(4, False), (4, True), (8, True), (3, True)])
def test_a_head_of_another_format(bits: int, act: bool, tmp_path: Path) -> None:
    """Also with columns in another order, and of 8 bits as two of 4."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": act}
    model = plain().half()
    model.save_pretrained(tmp_path)
    weight = stored_weights.random((72, 64), 0, bits=bits, size=32, symmetric=False, act=act)
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"lm_head.{part}": value for part, value in stored_weights.gptq(weight).items()}
    stored_weights.save(tmp_path, tensors, config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    before = loaded.lm_head.state_dict()
    assert isinstance(loaded.lm_head, QuantizedLinear)
    torch.manual_seed(3)
    twin = copy.deepcopy(loaded).dequantize(dtype=torch.float32)
    liteboost_adaptor.undo(twin)
    for each in (loaded, twin):
        torch.manual_seed(3)
        each.resize_token_embeddings(90, mean_resizing=False)
    for part, value in loaded.lm_head.state_dict().items():
        assert part == "columns" or torch.equal(value[:72], before[part])
    bound = 0.02 if bits == 8 else 0.2
    assert numbers.relative(head_of(loaded)[72:], twin.lm_head.weight[72:].detach()) <= bound
    loaded.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, loaded(input_ids=IDS).logits)


def test_a_copy_of_a_model_closes_no_file_of_others(tmp_path: Path) -> None:
    from liteboost_adaptor.checkpoint.files import File

    plain().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    first = File(path)
    copy.deepcopy(first)
    del first
    with path.open("rb") as file:
        second = File(path)
        copied = copy.deepcopy({"of a quantizer": second})
        del second
        assert file.read(1)
        assert copied["of a quantizer"].entries
    again = pickle.loads(pickle.dumps(File(path)))
    assert again.entries.keys() == File(path).entries.keys()
