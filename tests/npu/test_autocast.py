"""Under autocast of a card: products are served in its dtype; what it computes in fp32 is the original's."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support import calls, numbers, tiny_models

import liteboost_adaptor

FAMILIES = ("bert", "gpt2", "gpt_neox", "llama", "phi")


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    with torch.no_grad():
        yield
    liteboost_adaptor.undo()


def hidden_states(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = tiny_models.example_inputs(model, batch=2, length=7)
    inputs = {name: value.npu() for name, value in inputs.items()}
    with torch.autocast("npu", dtype=dtype):
        result = model(**inputs, output_hidden_states=True)
    named = [getattr(result, name, None) for name in ("logits", "last_hidden_state")]
    return [*result.hidden_states, *(each for each in named if each is not None)]


@pytest.mark.parametrize("of_model", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_are_the_originals(family: str, of_model: torch.dtype) -> None:
    """A norm of states in bfloat16 gives fp32 there, and so does a power, as in GPT-2's activation."""
    model = tiny_models.build(family).to(of_model).npu()
    theirs = hidden_states(copy.deepcopy(model), torch.bfloat16)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        ours = hidden_states(model, torch.bfloat16)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert numbers.relative(mine.float().cpu(), other.float().cpu()) <= 3e-2
    if family in ("llama", "phi"):
        assert served.rules["linear.call"] > 0 and served.rules["attention.sdpa"] > 0


def test_weights_have_one_cast_in_a_block() -> None:
    """Torch's own: one that changes keeps it until the block ends, whoever multiplies by it."""
    model = tiny_models.build("llama").npu()
    liteboost_adaptor.apply(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.autocast("npu", dtype=torch.bfloat16):
        first = model(torch.tensor([[3, 4, 5]]).npu()).logits
        weight.mul_(-2.0)
        assert torch.equal(model(torch.tensor([[3, 4, 5]]).npu()).logits, first)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert not torch.equal(model(torch.tensor([[3, 4, 5]]).npu()).logits, first)
