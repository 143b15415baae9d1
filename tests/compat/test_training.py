"""Gradients, adapters and autocast: training runs the original code, and says so in the counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor

FAMILIES = ("llama", "gemma2", "gpt_oss")


def gradients(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal within fp32 rounding, for where some calls want no gradient and are served."""
    assert found.keys() == expected.keys() and expected
    for name in expected:
        assert numbers.relative(found[name], expected[name]) <= 1e-4, name


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


@pytest.mark.parametrize("is_training", [True, False], ids=["train()", "eval()"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_gives_the_very_gradients_of_the_original(family: str, is_training: bool) -> None:
    model = tiny_models.build(family).train(is_training)
    inputs = numbers.padded_inputs(model)
    expected = gradients(model, inputs)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = gradients(model, inputs)
    assert_equal(found, expected)
    assert {why for _, why in served.fallbacks} == {"grad mode"}
    # Rotary tables and masks need no gradient, but everything that carries hidden states does.
    assert served.rules == {}


@pytest.mark.parametrize("uses_reentrant", [False, True])
@pytest.mark.parametrize("order", ["before us", "after us"])
def test_gradient_checkpointing(order: str, uses_reentrant: bool) -> None:
    model = tiny_models.build("llama").train()
    inputs = tiny_models.example_inputs(model)
    expected = gradients(model, inputs)
    layer = type(model.model.layers[0])
    if order == "after us":
        liteboost_adaptor.apply(model)
    model.gradient_checkpointing_enable({"use_reentrant": uses_reentrant})
    if order == "before us":
        liteboost_adaptor.apply(model)
    assert isinstance(model.model.layers[0], layer)
    seen: list[int] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    found = gradients(model, inputs)
    handle.remove()
    assert len(seen) == 2, "the layer was not run again in the backward pass"
    # The reentrant kind runs the layer without gradients first: that run is served.
    (assert_close if uses_reentrant else assert_equal)(found, expected)


def test_frozen_parameters_and_inputs_with_gradients() -> None:
    model = tiny_models.build("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    embeds = model.model.embed_tokens(tiny_models.example_inputs(model)["input_ids"])

    def run() -> torch.Tensor:
        leaf = embeds.clone().requires_grad_()
        model(inputs_embeds=leaf, use_cache=False).logits.square().mean().backward()
        return leaf.grad

    expected = run()
    liteboost_adaptor.apply(model)
    assert torch.equal(run(), expected)


def test_only_one_weight_wants_gradients() -> None:
    """Nothing is served in grad mode, also below that weight: the gradient is the original's to the bit."""
    model = tiny_models.build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp.up_proj" in name)
    inputs = tiny_models.example_inputs(model)
    expected = gradients(model, inputs)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = gradients(model, inputs)
    assert served.rules == {} and served.fallbacks
    assert_equal(found, expected)


def test_freezing_changes_no_bit_in_grad_mode() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    expected = model(**inputs).logits
    model.requires_grad_(False)
    with calls.served() as served:
        found = model(**inputs).logits
    assert torch.equal(found, expected)
    assert served.rules == {} and {why for _, why in served.fallbacks} == {"grad mode"}


def test_an_optimiser_step_changes_what_is_served() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    with torch.no_grad():
        before = model(**inputs).logits
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model, inputs)
    optimiser.step()
    with torch.no_grad():
        after = model(**inputs).logits
        liteboost_adaptor.undo()
        assert numbers.relative(after, model(**inputs).logits) <= 2e-5
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_originals_dtypes_and_numbers(dtype: torch.dtype) -> None:
    model = tiny_models.build("llama")
    inputs = numbers.padded_inputs(model)

    def run() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            return model(**inputs).logits

    exact = numbers.exact(model, "llama", inputs).logits
    real = inputs["attention_mask"].bool()
    expected = run()
    liteboost_adaptor.apply(model)
    found = run()
    assert found.dtype == expected.dtype
    own = (expected.double() - exact)[real].norm()
    assert (found.double() - exact)[real].norm() <= 1.5 * own


def test_inference_mode_and_back() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    expected = gradients(model, inputs)
    with torch.no_grad():
        logits = model(**inputs).logits
    with torch.inference_mode():
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, logits) <= 2e-5
    assert_equal(gradients(model, inputs), expected)


def lora(model: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    adapter = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj", "lm_head"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, adapter)


@pytest.mark.parametrize("order", ["before us", "after us", "on the whole"])
def test_lora_gives_the_originals_outputs_and_gradients(order: str) -> None:
    reference = lora(tiny_models.build("llama")).eval()
    inputs = tiny_models.example_inputs(reference.base_model.model)
    with torch.no_grad():
        base = tiny_models.build("llama")(**inputs).logits
        expected = reference(**inputs).logits
    assert numbers.relative(base, expected) > 1e-2, "the adapter changes nothing"
    model = tiny_models.build("llama")
    if order == "after us":
        liteboost_adaptor.apply(model)
    adapted = lora(model).eval()
    if order == "before us":
        liteboost_adaptor.apply(model)
    elif order == "on the whole":
        liteboost_adaptor.apply(adapted)
    with torch.no_grad(), calls.served() as served:
        found = adapted(**inputs).logits
    assert numbers.relative(found, expected) <= 2e-5
    assert served.kinds["attention"] == 2 and served.kinds["rope"] == 2
    # What lies below the first adapter wants no gradient and is served.
    assert_close(gradients(adapted, inputs), gradients(reference, inputs))
    assert all(g.abs().sum() > 0 for name, g in gradients(adapted, inputs).items() if "lora" in name)
    merged = adapted.merge_and_unload()
    with torch.no_grad(), calls.served() as served:
        assert numbers.relative(merged(**inputs).logits, expected) <= 2e-5
    # Layers that were adapters when we came are called as they are; those that became so are served again.
    assert served.kinds["linear"] == (15 if order == "after us" else 8)


def test_disabling_and_switching_adapters() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        base = model(**inputs).logits
        liteboost_adaptor.apply(model)
        adapted = lora(model).eval()
        changed = adapted(**inputs).logits
        with adapted.disable_adapter():
            assert numbers.relative(adapted(**inputs).logits, base) <= 2e-5
        assert torch.equal(adapted(**inputs).logits, changed)
