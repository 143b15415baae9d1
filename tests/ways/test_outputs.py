"""What is asked of a forward call besides logits, and attention implementations chosen by name."""

from __future__ import annotations

from typing import Any

import torch
from support import calls, numbers, tiny_models
from support.ways import FAMILIES, compare, families

import liteboost_adaptor

#: Families whose unasked attention is sdpa, which cannot return weights, and that have an eager one.
SDPA = ("llama", "gpt2", "qwen3", "mixtral", "gpt_neox", "phi3", "deepseek_v3", "gemma3_text")


@torch.no_grad()
def forward(model: torch.nn.Module, **settings: Any) -> Any:
    return model(**numbers.padded_inputs(model), **settings)


@families(*FAMILIES, "qwen3")
def test_output_hidden_states(family: str, level: int) -> None:
    model = tiny_models.build(family)
    runs = compare(model, level, lambda: forward(model, output_hidden_states=True).hidden_states)
    assert len(runs.expected) == model.config.num_hidden_layers + 1
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0


@families(*SDPA)
def test_output_attentions_of_a_model_loaded_as_eager(family: str, level: int) -> None:
    """Eager was asked for by name and stays; everything beside the attention core is served."""
    model = tiny_models.build(family, attn_implementation="eager")
    runs = compare(model, level, lambda: forward(model, output_attentions=True).attentions)
    assert len(runs.expected) == model.config.num_hidden_layers
    runs.assert_close()
    assert runs.served.kinds["attention"] == 0 and runs.served.kinds["norm"] > 0


@families("gemma2", "gpt_oss")
def test_output_attentions_where_eager_is_the_default(family: str, level: int) -> None:
    """Weights are wanted: the original attention runs, and the reason is counted."""
    model = tiny_models.build(family)
    runs = compare(model, level, lambda: forward(model, output_attentions=True).attentions)
    assert len(runs.expected) == model.config.num_hidden_layers
    runs.assert_close()
    assert runs.served.kinds["attention"] == 0 and runs.reasons == {"attention weights wanted"}


@families(*SDPA)
def test_output_attentions_of_sdpa_are_empty_as_they_were(family: str, level: int) -> None:
    model = tiny_models.build(family)

    def run() -> torch.Tensor:
        out = forward(model, output_attentions=True)
        assert not out.attentions or all(weights is None for weights in out.attentions)
        return out.logits

    runs = compare(model, level, run)
    runs.assert_close()
    assert runs.served.kinds["attention"] > 0


@families(*SDPA)
def test_set_attn_implementation(family: str, level: int) -> None:
    """To eager and back while the model is served: eager runs where it is asked for, ours where sdpa is."""
    model = tiny_models.build(family)

    def run(implementation: str) -> tuple[torch.Tensor, calls.Served]:
        model.set_attn_implementation(implementation)
        with calls.served() as served:
            return forward(model).logits, served

    names = ("sdpa", "eager", "sdpa")
    expected = [run(name)[0] for name in names]
    liteboost_adaptor.apply(model, level=level)
    found = [run(name) for name in names]
    for (ours, _), original in zip(found, expected, strict=True):
        assert numbers.relative(ours, original) <= 2e-5
    layers = model.config.num_hidden_layers
    assert [served.kinds["attention"] for _, served in found] == [layers, 0, layers]
    liteboost_adaptor.undo(model)
    assert all(torch.equal(run(name)[0], original) for name, original in zip(names, expected, strict=True))


def test_sdpa_asked_for_after_eager_at_loading() -> None:
    model = tiny_models.build("llama", attn_implementation="eager")
    liteboost_adaptor.apply(model)
    model.set_attn_implementation("sdpa")
    with calls.served() as served:
        forward(model)
    assert served.kinds["attention"] == 2


@families("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "olmoe")
def test_output_router_logits(family: str, level: int) -> None:
    model = tiny_models.build(family)
    runs = compare(model, level, lambda: forward(model, output_router_logits=True).router_logits)
    assert len(runs.expected) > 0
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0
