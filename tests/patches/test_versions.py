"""Traits of older transformers releases, planted into the installed one's code."""

from __future__ import annotations

import functools
import types
from pathlib import Path

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models

import liteboost_adaptor

SIGNATURE = "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):"
OLD_SIGNATURE = "def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):"
CALL = "apply_rotary_pos_emb(query_states, key_states, cos, sin)"

old_rotary = pytest.mark.skipif(
    OLD_SIGNATURE in planted.llama_text(), reason="this transformers has the old signature itself"
)


@old_rotary
@pytest.mark.parametrize(
    "call",
    [
        CALL,
        "apply_rotary_pos_emb(query_states, key_states, cos, sin, cos)",
        "apply_rotary_pos_emb(query_states, key_states, cos, sin, cos, 1)",
        "apply_rotary_pos_emb(query_states, key_states, cos, sin, position_ids=cos, unsqueeze_dim=1)",
    ],
)
def test_position_ids_that_no_rotary_function_reads_are_no_hindrance(tmp_path: Path, call: str) -> None:
    model = planted.llama(tmp_path, (SIGNATURE, OLD_SIGNATURE), (CALL, call))
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs).logits
    assert served.kinds["rope"] == model.config.num_hidden_layers and served.fallbacks == {}
    assert numbers.relative(found, expected) <= 2e-5


@old_rotary
def test_position_ids_that_are_read_are_refused(tmp_path: Path) -> None:
    model = planted.llama(
        tmp_path,
        (SIGNATURE, OLD_SIGNATURE),
        (
            planted.ROPE_COS,
            "cos = cos[torch.arange(cos.shape[0]) if position_ids is None else position_ids]\n"
            "    cos = cos.unsqueeze(unsqueeze_dim)",
        ),
    )
    liteboost_adaptor.apply(model)
    assert [row.id for row in state.rows("rope")["refused"]] == ["rope.*"]


def test_a_forward_left_on_the_instance_after_recording_is_no_hindrance() -> None:
    """transformers up to 5.1 wraps forward on instances to record outputs, then puts it back bound."""
    model = tiny_models.build("llama")
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    liteboost_adaptor.apply(model)
    assert "forward" not in vars(attention)
    assert "foreign" not in state.rows()
    attention.forward = attention.forward  # recorded while bound
    assert vars(attention)["forward"].__func__ is type(attention).forward
    liteboost_adaptor.undo(model)
    assert vars(attention)["forward"].__func__ is type(attention).forward
    liteboost_adaptor.apply(model)
    assert "forward" not in vars(attention)


def test_another_forward_on_the_instance_is_left() -> None:
    model = tiny_models.build("llama")
    attention, other = (layer.self_attn for layer in model.model.layers[:2])
    attention.forward = other.forward  # the same function, of another instance
    kept = vars(attention)["forward"]
    liteboost_adaptor.apply(model)
    assert vars(attention)["forward"] is kept
    assert {row.state for rows in state.rows().values() for row in rows} >= {"foreign"}


def test_a_wrapper_that_reads_attention_weights_gets_them() -> None:
    model = tiny_models.build("gpt_oss")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    attention = model.model.layers[0].self_attn
    seen: list[torch.Tensor | None] = []
    original = attention.forward

    @functools.wraps(original)
    def recording(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = original(*args, **kwargs)
        seen.append(output[1])
        return output

    attention.forward = recording
    with torch.no_grad():
        model(**inputs)
    assert seen[0] is not None and seen[0].ndim == 4
    attention.forward = original
    assert isinstance(original, types.MethodType)
    with torch.no_grad(), calls.served() as served:
        model(**inputs)
    assert served.kinds["attention"] == model.config.num_hidden_layers and served.fallbacks == {}


def test_a_number_in_place_of_a_norms_weight_is_handed_back() -> None:
    """Gemma 3n's norm without scale up to transformers 5.0, whose body is that of the one with a weight."""
    model = tiny_models.build("llama")
    norm, x = model.model.norm, torch.randn(2, 5, 64)
    del norm.weight
    norm.register_buffer("weight", torch.tensor(1.5))
    with torch.no_grad():
        expected = norm(x)
        liteboost_adaptor.apply(norm)
        with calls.served() as served:
            assert torch.equal(norm(x), expected)
    assert served.rules == {} and {why for _, why in served.fallbacks} == {
        "a weight of another shape than a row"
    }


#: As `use_experts_implementation` of 5.0 and 5.1 wraps a forward: later ones hold the registry in a closure.
OLD_WRAPPER = """
def wrapper(original_forward):
    @wraps(original_forward)
    def forward(self, *args, **kwargs):
        experts_forward = original_forward

        if self.config._experts_implementation != "eager":
            experts_forward = ALL_EXPERTS_FUNCTIONS[self.config._experts_implementation]

        return experts_forward(self, *args, **kwargs)

    return forward
"""


def test_experts_whose_decorator_names_the_registry_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    names = vars(moe).copy()
    exec(OLD_WRAPPER, names)
    monkeypatch.setattr(MixtralExperts, "forward", names["wrapper"](MixtralExperts.forward.__wrapped__))
    model = tiny_models.build("mixtral")
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs).logits
    assert served.kinds["experts"] == model.config.num_hidden_layers and served.fallbacks == {}
    assert numbers.relative(found, expected) <= 2e-5
