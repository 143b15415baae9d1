"""What is served under autocast: the products that it casts, in its dtype, and what its mixed dtypes meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    liteboost_adaptor.undo()


def forward(model: torch.nn.Module, dtype: torch.dtype = BF16, **inputs: Any) -> Any:
    with torch.autocast("cpu", dtype):
        return model(**(inputs or numbers.padded_inputs(model)))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("of_model", [FP32, BF16], ids=str)
def test_a_model_is_served_as_without_autocast(dtype: torch.dtype, of_model: torch.dtype) -> None:
    model = tiny_models.build("llama").to(of_model)
    expected = forward(model, dtype).logits
    liteboost_adaptor.apply(model, level=1)
    with calls.served() as plain:
        model(**numbers.padded_inputs(model))
    with calls.served() as served:
        found = forward(model, dtype).logits
    assert found.dtype == expected.dtype == dtype
    assert numbers.relative(found.float(), expected.float()) <= 3e-2
    if of_model in (FP32, dtype):
        assert +served.rules == +plain.rules
    # Else products in fp16 meet states in bfloat16: their sum is in fp32, and not ours.
    assert served.rules["linear.call"] == plain.rules["linear.call"] and served.rules["attention.sdpa"]


def test_each_weight_has_one_cast_in_a_block() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=1)
    weight = model.model.layers[0].self_attn.q_proj.weight
    first = forward(model).logits
    with torch.autocast("cpu", BF16):
        model(**numbers.padded_inputs(model))
        weight.mul_(3)  # torch's cache keeps what it has cast, whoever asks
        stale = model(**numbers.padded_inputs(model)).logits
        liteboost_adaptor.undo()
        theirs = model(**numbers.padded_inputs(model)).logits
    assert torch.equal(stale, first)
    assert numbers.relative(theirs.float(), stale.float()) <= 3e-2
    assert numbers.relative(forward(model).logits.float(), stale.float()) > 3e-2


@pytest.mark.parametrize(
    "dtype, reason", [(torch.float64, "dtype float64"), (torch.int64, "dtype int64")], ids=["fp64", "int64"]
)
def test_what_autocast_does_not_cast_is_handed_back(dtype: torch.dtype, reason: str) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=1)
    mlp = model.model.layers[0].mlp
    with torch.autocast("cpu", BF16), calls.served() as served, pytest.raises(RuntimeError):
        mlp(torch.ones(2, 5, model.config.hidden_size, dtype=dtype))
    assert served.rules["linear.call"] == 0 and {why for _, why in served.fallbacks} >= {reason}


def test_a_mask_of_numbers_is_handed_back() -> None:
    """Autocast rounds it: what hides a key in fp32 is infinite in bfloat16."""
    model = tiny_models.build("llama")
    inputs = numbers.padded_inputs(model)
    length = inputs["input_ids"].shape[1]
    mask = torch.full((1, 1, length, length), torch.finfo(FP32).min).triu(1)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": mask}
    expected = forward(model, **inputs).logits
    liteboost_adaptor.apply(model, level=1)
    with calls.served() as served:
        found = forward(model, **inputs).logits
    assert served.fallbacks["attention.sdpa", "autocast"] == len(model.model.layers)
    assert numbers.relative(found.float(), expected.float()) <= 3e-2


def test_gradients_are_the_originals_behind_a_step_without() -> None:
    """In a block of their own, and in one."""
    model, twin = tiny_models.build("llama"), tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    for each in (model, twin):
        forward(each)
        with torch.enable_grad():
            forward(each).logits.float().sum().backward()
        with torch.autocast("cpu", BF16):
            each(**numbers.padded_inputs(each))
            with torch.enable_grad():
                each(**numbers.padded_inputs(each)).logits.float().sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)


def test_sums_and_rotations_of_mixed_dtypes_promote() -> None:
    """Bit for bit what the original computes of products in bf16 and states in fp32."""
    model = tiny_models.build("llama")
    attention, norm = model.model.layers[0].self_attn, model.model.layers[0].post_attention_layernorm
    heads = model.config.num_attention_heads
    x = torch.randn(2, 5, model.config.hidden_size)
    cos, sin = torch.randn(2, 2, 5, attention.head_dim).unbind()
    q = torch.randn(2, heads, 5, attention.head_dim).to(BF16)
    module = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
    expected = module.apply_rotary_pos_emb(q, q, cos, sin), norm(x + x.to(BF16))
    liteboost_adaptor.apply(model, level=1)
    with torch.autocast("cpu", BF16):
        found = module.apply_rotary_pos_emb(q, q, cos, sin), norm(x + x.to(BF16))
    assert found[0][0].dtype == FP32
    for ours, theirs in zip((*found[0], found[1]), (*expected[0], expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_who_replaces_concatenation_is_given_what_the_original_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values in bfloat16 behind those in fp32 that a cache keeps: it promotes them, or who stands for it."""
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=2)
    seen, original = [], torch.cat

    def noted(tensors: Any, dim: int = 0) -> torch.Tensor:
        seen.append({each.dtype for each in tensors})
        return original(tensors, dim=dim)

    ids = torch.tensor([[3, 4, 5]])
    with torch.autocast("cpu", BF16):
        cache = model(ids).past_key_values
        for layer in cache.layers:
            layer.values = layer.values.float()
        monkeypatch.setattr(torch, "cat", noted)
        model(ids[:, :1], past_key_values=cache)
    assert {FP32, BF16} in seen


def test_traces_keep_no_cast() -> None:
    """A compiled graph is given no operator that writes to autocast's cache."""
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=1)
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 5, model.config.hidden_size)
    graphs = []

    def noted(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    with torch.autocast("cpu", BF16):
        expected = mlp(x)
        found = torch.compile(mlp, backend=noted)(x)
    assert graphs and not any("_autocast_weight" in text for text in graphs)
    assert found.dtype == expected.dtype and numbers.relative(found.float(), expected.float()) <= 1e-2


def test_the_operator() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    cast = torch.ops.liteboost._autocast_weight
    with torch.autocast("cpu", BF16):
        assert torch.equal(cast(weight, BF16), weight.to(BF16))
        torch.library.opcheck(cast, (weight, BF16), test_utils="test_schema")
        with torch.no_grad():
            kept = cast(weight, BF16)
            other = torch.nn.Parameter(torch.randn(3, 4))
            torch.nn.functional.linear(torch.randn(2, 4), other)
        with torch.enable_grad():
            theirs = torch.nn.functional.linear(torch.randn(2, 4), other)
        assert kept.requires_grad == theirs.requires_grad, "whoever takes it out later may want its gradient"
        with pytest.raises(ValueError, match="already"):
            cast(weight, FP32)
