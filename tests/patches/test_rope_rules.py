"""Rotary functions of every form: each against its original, look-alikes refused, whole models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models
from support.rotary_forms import (
    FORMS,
    arguments_of,
    calling,
    check_served,
    holder,
    outcome,
    results,
    source_of,
)

import liteboost_adaptor

pytestmark = pytest.mark.usefixtures("no_grad")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = "norm.*,mlp.*,attention.*,latent_attention.*,linear.*,experts.*,cache.*,causal_conv.*,delta_rule.*"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_served_as_the_original_computes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form = FORMS[name]
    module = holder(form, tmp_path)
    for table_dtype in {dtype, torch.float32} if form.keeps else {dtype}:
        check_served(module, form, *arguments_of(form, dtype, table_dtype))


#: Forms that take ``unsqueeze_dim``.
WIDENED = [name for name, form in FORMS.items() if form.shape == "BHSD" and "freqs" not in form.arguments]


@pytest.mark.parametrize("name", WIDENED)
def test_positions_before_the_heads(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    given = arguments_of(form, torch.bfloat16, torch.bfloat16, "BSHD")
    check_served(holder(form, tmp_path), form, *given, unsqueeze_dim=2)


@pytest.mark.parametrize("name", FORMS)
def test_what_the_op_does_not_do_takes_the_original(name: str, tmp_path: Path) -> None:
    """Broadcast tables, rounded tables, other dtypes: the same bits or the same error, and the reason."""
    form = FORMS[name]
    module = holder(form, tmp_path)
    given = arguments_of(form, torch.bfloat16, torch.bfloat16)
    tables = [i for i, part in enumerate(form.arguments.split()) if part in ("cos", "sin", "freqs")]

    def changed(change: Callable[[torch.Tensor], torch.Tensor], *places: int) -> tuple[Any, ...]:
        return tuple(change(a) if i in places else a for i, a in enumerate(given))

    cases = [
        changed(lambda t: t[..., :1, :], *tables),  # one row for every position
        changed(lambda t: t.unsqueeze(0), *tables),
        changed(lambda t: t[..., :-2], *tables) if "partial" not in form.rule and form.width > 12 else (),
        changed(lambda t: t[..., :-1], *tables) if form.rule != "interleaved_last" else (),
        changed(lambda t: t.double(), 0),
        changed(lambda t: t.to(torch.complex128) if t.is_complex() else t.double(), *tables),
    ]
    if not form.keeps:
        cases.append(changed(lambda t: t.float(), *tables))
    for case in filter(None, cases):
        expected = outcome(module, case)
        liteboost_adaptor.apply(module)
        with calls.served() as served:
            found = outcome(module, case)
        liteboost_adaptor.undo()
        assert served.rules == {} and sum(served.fallbacks.values()) == 1
        assert all(len(why) > 8 for _, why in served.fallbacks)
        assert type(found) is type(expected)
        if isinstance(expected, Exception):
            assert str(found) == str(expected)
        else:
            assert all(map(torch.equal, results(found), results(expected)))


COMPILED = (
    "Llama",
    "Qwen4, no keys",
    "NanoChat",
    "Qwen2-VL",
    "GLM",
    "DeepSeek V2",
    "DeepSeek V3",
    "DeepSeek V4",
)


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compile_sees_one_graph_with_our_op_in_it(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    module = holder(form, tmp_path)
    given = arguments_of(form, torch.float32, torch.float32)
    expected = results(module(*given))
    liteboost_adaptor.apply(module)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        found = results(torch.compile(module, fullgraph=True, backend=backend)(*given))
    assert targets.count("liteboost.rope") == 1
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


def test_a_conjugate_view_of_a_complex_table(tmp_path: Path) -> None:
    form = FORMS["Llama 4"]
    q, k, freqs = arguments_of(form, torch.float32, torch.float32)
    check_served(holder(form, tmp_path), form, q, k, freqs.conj())


def test_arguments_by_name_and_wrong_ones(tmp_path: Path) -> None:
    form = FORMS["Qwen4"]
    q, k, cos, sin = arguments_of(form, torch.float32, torch.float32)
    module = holder(form, tmp_path)
    check_served(module, form, q, cos=cos, sin=sin)
    check_served(module, form, cos=cos, sin=sin, k=k, q=q, unsqueeze_dim=1)
    liteboost_adaptor.apply(module)
    for wrong in ({"cos": cos, "sine": sin}, {"q": q, "cos": cos, "sin": sin}, {"cos": cos}):
        with calls.served() as served, pytest.raises((TypeError, AttributeError)):
            module(q, k, **wrong)
        assert served.rules == {} and sum(served.fallbacks.values()) == 1
    with pytest.raises(TypeError):
        module(q, k, cos, sin, 1, 2)


def test_a_known_body_with_other_parameter_names_and_defaults(tmp_path: Path) -> None:
    """What is where is told by position: the last parameter is ``unsqueeze_dim`` under any name."""
    text = source_of("gemma4", "rotate_half", "apply_rotary_pos_emb")
    text = re.sub(r"\bunsqueeze_dim: int = 1", "axis: int = 2", text).replace("unsqueeze_dim", "axis")
    text = re.sub(r"\bx\b(?=[:,)\s.\[]|$)", "states", text)
    module = calling("apply_rotary_pos_emb", text, tmp_path)
    form = FORMS["Gemma 4"]
    q, cos, sin = arguments_of(form, torch.bfloat16, torch.bfloat16, "BSHD")
    check_served(module, form, q, cos, sin)
    check_served(module, form, states=q, cos=cos, sin=sin, axis=2)


def test_a_parameter_of_unknown_use_must_be_left_alone(tmp_path: Path) -> None:
    changes = (
        ("cos, sin, unsqueeze_dim=1", "cos, sin, scale=1, unsqueeze_dim=1"),
        (planted.ROPE_Q, "q_embed = ((q * scale) * cos) + (rotate_half(q * scale) * sin)"),
    )
    text = source_of("llama", "rotate_half", "apply_rotary_pos_emb")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    module = calling("apply_rotary_pos_emb", text, tmp_path)
    given = arguments_of(FORMS["Llama"], torch.float32, torch.float32)
    expected = module(*given, scale=3)
    liteboost_adaptor.apply(module)
    with calls.served() as served:
        assert torch.equal(module(*given, scale=3)[0], expected[0])
    assert served.rules == {}


def test_the_other_sign_is_served_by_its_own_rule(tmp_path: Path) -> None:
    """Llama's text with NanoChat's rotate_half: Llama's rule may not take it."""
    model = planted.llama(tmp_path, (planted.ROTATE_HALF, "return torch.cat((x2, -x1), dim=-1)"))
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        found = model(**inputs).logits
    assert {row.id for row in state.rows("rope")["applied"]} == {"rope.half_reverse"}
    assert numbers.relative(found, expected) <= 2e-5


#: Families whose rotation no other family's tests reach -> rules that serve them.
FAMILIES = {
    "blt": {"interleaved_plain"},
    "codegen": {"interleaved_one"},
    "deepseek_v2": {"complex"},
    "deepseek_v3": {"deinterleave"},
    "deepseek_v32": {"deinterleave", "half"},
    "deepseek_v4": {"interleaved_last"},
    "dots3_note_text": {"deinterleave"},
    "ernie4_5": {"interleaved_first_fp32"},
    "gemma3n_text": {"half_one"},
    "gemma4_text": {"half_one"},
    "glm": {"interleaved_first_partial"},
    "gptj": {"interleaved_one"},
    "helium": {"interleaved_first"},
    "llama4_text": {"complex_positions_first"},
    "modernbert-decoder": {"half_fp32"},
    "nanochat": {"half_reverse"},
    "qwen4_exp_text": {"half_partial_alone"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_the_truth_as_the_original(family: str) -> None:
    """Distance of our logits to fp32's, over seeds, at most 1.5 times that of the original's."""
    distances = {"original": 0.0, "ours": 0.0}
    for seed in (0, 1, 2):
        model = numbers.cast(tiny_models.build(family, seed), torch.bfloat16)
        inputs = tiny_models.example_inputs(model, seed=seed)
        truth = tiny_models.build(family, seed)
        truth.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
        with torch.no_grad():
            exact = truth(**inputs).logits.double()
            for who in distances:
                if who == "ours":
                    liteboost_adaptor.apply(model, disable=OTHERS)
                with calls.served() as served:
                    found = model(**inputs).logits.double()
                distances[who] += ((found - exact).norm() / exact.norm()).item()
                liteboost_adaptor.undo()
        # Of the last run, ours.
        assert served.rules.keys() == {f"rope.{rule}" for rule in FAMILIES[family]}
    assert distances["ours"] <= max(1.5 * distances["original"], 3 * numbers.ULP[torch.bfloat16]), distances
