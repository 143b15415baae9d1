"""Weights, biases and constants of a served module that are found elsewhere, or are of another kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support import numbers, processes, tiny_models
from torch import nn

import liteboost_adaptor

TOLERANCE = 2e-5


def _bias_as_buffer(model: nn.Module) -> None:
    layer = model.model.layers[0].mlp.down_proj
    del layer.bias
    layer.register_buffer("bias", torch.ones(layer.out_features) * 0.3)


def _biases_as_plain_tensors(model: nn.Module) -> None:
    for layer in model.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.self_attn.q_proj):
            del linear.bias
            linear.bias = torch.ones(linear.out_features) * 0.5


def _weight_on_the_instance(model: nn.Module) -> None:
    for layer in (model.model.layers[0].mlp.gate_proj, model.model.layers[1].self_attn.o_proj):
        layer.__dict__["weight"] = layer.weight.detach() * -0.5


def _bias_on_the_instance(model: nn.Module) -> None:
    for layer in (model.model.layers[0].mlp.up_proj, model.model.layers[1].mlp.down_proj):
        layer.__dict__["bias"] = torch.ones(layer.out_features)


def _epsilon_for_each_channel(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for norm in (model.model.norm, model.model.layers[0].input_layernorm):
        norm.variance_epsilon = torch.rand(norm.weight.shape[0], generator=generator)


@pytest.mark.parametrize("is_bound_before", [False, True])
@pytest.mark.parametrize(
    "edit",
    [
        _bias_as_buffer,
        _biases_as_plain_tensors,
        _weight_on_the_instance,
        _bias_on_the_instance,
        _epsilon_for_each_channel,
    ],
)
def test_what_the_original_reads_counts(edit: Callable[[nn.Module], None], is_bound_before: bool) -> None:
    plain, served, ids = _pair(is_bound_before)
    edit(plain)
    edit(served)
    expected, found = _logits(plain, ids), _logits(served, ids)
    assert numbers.relative(expected, _logits(tiny_models.build("llama"), ids)) > 1e-3
    assert numbers.relative(found, expected) <= TOLERANCE


#: In a process of its own: FSDP never gives the memory of its parameters back.
FSDP = """
import json
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
import liteboost_adaptor
from support import calls, tiny_models
torch.set_grad_enabled(False)
model = tiny_models.build("llama")
ids = tiny_models.example_inputs(model)["input_ids"]
before = model(input_ids=ids, use_cache=False).logits
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
with calls.served() as served:
    found = wrapped(input_ids=ids, use_cache=False).logits
dist.destroy_process_group()
print(json.dumps([torch.equal(found, before), served.rules["linear.call"], len(served.fallbacks)]))
"""


def test_fsdp_puts_plain_tensors_on_the_layers() -> None:
    """They are computed with like parameters: the bits do not change as a model is wrapped."""
    assert processes.python_json(FSDP, is_forked=True) == [True, 15, 0]


@pytest.mark.parametrize("is_bound_before", [False, True])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_property_that_the_class_is_given_counts(name: str, is_bound_before: bool) -> None:
    plain, served, ids = _pair(is_bound_before)

    def made(self: nn.Module) -> torch.Tensor:
        found = self._parameters["weight"]
        return found * 0.5 if name == "weight" else found[:, 0]

    with _class_attribute(nn.Linear, name, property(made)):
        expected, found = _logits(plain, ids), _logits(served, ids)
    assert numbers.relative(found, expected) <= TOLERANCE
    assert numbers.relative(_logits(served, ids), _logits(plain, ids)) <= TOLERANCE


def test_how_a_class_finds_attributes_counts() -> None:
    plain, served, ids = _pair(True)

    def find(self: nn.Module, name: str) -> object:
        found = object.__getattribute__(self, name)
        return {**found, "weight": nn.Parameter(found["weight"] * 2)} if name == "_parameters" else found

    with _class_attribute(nn.Linear, "__getattribute__", find):
        expected, found = _logits(plain, ids), _logits(served, ids)
    assert numbers.relative(found, expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "nemotron"])
def test_a_norm_without_its_weight_raises_what_the_original_raises(family: str) -> None:
    served = tiny_models.build(family)
    plain = copy.deepcopy(served)
    for model in (plain, served):
        model.model.norm.weight = None
    liteboost_adaptor.apply(served)
    liteboost_adaptor.undo(plain)
    ids = tiny_models.example_inputs(served)["input_ids"]
    with pytest.raises(Exception) as theirs:
        _logits(plain, ids)
    with pytest.raises(type(theirs.value)) as ours:
        _logits(served, ids)
    assert str(ours.value) == str(theirs.value)


def _pair(is_bound_before: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A model that is left alone and a copy that is served, or will be at its first call."""
    plain = tiny_models.build("llama")
    served = copy.deepcopy(plain)
    liteboost_adaptor.undo(plain)
    ids = tiny_models.example_inputs(plain)["input_ids"]
    if is_bound_before:
        liteboost_adaptor.apply(served)
        _logits(served, ids)
    return plain, served, ids


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@contextmanager
def _class_attribute(owner: type, name: str, value: object) -> Iterator[None]:
    """``owner`` has an attribute of its own for a while."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
