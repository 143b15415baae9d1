"""Weights of one input are merged once a step is recorded, and nobody sees it but the launches."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from safetensors.torch import load_file, save_model
from support import llamas
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import liteboost_adaptor
from liteboost_adaptor.program import merged_weights

SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def at_level_two(no_grad: None, undone: None) -> None:
    liteboost_adaptor.apply(level=2)


def llama() -> LlamaForCausalLM:
    return llamas.llama(torch.bfloat16, **SIZES)


def qwen2() -> Qwen2ForCausalLM:
    """With biases of query, key and value."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval().npu()


def decode(model: torch.nn.Module, new: int = 9) -> torch.Tensor:
    ids = torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(1)).npu()
    return model.generate(ids, do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0).cpu()


def products(model: torch.nn.Module) -> float:
    """Matrix products a layer in a token of a recorded step."""
    counts = []
    for new in (9, 10):
        with recording() as trace:
            decode(model, new)
        counts.append(sum(launch.op in ("aclnnMm", "aclnnAddmm") for launch in trace.launches))
    return (counts[1] - counts[0] - 1) / model.config.num_hidden_layers


def groups(model: torch.nn.Module, layer: int = 0) -> list[list[torch.nn.Parameter]]:
    attention, mlp = model.model.layers[layer].self_attn, model.model.layers[layer].mlp
    return [
        [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)],
        [mlp.gate_proj.weight, mlp.up_proj.weight],
    ]


def are_merged(model: torch.nn.Module) -> list[bool]:
    return [torch.ops.liteboost._npu_are_merged(list(group)) for group in groups(model)]


@pytest.mark.parametrize("make", [llama, qwen2])
def test_projections_of_a_token_are_one_product_with_the_same_values(make: Callable[[], Any]) -> None:
    model = make()
    twin, objects = copy.deepcopy(model), dict(model.named_parameters())
    values = {name: parameter.clone() for name, parameter in objects.items()}
    found = decode(model)
    assert products(model) == 4  # q with k and v, o, gate with up, down
    assert are_merged(model) == [True, True]
    now = dict(model.named_parameters())
    assert all(now[name] is objects[name] and torch.equal(now[name], values[name]) for name in objects)
    liteboost_adaptor.undo()
    assert torch.equal(found, decode(twin))


def test_no_second_copy_is_held() -> None:
    model = llama()
    gc.collect()
    before = torch.npu.memory_allocated()
    decode(model)
    assert are_merged(model) == [True, True]
    weights = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    del model
    gc.collect()
    after = torch.npu.memory_allocated()
    assert after <= before - weights  # each part is freed with the last of them, and nothing else is kept


def test_saved_and_loaded_as_ever(tmp_path: Path) -> None:
    model, twin = llama(), llama()
    decode(model)
    assert are_merged(model) == [True, True]
    files = {}
    for name, each in (("ours", model), ("theirs", twin)):
        folder = tmp_path / name
        each.save_pretrained(folder)
        save_model(each, str(folder / "whole.safetensors"))
        torch.save(each.state_dict(), folder / "state.pt")
        torch.save(each.model.layers[0].mlp.up_proj.weight, folder / "one.pt")
        files[name] = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files["ours"] == files["theirs"]
    kept = load_file(tmp_path / "ours" / "model.safetensors")
    assert kept.keys() == twin.state_dict().keys()
    assert all(torch.equal(kept[name], value.cpu()) for name, value in twin.state_dict().items())
    pointers = [each.untyped_storage().data_ptr() for each in model.parameters()]
    assert len(set(pointers)) == len(pointers)
    storages = [each.untyped_storage().nbytes() for group in groups(model) for each in group]
    assert storages == [each.nbytes for group in groups(model) for each in group]


def moved_away_and_back(model: torch.nn.Module) -> None:
    model.cpu()
    model.npu()


def other_data(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 2


def assigned(model: torch.nn.Module) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)


def adapted(model: torch.nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False), model)


def in_place(model: torch.nn.Module) -> None:
    model.model.layers[0].self_attn.k_proj.weight.mul_(-2)


def stepped(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.grad = None


CHANGES = (moved_away_and_back, other_data, assigned, adapted, in_place, stepped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_parameter_that_is_given_other_memory_or_values_is_read(change: Callable[[Any], None]) -> None:
    model, twin = llama(), llama()
    decode(model)
    assert are_merged(model) == [True, True]
    change(model)
    change(twin)
    ids = torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(2)).npu()
    found = model(ids, use_cache=True)
    logits = [found.logits]
    for token in range(8):
        step = model(torch.tensor([[token + 3]]).npu(), past_key_values=found.past_key_values, use_cache=True)
        logits.append(step.logits)
    liteboost_adaptor.undo()
    expected = twin(ids, use_cache=True)
    for token, ours in enumerate(logits):
        theirs = expected.logits
        if token:
            theirs = twin(
                torch.tensor([[token + 2]]).npu(), past_key_values=expected.past_key_values, use_cache=True
            ).logits
        assert (ours.float() - theirs.float()).norm() <= 3e-2 * theirs.float().norm()


def test_separated_weights_are_brought_together_again() -> None:
    model = llama()
    decode(model)
    moved_away_and_back(model)
    assert are_merged(model) == [False, False]
    decode(model)
    assert are_merged(model) == [True, True] and products(model) == 4


def test_memory_that_somebody_else_sees_is_not_moved() -> None:
    model = llama()
    layer = model.model.layers[0]
    view = layer.self_attn.q_proj.weight.data  # another tensor over the same memory
    shared = layer.mlp.up_proj.weight
    model.model.layers[1].mlp.gate_proj.weight = shared  # in two places
    decode(model)
    assert are_merged(model)[0] is False
    layer.mlp.gate_proj.weight.mul_(1)
    view.mul_(3)
    assert torch.equal(layer.self_attn.q_proj.weight, view)
    assert model.model.layers[1].mlp.gate_proj.weight is shared


def test_weights_that_a_graph_may_have_captured_stay_where_they_are() -> None:
    model = llama()
    ids = torch.tensor([[5]]).npu()
    cache = model(ids.expand(1, 4), use_cache=True).past_key_values
    model(ids, past_key_values=cache)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        captured = model(ids, past_key_values=copy.copy(cache)).logits
    graph.replay()
    before = captured.clone()
    decode(model, 12)
    assert are_merged(model) == [False, False]
    graph.replay()
    assert torch.equal(before, captured)


def test_what_cannot_be_merged_is_left() -> None:
    def parameter(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(*size).to(dtype).npu())

    one = parameter(4, 32)
    assert not merged_weights.merge([one, one])
    assert not merged_weights.merge([one, parameter(4, 48)])
    assert not merged_weights.merge([one, parameter(4, 32, dtype=torch.float16)])
    assert not merged_weights.merge([one, torch.nn.Parameter(torch.randn(4, 32).bfloat16())])
    assert not merged_weights.merge([one, parameter(8, 64)[:, ::2]])
    assert not merged_weights.merge([one, parameter(3, 3)])
    other = parameter(6, 32)
    assert merged_weights.merge([one, other]) and merged_weights.merge([one, other])
    assert not merged_weights.merge([other, one]), "they lie in another order, and belong together"
    assert not merged_weights.merge([one, parameter(2, 32)])
    buffer = io.BytesIO()
    torch.save(one, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).cpu(), one.cpu())
