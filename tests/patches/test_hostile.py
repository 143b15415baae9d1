"""Things a program may do to classes, instances and functions that must never be bypassed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models
from torch import nn

import liteboost_adaptor


def compare(model: nn.Module, *inputs: Any, tolerance: float = 2e-5) -> None:
    """The same output served and unserved, called before and after binding."""
    with torch.no_grad():
        expected = model(*inputs)
        liteboost_adaptor.apply(model)
        found = model(*inputs)
    assert found.dtype == expected.dtype
    assert numbers.relative(found, expected) <= tolerance


class ScaledNorm(nn.Module):
    """Equals a known norm for an instance whose ``scale`` is 1, and for no other."""

    def __init__(self, size: int, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-6
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x.to(dtype) * self.scale


@pytest.mark.parametrize("scales", [(1.0, 3.0), (3.0, 1.0)])
def test_what_holds_for_one_instance_is_not_taken_for_another(scales: tuple[float, float]) -> None:
    model = nn.ModuleList([ScaledNorm(64, scale) for scale in scales])
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        expected = [norm(x) for norm in model]
        liteboost_adaptor.apply(model)
        found = [norm(x) for norm in model]
    for ours, original in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, original)


def test_an_attribute_changed_after_binding_counts() -> None:
    model = nn.ModuleList([ScaledNorm(64, 1.0)])
    x = torch.randn(2, 3, 64)
    liteboost_adaptor.apply(model)
    model[0].scale = 3.0
    with torch.no_grad():
        found = model[0](x)
        liteboost_adaptor.undo()
        torch.testing.assert_close(found, model[0](x))


class PromotedNorm(nn.Module):
    """Rounds to the weight's dtype: as Llama's where that is the input's, and not otherwise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.variance_epsilon)
        return x.type_as(self.weight) * self.weight


def test_weights_of_another_dtype_than_the_probe_used() -> None:
    compare(nn.Sequential(PromotedNorm(64)), torch.randn(4, 64).bfloat16())


def test_rows_of_any_rank(tmp_path: Path) -> None:
    """A norm over dimension 2 is one over the last of [batch, length, hidden], and of nothing else."""
    change = (planted.NORM_VARIANCE, "variance = hidden_states.pow(2).mean(2, keepdim=True)")
    norm = planted.llama(tmp_path, change).model.norm
    for shape in ((3, 5, 64), (2, 3, 5, 64)):
        compare(nn.Sequential(norm), torch.randn(shape))
        liteboost_adaptor.undo()


def test_a_method_overridden_on_the_instance_is_called() -> None:
    model = tiny_models.build("gemma2")
    model.model.norm._norm = lambda x: x * 7
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5


def test_a_forward_overridden_on_the_instance_is_called_whenever_it_was_set() -> None:
    for is_first in (True, False):
        model = tiny_models.build("llama")
        inputs = tiny_models.example_inputs(model)
        if not is_first:
            liteboost_adaptor.apply(model)
        for part in (
            model.model.norm,
            model.model.layers[0].post_attention_layernorm,
            model.model.layers[1].mlp,
        ):
            part.forward = lambda x: x * 0.5
        if is_first:
            liteboost_adaptor.apply(model)
        with torch.no_grad():
            found = model(**inputs).logits
            liteboost_adaptor.undo()
            assert numbers.relative(found, model(**inputs).logits) <= 2e-5


def test_a_call_overridden_by_a_subclass_is_not_bypassed() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Doubled(LlamaRMSNorm):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 2

    model = tiny_models.build("llama")
    for layer in model.model.layers:
        layer.post_attention_layernorm.__class__ = Doubled
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5


def test_an_activation_whose_call_is_overridden_is_not_bypassed() -> None:
    class Doubled(nn.SiLU):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * 2

    model = tiny_models.build("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = Doubled()
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5


class KeepsGate(nn.Module):
    """Uses the gate again after the activation, which may have been done in place."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.act_fn = nn.Linear(8, 8), nn.Linear(8, 8), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        product = self.act_fn(gate) * self.up(gate)
        return product + gate


ACTIVATIONS = (
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.ReLU(inplace=True),
    nn.Hardswish(inplace=True),
)


def test_activations_that_differ_in_their_attributes_alone() -> None:
    model = nn.ModuleList([KeepsGate(activation) for activation in ACTIVATIONS])
    x = torch.randn(3, 8) * 3
    with torch.no_grad():
        expected = [part(x) for part in model]
        liteboost_adaptor.apply(model)
        for part, original in zip(model, expected, strict=True):
            torch.testing.assert_close(part(x), original, msg=str(part.act_fn))


ROTATION = """
import torch
from torch import nn


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim={default}):
    cos = cos.unsqueeze({dimension})
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class Turning(nn.Module):
    def forward(self, q, k, cos, sin):
        return torch.stack(apply_rotary_pos_emb(q, k, cos, sin{argument}))
"""


@pytest.mark.parametrize(
    ("default", "dimension", "argument"),
    [
        ("1", "unsqueeze_dim", ""),
        ("2", "unsqueeze_dim", ""),
        ("2", "unsqueeze_dim", ", 1"),
        ("1", "unsqueeze_dim", ", unsqueeze_dim=2"),
        ("1", "1", ", unsqueeze_dim=2"),
        ("-2", "unsqueeze_dim", ""),
    ],
)
def test_the_dimension_tables_are_widened_in(
    default: str, dimension: str, argument: str, tmp_path: Path
) -> None:
    """Length and heads are both 4, so that a wrong dimension gives no error but other numbers."""
    text = ROTATION.format(default=default, dimension=dimension, argument=argument)
    module = planted.load(text, tmp_path)
    q, k = torch.randn(2, 2, 4, 4, 16)
    compare(module.Turning(), q, k, torch.randn(2, 4, 16), torch.randn(2, 4, 16))


def test_a_global_rebound_after_binding_is_the_one_that_runs(tmp_path: Path) -> None:
    model = planted.llama(tmp_path)
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model)
    module = calls.modeling_modules(model)[0]
    seen: list[int] = []
    original = module.apply_rotary_pos_emb

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    module.apply_rotary_pos_emb = theirs
    with torch.no_grad():
        model(**inputs)
    assert len(seen) == len(model.model.layers)


def test_a_new_instance_of_a_bound_instances_class_is_an_original() -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    twin = type(model)(model.config)
    liteboost_adaptor.undo()
    assert type(twin) is LlamaForCausalLM
    assert {type(part).__mro__.index(nn.Module) for part in twin.model.layers} == {2}


class Registered(nn.Module):
    """Keeps a list of its subclasses, as plug-in systems do."""

    subclasses: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.subclasses.append(cls)


class PluggedIn(Registered):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_subclass_hooks_of_the_original_do_not_see_us() -> None:
    before = list(Registered.subclasses)
    model = PluggedIn()
    compare(model, torch.randn(2, 4))
    assert Registered.subclasses == before


SEEN: list[str] = []


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator with state of its own, and a trace of how often it was applied."""
    SEEN.append(function.__qualname__)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @counted
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_decorators_keep_their_state_and_are_not_applied_again() -> None:
    before = list(SEEN)
    model = Counted()
    counter = Counted.forward
    compare(model, torch.randn(2, 4))
    assert SEEN == before
    assert counter.calls == 2


class Odd(nn.Module):
    """Constructs a rewriter can stumble over."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(
        self, x: torch.Tensor, /, *rest: torch.Tensor, scale: float = 1.0, **more: Any
    ) -> torch.Tensor:
        """With a docstring that says "self.first(x)"."""
        layers = [self.first, self.second]
        x = sum(layer(x) for layer in layers) + (lambda self: self * 2)(x)
        if (y := self.first(x)).shape[0] > 1:
            y = [self.second(part) * scale for part in y.split(1)]
            y = torch.cat(y)
        try:
            y = self.act_fn(y) * self.second(y)
        finally:
            del layers
        return super().__getattr__("act_fn")(y) * type(self).factor * len(rest or (1,))


class Private(Odd):
    """A private name means another attribute in a subclass of the same text."""

    def __init__(self) -> None:
        super().__init__()
        self.__secret = 3.0

    def forward(
        self, x: torch.Tensor, /, *rest: torch.Tensor, scale: float = 1.0, **more: Any
    ) -> torch.Tensor:
        return super().forward(self.first(x), *rest, scale=scale, **more) * self.__secret


@pytest.mark.parametrize("kind", [Odd, Private])
def test_odd_constructs_are_rewritten_right_or_refused(kind: type[nn.Module]) -> None:
    model = kind()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x, x, x, scale=0.5, other=1)
        liteboost_adaptor.apply(model)
        torch.testing.assert_close(model(x, x, x, scale=0.5, other=1), expected)
        with pytest.raises(TypeError):
            model()


def test_tracebacks_show_the_original_text(tmp_path: Path) -> None:
    model = planted.llama(tmp_path)
    liteboost_adaptor.apply(model)
    with pytest.raises(TypeError) as caught:
        model.model.layers[0].mlp("no tensor")
    frames = [entry for entry in caught.traceback if entry.path.parent == tmp_path]
    assert frames and "self.gate_proj(x)" in str(frames[0].statement)


def test_source_that_changed_since_the_import_is_not_trusted(tmp_path: Path) -> None:
    model = planted.llama(tmp_path)
    file = Path(calls.modeling_modules(model)[0].__file__)
    file.write_text(
        file.read_text(encoding="utf-8").replace("rsqrt(variance", "rsqrt(1 + variance"), encoding="utf-8"
    )
    inputs = tiny_models.example_inputs(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model)
        assert numbers.relative(model(**inputs).logits, expected) <= 2e-5
    assert state.rows("norm").keys() == {"refused"}
    assert "differs from its source text" in state.rows("norm")["refused"][0].reason


def test_a_tied_or_shared_module_is_bound_and_restored_once() -> None:
    norm = tiny_models.build("llama").model.norm
    model = nn.ModuleList([norm, nn.Sequential(norm)])
    original = type(norm)
    status = liteboost_adaptor.apply(model)
    assert next(row for row in status.rules if row.state == "applied").targets == 1
    assert liteboost_adaptor.undo() == []
    assert type(norm) is original


def test_vmap_and_function_transforms_give_the_originals_numbers() -> None:
    model = tiny_models.build("llama")
    hidden_states = torch.randn(3, 2, 5, 64)
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    ids = tiny_models.example_inputs(model)["input_ids"]

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = torch.func.functional_call(model, parameters, (ids,), {"use_cache": False}).logits
        return logits.square().mean()

    def run() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        with torch.no_grad():
            mapped = torch.vmap(model.model.norm)(hidden_states)
            tangent = torch.func.jvp(model.model.norm, (hidden_states,), (torch.ones_like(hidden_states),))[1]
        return mapped, tangent, torch.func.grad(loss)(parameters)

    expected = run()
    liteboost_adaptor.apply(model)
    found = run()
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient)
