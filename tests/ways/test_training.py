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
    assert runs.reasons == {"grad mode"}


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


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    targets = sorted(
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
