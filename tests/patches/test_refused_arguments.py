"""Arguments that do not fit: what is raised is also of the type that the original raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor.errors import LiteBoostError, of_both_types

Case = Callable[[nn.Module], Any]


def _attention(
    model: nn.Module, hidden: torch.Tensor, mask: torch.Tensor | None = None, length: int = 5
) -> Any:
    tables = model.model.rotary_emb(hidden, torch.arange(length).unsqueeze(0))
    return model.model.layers[0].self_attn(hidden, position_embeddings=tables, attention_mask=mask)


def _states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _split_heads(model: nn.Module) -> Any:
    model.model.layers[0].self_attn.head_dim = 24
    return _attention(model, _states(2, 5, 64))


def _other_weight(model: nn.Module) -> Any:
    model.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.randn(64, 99))
    return model.model.layers[0](_states(2, 5, 64), position_embeddings=_tables(model))


def _tables(model: nn.Module) -> Any:
    return model.model.rotary_emb(_states(2, 5, 64), torch.arange(5).unsqueeze(0))


def _bias_of_another_size(model: nn.Module) -> Any:
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.randn(7))
    return model.model.layers[0].mlp(_states(2, 5, 64))


CASES: dict[str, Case] = {
    "rows of another size for an MLP": lambda model: model.model.layers[0].mlp(_states(2, 5, 63)),
    "rows of another size for attention": lambda model: _attention(model, _states(2, 5, 63)),
    "rows of another size for a norm": lambda model: model.model.norm(_states(2, 5, 63)),
    "rows of another size for the model": lambda model: model(inputs_embeds=_states(2, 5, 63)),
    "another dtype for an MLP": lambda model: model.model.layers[0].mlp(
        _states(2, 5, 64, dtype=torch.float16)
    ),
    "float64": lambda model: model(inputs_embeds=_states(2, 5, 64, dtype=torch.float64)),
    "integers": lambda model: model.model.layers[0].mlp(torch.ones(2, 5, 64, dtype=torch.int64)),
    "no tensor": lambda model: model.model.layers[0].mlp([1.0] * 64),
    "no tensor for a norm": lambda model: model.model.norm(None),
    "a mask for other keys": lambda model: _attention(
        model, _states(2, 5, 64), torch.ones(2, 1, 5, 7).bool()
    ),
    "a mask of another batch": lambda model: _attention(
        model, _states(2, 5, 64), torch.ones(3, 1, 5, 5).bool()
    ),
    "a mask of integers": lambda model: _attention(model, _states(2, 5, 64), torch.ones(2, 1, 5, 5).long()),
    "tables of another length": lambda model: _attention(model, _states(2, 5, 64), length=9),
    "heads that do not divide": _split_heads,
    "a weight of another shape": _other_weight,
    "a bias of another size": _bias_of_another_size,
    "a token that is not in the vocabulary": lambda model: model(input_ids=torch.tensor([[10**6]])),
}


def raised(case: Case, model: nn.Module) -> BaseException | None:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            case(model)
    except Exception as fault:  # noqa: BLE001 - compared
        return fault
    return None


@pytest.mark.parametrize("case", CASES)
def test_what_is_raised_is_of_the_originals_type(case: str) -> None:
    theirs = raised(CASES[case], tiny_models.build("llama"))
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    ours = raised(CASES[case], model)
    assert (ours is None) == (theirs is None), f"{ours!r} in place of {theirs!r}"
    assert theirs is None or isinstance(ours, type(theirs)), f"{ours!r} in place of {theirs!r}"


def test_an_error_of_an_op_is_of_both_types_and_says_both() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    fault = raised(CASES["rows of another size for an MLP"], model)
    assert (
        isinstance(fault, RuntimeError)
        and isinstance(fault, ValueError)
        and isinstance(fault, LiteBoostError)
    )
    assert "mat1 and mat2" in str(fault) and "liteboost::" in str(fault)


@pytest.mark.parametrize(
    "theirs", [RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError]
)
def test_both_types_of_any_builtin_error(theirs: type[Exception]) -> None:
    for ours in (ValueError, TypeError, IndexError):
        fault = of_both_types(ours("liteboost::linear: x"), theirs("y"))
        assert isinstance(fault, ours) and isinstance(fault, theirs) and isinstance(fault, LiteBoostError)


def test_an_error_of_another_type_is_the_originals_own() -> None:
    theirs = torch.OutOfMemoryError("y")
    assert of_both_types(ValueError("liteboost::linear: x"), theirs) is theirs
