"""Parts of one class that differ in what they hold: shapes of weights, functions they were made with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import calls, numbers, tiny_models
from torch import nn

import liteboost_adaptor

pytestmark = pytest.mark.usefixtures("no_grad")


class LlamaRMSNorm(nn.Module):
    """The common body, which broadcasts a weight of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x.to(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (1, 16), (3, 1), (1, 1, 16), (3, 16), (16,)], ids=str)
def test_a_weight_of_any_shape_is_broadcast(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(LlamaRMSNorm(shape)).requires_grad_(False)
    x = torch.randn(2, 3, 16)
    expected = model(x)
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        torch.testing.assert_close(model(x), expected)
    assert served.rules == ({"norm.rms": 1} if shape in ((16,), (3, 16)) else {})
    assert served.rules or served.fallbacks == {("norm.rms", "a weight of another shape than a row"): 1}


def test_query_and_key_norms_with_weights_of_each_head() -> None:
    """As Command R+ has them: a LayerNorm over one dimension whose weight has two."""
    config = tiny_models.tiny_config("cohere")
    config.use_qk_norm = True
    model = tiny_models.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.3
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        liteboost_adaptor.undo(model)
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        with calls.served() as served:
            found = model(**inputs).logits
    assert numbers.relative(found, expected) <= 2e-5
    assert ("norm.layer_scale", "a weight of another shape than a row") in served.fallbacks


class Chosen(nn.Module):
    """Calls what its instance was given."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = function

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(input)


class GatedMLP(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)
        self.act = Chosen(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("functions", [(F.gelu, F.relu), (F.relu, F.gelu), (F.gelu, torch.tanh)])
def test_activations_that_differ_in_the_function_they_hold(functions: tuple[Callable, Callable]) -> None:
    model = nn.ModuleList([GatedMLP(function) for function in functions]).requires_grad_(False)
    x = torch.randn(2, 3, 16)
    expected = [mlp(x) for mlp in model]
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = [mlp(x) for mlp in model]
    assert served.rules["mlp.gelu"] == 1
    torch.testing.assert_close(found, expected)


class WritesInPlace(nn.Module):
    """Python computes the first factor before the second changes what it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(8, 8), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        gate = self.act(gate) * gate.mul_(2)
        gate = F.silu(gate) * gate.add_(1)
        return self.act(gate) * torch.exp(gate, out=gate)


def test_a_factor_that_changes_the_other_factors_argument() -> None:
    model = nn.Sequential(WritesInPlace()).requires_grad_(False)
    x = torch.randn(2, 8)
    expected = model(x)
    liteboost_adaptor.apply(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("family", "name", "helper"),
    [
        ("llama", "rotate_half", lambda x: x.flip(-1)),
        ("gemma", "GemmaRMSNorm._norm", lambda self, x: x * 0.5),
    ],
)
def test_a_helper_exchanged_between_two_models(
    family: str, name: str, helper: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tiny_models.build(family), tiny_models.build(family)
    inputs = tiny_models.example_inputs(second)
    liteboost_adaptor.apply(first)
    monkeypatch.setattr(f"transformers.models.{family}.modeling_{family}.{name}", helper)
    with torch.no_grad():
        liteboost_adaptor.undo(second)
        expected = second(**inputs).logits
        liteboost_adaptor.apply(second)
        assert numbers.relative(second(**inputs).logits, expected) <= 2e-5
