"""Activations and gated products of single families: on our op, and nothing left on the original."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import calls, numbers, tiny_models

import liteboost_adaptor
from liteboost_adaptor.config import Settings
from liteboost_adaptor.engine.bind import Binder
from liteboost_adaptor.huggingface.runtime import active_rules

#: Family -> rules that must serve it.
FAMILIES = {
    "bitnet": {"mlp.relu2"},
    "lfm2": {"mlp.silu_function"},
    "recurrent_gemma": {"mlp.gelu_tanh"},
    "qwen3_5_text": {"mlp.silu", "mlp.sigmoid_function"},
    "gpt2": {"mlp.gelu_tanh_module"},
    "nemotron": {"mlp.relu2_module"},
    "gemma3n_text": {"mlp.gelu_tanh"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_family_is_served(family: str, dtype: torch.dtype) -> None:
    model = numbers.cast(tiny_models.build(family), dtype)
    inputs = numbers.padded_inputs(model)
    with torch.no_grad():
        reference = numbers.exact(model, family, inputs)
        kept = inputs["attention_mask"].bool()
        exact, original = reference.logits[kept], model(**inputs).logits[kept].double()
        liteboost_adaptor.apply(model, disable="rope.*,norm.*,attention.*,experts.*")
        with calls.served() as served:
            found = model(**inputs).logits[kept].double()
    assert FAMILIES[family] <= served.rules.keys()
    assert not [why for rule, why in served.fallbacks if rule in FAMILIES[family]]
    own = (original - exact).norm()
    assert (found - exact).norm() <= max(1.5 * own, numbers.ULP[dtype] * exact.norm())


def test_an_activation_function_exchanged_afterwards_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("lfm2")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    monkeypatch.setattr(F, "silu", lambda x: x * 0)
    with torch.no_grad(), calls.served() as served:
        found = model(**inputs).logits
    reason = "torch.nn.functional.silu was replaced by someone else"
    assert ("mlp.silu_function", reason) in served.fallbacks
    liteboost_adaptor.undo()
    with torch.no_grad():
        assert numbers.relative(found, model(**inputs).logits) <= 2e-5


def test_a_function_that_was_exchanged_at_the_first_binding_is_served_once_it_is_back() -> None:
    model = tiny_models.build("lfm2")
    with pytest.MonkeyPatch.context() as patch:
        former = F.silu
        patch.setattr(F, "silu", lambda x: former(x) * 1)
        binder = Binder(active_rules(Settings()))
        binder.bind(model).undo()
    binding = binder.bind(model)
    with torch.no_grad(), calls.served() as served:
        model(**tiny_models.example_inputs(model))
    binding.undo()
    assert served.rules["mlp.silu_function"] > 0


def test_gradients_pass_through_the_original() -> None:
    model = tiny_models.build("lfm2")
    inputs = tiny_models.example_inputs(model)
    model(**inputs).logits.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        model(**inputs).logits.sum().backward()
    assert ("mlp.silu_function", "grad mode") in served.fallbacks
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in expected)
        assert p.grad is None or torch.equal(p.grad, expected[name]), name


def mlp_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.layers[0].mlp


def served_by(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, calls.Served]:
    with torch.no_grad(), calls.served() as served:
        return mlp_of(model)(x), served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_layers_and_the_gate_are_one_op_with_the_bits_of_three(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = numbers.cast(tiny_models.build("llama"), dtype)
    x = torch.randn(2, 5, model.config.hidden_size).to(dtype)
    ops = torch.ops.liteboost
    mlp = mlp_of(model)
    gate, up = (ops.linear(x, layer.weight.detach()) for layer in (mlp.gate_proj, mlp.up_proj))
    expected = ops.linear(ops.gated_activation(gate, up), mlp.down_proj.weight.detach())
    liteboost_adaptor.apply(model)
    monkeypatch.setattr("liteboost_adaptor.replacements.linear.ops", OnlyLinear())
    found, served = served_by(model, x)
    assert torch.equal(found, expected)
    assert served.rules == {"linear.call": 3, "mlp.silu": 1} and served.fallbacks == {}


class OnlyLinear:
    """The ops, of which linear may be called once: for down_proj."""

    calls = 0

    def linear(self, *args: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        assert self.calls == 1
        return torch.ops.liteboost.linear(*args)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("linear.call", ({"mlp.silu": 1}, {})),
        ("mlp.silu", ({"linear.call": 3}, {})),
    ],
)
def test_either_rule_alone_acts(rule: str, expected: tuple[dict[str, int], dict[str, int]]) -> None:
    model = tiny_models.build("llama")
    x = torch.randn(2, 5, model.config.hidden_size)
    with torch.no_grad():
        original = mlp_of(model)(x)
    liteboost_adaptor.apply(model, disable=rule)
    found, served = served_by(model, x)
    assert (dict(served.rules), dict(served.fallbacks)) == expected
    assert numbers.relative(found, original) <= 2e-5


def _hook(mlp: torch.nn.Module) -> None:
    mlp.up_proj.register_forward_hook(lambda module, args, result: result + 1)


def _subclass(mlp: torch.nn.Module) -> None:
    class Louder(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    mlp.gate_proj.__class__ = Louder


def _own_forward(mlp: torch.nn.Module) -> None:
    mlp.act_fn.forward = lambda x: x * 0 + 1


def _another_activation(mlp: torch.nn.Module) -> None:
    mlp.act_fn = torch.nn.ReLU()


def _another_width(mlp: torch.nn.Module) -> None:
    mlp.up_proj = torch.nn.Linear(mlp.up_proj.in_features, 1, bias=False)


@pytest.mark.parametrize(
    ("change", "rules", "reasons"),
    [
        (_hook, {"linear.call": 2, "mlp.silu": 1}, {("linear.call", "a hook on the module")}),
        (_subclass, {"linear.call": 2, "mlp.silu": 1}, None),
        (_own_forward, {"linear.call": 3}, {("mlp.silu", "the instance has a forward of its own")}),
        (_another_activation, {"linear.call": 3}, {("mlp.silu", "the activation was exchanged")}),
        (_another_width, {"linear.call": 3}, {("mlp.silu", "factors of different shape or dtype")}),
    ],
)
def test_a_part_that_was_changed_is_called_and_the_others_are_served(
    change: object, rules: dict[str, int], reasons: set[tuple[str, str]] | None
) -> None:
    model = tiny_models.build("llama")
    x = torch.randn(2, 5, model.config.hidden_size)
    liteboost_adaptor.apply(model)
    mlp = mlp_of(model)
    change(mlp)
    found, served = served_by(model, x)
    with torch.no_grad():
        expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert numbers.relative(found, expected) <= 2e-5
    assert served.rules == rules
    assert len(served.fallbacks) == 1 and (reasons is None or set(served.fallbacks) == reasons)


def test_autocast_decides_the_dtype() -> None:
    model = tiny_models.build("llama")
    x = torch.randn(2, 5, model.config.hidden_size)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        original = mlp_of(model)(x)
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = mlp_of(model)(x)
    assert found.dtype == original.dtype == torch.bfloat16
    assert served.fallbacks == {} and served.rules["linear.call"] == 3
    assert numbers.relative(found.float(), original.float()) <= 2.0**-7
