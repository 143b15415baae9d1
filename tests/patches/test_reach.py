"""How far apply, undo and patched reach: parts of models, orphans, classes of users, hooks of others."""

from __future__ import annotations

import gc
import warnings
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


class Block(nn.Module):
    """A transformer as in diffusers: with `from_pretrained`, and no model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden_size": 32}
        self.norm, self.to_qkv = nn.LayerNorm(32, elementwise_affine=False), nn.Linear(32, 96)
        self.to_out = nn.ModuleList([nn.Linear(32, 32), nn.Dropout()])

    @classmethod
    def from_pretrained(cls) -> Block:
        return cls().eval()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = self.to_qkv(self.norm(hidden_states)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return hidden_states + self.to_out[1](self.to_out[0](mixed))


def left_alone_until_applied(model: nn.Module, **inputs: torch.Tensor) -> None:
    """Assert that ``model`` runs as without us, with no warning, and that `apply` serves it all the same."""
    classes, known = [type(part) for part in model.modules()], liteboost_adaptor.status().models
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with calls.served() as found:
            expected = model(**inputs)[0]
        assert not found.rules and not found.fallbacks
        assert [type(part) for part in model.modules()] == classes
        assert liteboost_adaptor.status().models == known
        liteboost_adaptor.apply(model)
        with calls.served() as found:
            assert numbers.relative(model(**inputs)[0], expected) <= 2e-5
        assert found.kinds.keys() == {"linear", "norm"} and not found.fallbacks


def test_a_model_of_another_library_is_left_alone_until_it_is_applied() -> None:
    left_alone_until_applied(Block.from_pretrained(), hidden_states=torch.randn(2, 5, 32))


@pytest.mark.full
def test_a_transformer_of_diffusers_is_left_alone_until_it_is_applied() -> None:
    diffusers = pytest.importorskip("diffusers", reason="make foreign installs it")
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    sizes |= {"patch_size": 1, "in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = diffusers.FluxTransformer2DModel(axes_dims_rope=[4, 4, 8], **sizes).eval()
    shapes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32), "pooled_projections": (1, 32)}
    shapes |= {"img_ids": (16, 3), "txt_ids": (8, 3), "timestep": (1,)}
    left_alone_until_applied(model, **{name: torch.randn(shape) for name, shape in shapes.items()})
