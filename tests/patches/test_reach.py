"""How far apply, undo and patched reach: parts of models, orphans, classes of users, hooks of others."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support import calls, numbers, tiny_models
from torch import nn

import liteboost_adaptor


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    """As a user meets it: switched on."""
    liteboost_adaptor.apply()
    yield
    liteboost_adaptor.undo()


def served(model: nn.Module) -> int:
    """Calls our ops serve in one forward of ``model``."""
    with torch.no_grad(), calls.served() as found:
        model(**tiny_models.example_inputs(model))
    return sum(found.rules.values())


def test_a_call_of_the_users_own_class_is_kept() -> None:
    from transformers import LlamaForCausalLM

    class Constant(LlamaForCausalLM):
        def __call__(self, *args, **kwargs):
            output = super().__call__(*args, **kwargs)
            output.logits = torch.full_like(output.logits, 42.0)
            return output

    model = Constant(tiny_models.tiny_config("llama")).eval()
    assert served(model) > 0
    with torch.no_grad():
        assert model(**tiny_models.example_inputs(model)).logits.mean() == 42


def test_level_0_for_one_model_holds() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=0)
    assert served(model) == 0
    liteboost_adaptor.apply(model)
    assert served(model) > 0
    with liteboost_adaptor.patched(model, level=0):
        assert served(model) == 0
    assert served(model) > 0


def test_a_part_of_a_model_can_be_undone() -> None:
    model = tiny_models.build("llama")
    whole = served(model)
    assert liteboost_adaptor.undo(model.model) == []
    assert 0 < served(model) < whole, "the head is still served, and only the head"
    liteboost_adaptor.apply(model.model)
    assert served(model) == whole


def test_a_backbone_whose_head_is_gone_can_be_undone() -> None:
    for undo_what in ("part", "everything"):
        liteboost_adaptor.apply()
        model = tiny_models.build("llama")
        liteboost_adaptor.apply(model)
        backbone = model.model
        del model
        gc.collect()
        assert liteboost_adaptor.undo(*([backbone] if undo_what == "part" else [])) == []
        assert {type(part).__mro__[0].__dict__.get("__liteboost__") for part in backbone.modules()} == {None}


def test_patched_returns_to_what_was_undone() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    liteboost_adaptor.undo(model)
    with liteboost_adaptor.patched(model):
        assert served(model) > 0
    assert served(model) == 0


def test_a_hook_of_accelerate_put_on_after_us_runs_the_original_after_undo() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    add_hook_to_module(model.model.norm, ModelHook())
    liteboost_adaptor.undo(model)
    assert served(model) == 0
    liteboost_adaptor.apply(model)
    add_hook_to_module(model.model.layers[0].input_layernorm, ModelHook())
    remove_hook_from_module(model.model.layers[0].input_layernorm)
    liteboost_adaptor.undo(model)
    assert served(model) == 0


def test_sparse_weights_take_the_original() -> None:
    model = tiny_models.build("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse_csr(), requires_grad=False)
    liteboost_adaptor.undo()
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5


def test_replicas_and_bare_instances_can_be_made() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    assert isinstance(model.model.norm._replicate_for_data_parallel(), type(model.model.norm).__bases__[0])
    assert isinstance(type(model).__new__(type(model)), nn.Module)


def test_symbolic_tracing_of_a_bound_part() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    x = torch.randn(2, 64)
    with torch.no_grad():
        graph = torch.fx.symbolic_trace(model.model.layers[0].mlp)
        torch.testing.assert_close(graph(x), model.model.layers[0].mlp(x))


def test_a_hook_that_reads_attention_weights_gets_them() -> None:
    model = tiny_models.build("gemma2")
    liteboost_adaptor.apply(model)
    seen: list[torch.Tensor | None] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    with torch.no_grad():
        model(**tiny_models.example_inputs(model))
    assert seen[0] is not None and seen[0].ndim == 4


def test_the_status_says_that_it_is_switched_off() -> None:
    liteboost_adaptor.undo()
    assert any("undo" in sentence for sentence in liteboost_adaptor.status().environment)
    liteboost_adaptor.apply()
    assert not any("undo" in sentence for sentence in liteboost_adaptor.status().environment)
