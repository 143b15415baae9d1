"""Training: gradients, checkpointing, steps, adapters, and changes between inference and training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from support import calls, numbers, tiny_models
from support.ways import FAMILIES, compare, families, leaves
from torch import nn

import liteboost_adaptor


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Gradients of embeddings and experts are sums in the order of the work: fix it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**numbers.padded_inputs(model)).logits


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    inputs = numbers.padded_inputs(model)
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def steps(model: nn.Module, count: int = 2) -> list[torch.Tensor]:
    """The parameters after some steps of an optimiser; the model is as it was before afterwards."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(count):
        gradients(model)
        optimiser.step()
    found = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(before)
    return found


def assert_equal(found: Any, expected: Any) -> None:
    assert len(leaves(found)) == len(leaves(expected)) > 0
    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


@families(*FAMILIES)
def test_training_steps(family: str, level: int) -> None:
    model = tiny_models.build(family).train()
    runs = compare(model, level, lambda: [gradients(model), steps(model)])
    assert_equal(runs.found, runs.expected)
    assert runs.reasons == {"grad mode"} and runs.served.rules == {}


@pytest.mark.parametrize("uses_reentrant", [False, True], ids=["not reentrant", "reentrant"])
@families("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "gpt_oss", "deepseek_v3")
def test_gradient_checkpointing(family: str, uses_reentrant: bool, level: int) -> None:
    model = tiny_models.build(family).train()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": uses_reentrant})
    runs = compare(model, level, lambda: gradients(model))
    if uses_reentrant:  # the first run of a layer is without gradients and is served
        runs.assert_close(1e-4)
        assert runs.served.kinds["norm"] > 0
    else:
        assert_equal(runs.found, runs.expected)
        assert runs.served.rules == {}
    assert all(numbers.relative(runs.found[name], plain[name]) <= 1e-4 for name in plain)


@pytest.mark.parametrize("uses_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_that_is_enabled_later(uses_reentrant: bool) -> None:
    model = tiny_models.build("llama").train()
    expected = gradients(model)
    liteboost_adaptor.apply(model)
    model.gradient_checkpointing_enable({"use_reentrant": uses_reentrant})
    seen: list[int] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    found = gradients(model)
    handle.remove()
    assert len(seen) == 2, "the layer was not run again in the backward pass"
    if uses_reentrant:
        assert all(numbers.relative(found[name], expected[name]) <= 1e-4 for name in expected)
    else:
        assert_equal(found, expected)


def test_inputs_with_gradients_and_frozen_parameters() -> None:
    model = tiny_models.build("llama").requires_grad_(False)
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
    expected = gradients(model)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        assert_equal(gradients(model), expected)
    assert served.rules == {} and served.fallbacks


def test_freezing_changes_no_bit_in_grad_mode() -> None:
    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    expected = model(**inputs).logits
    model.requires_grad_(False)
    with calls.served() as served:
        assert torch.equal(model(**inputs).logits, expected)
    assert served.rules == {} and {why for _, why in served.fallbacks} == {"grad mode"}


def test_an_optimiser_step_changes_what_is_served() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    before = logits(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(model)
    optimiser.step()
    after = logits(model)
    liteboost_adaptor.undo()
    assert numbers.relative(after, logits(model)) <= 2e-5
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_originals_dtypes_and_numbers(dtype: torch.dtype) -> None:
    model = tiny_models.build("llama")
    inputs = numbers.padded_inputs(model)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return logits(model)

    exact = numbers.exact(model, "llama", inputs).logits
    real = inputs["attention_mask"].bool()
    expected = run()
    liteboost_adaptor.apply(model)
    found = run()
    assert found.dtype == expected.dtype
    own = (expected.double() - exact)[real].norm()
    assert (found.double() - exact)[real].norm() <= 1.5 * own


@families(*FAMILIES)
def test_training_after_a_first_forward_in_inference_mode(family: str, level: int) -> None:
    reference, model = tiny_models.build(family), tiny_models.build(family)
    expected = gradients(reference)
    with torch.inference_mode():
        liteboost_adaptor.apply(model, level=level)
        with calls.served() as served:
            model(**numbers.padded_inputs(model))
    assert served.kinds["norm"] > 0
    assert_equal(gradients(model), expected)
    assert_equal(steps(model), steps(reference))


@families("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "gpt_oss", "deepseek_v3", "phi3")
def test_prefill_in_inference_mode_and_decoding_without_gradients(family: str, level: int) -> None:
    """Keys and values of the prefill are inference tensors, which autograd may not save."""
    model = tiny_models.build(family)
    ids = tiny_models.example_inputs(model)["input_ids"]

    def run() -> torch.Tensor:
        with torch.inference_mode():
            out = model(input_ids=ids[:, :8], use_cache=True)
        with torch.no_grad():
            out = model(input_ids=ids[:, 8:11], past_key_values=out.past_key_values, use_cache=True)
            return model(input_ids=ids[:, 11:], past_key_values=out.past_key_values, use_cache=True).logits

    runs = compare(model, level, run)
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0 and runs.reasons == set()


def lora(model: nn.Module, targets: list[str] | None = None) -> nn.Module:
    """``model`` with adapters of these layers, or of every linear layer but the head."""
    torch.manual_seed(7)
    targets = targets or sorted(
        {
            name.split(".")[-1]
            for name, part in model.named_modules()
            if type(part).__name__ in ("Linear", "Conv1D")
        }
        - {"lm_head", "embed_out"}
    )
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, adapter).eval()


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*")
@pytest.mark.parametrize("order", ["adapted before us", "adapted after us"])
@families("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "gpt_oss", "deepseek_v3", "phi3")
def test_lora(family: str, order: str, level: int) -> None:
    base = logits(tiny_models.build(family))
    reference = lora(tiny_models.build(family))
    expected, expected_gradients = logits(reference), gradients(reference)
    assert numbers.relative(base, expected) > 1e-2, "the adapter changes nothing"
    model = tiny_models.build(family)
    if order == "adapted after us":
        liteboost_adaptor.apply(model, level=level)
        logits(model)
    adapted = lora(model)
    if order == "adapted before us":
        liteboost_adaptor.apply(model, level=level)
    with calls.served() as served:
        assert numbers.relative(logits(adapted), expected) <= 2e-5
    assert served.kinds["attention"] > 0 and served.kinds["norm"] > 0
    found = gradients(adapted)
    assert found.keys() == expected_gradients.keys()
    # What lies below the first adapter wants no gradient and is served.
    assert all(numbers.relative(found[name], expected_gradients[name]) <= 1e-4 for name in found)
    with adapted.disable_adapter():
        assert numbers.relative(logits(adapted), base) <= 2e-5
    merged = adapted.merge_and_unload()
    with calls.served() as served:
        assert numbers.relative(logits(merged), expected) <= 2e-5
    assert served.kinds["norm"] > 0
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(merged), logits(reference.merge_and_unload()))


@pytest.mark.parametrize("order", ["adapted before us", "adapted after us", "the whole is served"])
def test_lora_of_the_head(order: str) -> None:
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    reference = lora(tiny_models.build("llama"), targets)
    expected, expected_gradients = logits(reference), gradients(reference)
    model = tiny_models.build("llama")
    assert numbers.relative(logits(model), expected) > 1e-2, "the adapter changes nothing"
    if order == "adapted after us":
        liteboost_adaptor.apply(model)
    adapted = lora(model, targets)
    if order != "adapted after us":
        liteboost_adaptor.apply(model if order == "adapted before us" else adapted)
    with calls.served() as served:
        assert numbers.relative(logits(adapted), expected) <= 2e-5
    assert served.kinds["attention"] == 2 and served.kinds["rope"] == 2
    found = gradients(adapted)
    assert found.keys() == expected_gradients.keys()
    assert all(numbers.relative(found[name], expected_gradients[name]) <= 1e-4 for name in found)
    assert all(gradient.abs().sum() > 0 for name, gradient in found.items() if "lora" in name)
    merged = adapted.merge_and_unload()
    with calls.served() as served:
        assert numbers.relative(logits(merged), expected) <= 2e-5
    # Layers that were adapters when we came are called as they are; those that became so are served again.
    assert served.kinds["linear"] == (15 if order == "adapted after us" else 8)


@families("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "phi3")
def test_an_adapted_model_that_was_never_called_is_served_whole(family: str, level: int) -> None:
    """PEFT calls the forward of the model it adapts, and never the model: its head is served all the same."""
    reference = lora(tiny_models.build(family))
    expected = logits(reference)
    whole = tiny_models.build(family)
    liteboost_adaptor.apply(whole, level=level)
    adapted_whole = lora(whole)
    liteboost_adaptor.apply(whole, level=level)
    with calls.served() as wanted:
        logits(adapted_whole)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=level)
    adapted = lora(tiny_models.build(family))
    with calls.served() as served:
        assert numbers.relative(logits(adapted), expected) <= 2e-5
    assert served.rules == wanted.rules
    liteboost_adaptor.undo(adapted.get_base_model())
    with calls.served() as served:
        assert torch.equal(logits(adapted), expected)
    assert served.rules == {}
    liteboost_adaptor.undo()
    assert "__call__" not in vars(peft.PeftModel)
