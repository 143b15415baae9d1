"""Linear attention and its convolution: families on our ops, their caches, what is left to the originals."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import calls, numbers, tiny_models
from torch import Tensor
from transformers.models.lfm3 import modeling_lfm3
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

import liteboost_adaptor
from liteboost_adaptor.engine.catalogue import load
from liteboost_adaptor.engine.fingerprint import behind_wrapper
from liteboost_adaptor.engine.fit import Fit, Refusal, RuleMatcher
from liteboost_adaptor.replacements import linear_attention
from liteboost_adaptor.report import CallCounter

CONV = {"causal_conv.prompt", "causal_conv.step"}
DELTA = {"delta_rule.chunk", "delta_rule.recurrent"}
#: Family -> rules that must serve a generation.
FAMILIES = {
    "qwen3_next": CONV | DELTA,
    "qwen3_5_text": CONV | DELTA,
    "qwen3_5_moe_text": CONV | DELTA,
    "olmo_hybrid": CONV | DELTA,
    "mamba": CONV,
    "lfm2": CONV,
    "lfm3": CONV,
}
FUNCTIONS = {
    "delta_rule.recurrent": "torch_recurrent_gated_delta_rule",
    "delta_rule.chunk": "torch_chunk_gated_delta_rule",
    "causal_conv.prompt": "causal_conv1d_fn",
    "causal_conv.step": "causal_conv1d_update",
}


#: In 16 bits a router's choice may differ, and with it everything behind it.
EXPERTS = {"qwen3_next", "qwen3_5_moe_text"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_the_family_is_served(family: str, dtype: torch.dtype) -> None:
    """A padded prompt as near to float64 as the original's, then some tokens."""
    model = numbers.cast(tiny_models.build(family), dtype)
    inputs = numbers.padded_inputs(model)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        original = model(**inputs).logits[kept].double()
        exact = numbers.exact(model, family, inputs).logits[kept]
        liteboost_adaptor.apply(model, disable="rope.*,norm.*,attention.*,experts.*,linear.*,mlp.*")
        with calls.served() as served:
            found = model(**inputs).logits[kept].double()
            model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert FAMILIES[family] <= served.rules.keys()
    assert not [why for rule, why in served.fallbacks if rule in FAMILIES[family]]
    own = (original - exact).norm()
    assert (found - exact).norm() <= max(1.5 * own, numbers.ULP[dtype] * exact.norm())


def _generations(model: torch.nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    with torch.no_grad():
        forms: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"cache_implementation": "static"}]
        form = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
        return [model.generate(**inputs, **form, **each) for each in forms]


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "lfm2"])
def test_generations_are_the_originals(family: str) -> None:
    """Greedily, by beams whose states are reordered, and with a static cache."""
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    expected = _generations(model, inputs)
    liteboost_adaptor.apply(model)
    assert all(map(torch.equal, _generations(model, inputs), expected))


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid"])
def test_caches_hold_what_the_originals_would(family: str) -> None:
    """Their tensors stay the same ones, and a copy made in between is not written to."""
    model = tiny_models.build(family)
    ids = tiny_models.example_inputs(model)["input_ids"]

    def run() -> list[list[Tensor]]:
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            layers = [layer for layer in cache.layers if getattr(layer, "recurrent_states", None)]
            before = [state for layer in layers for state in _states(layer)]
            snapshot = copy.deepcopy(cache)
            kept = [state.clone() for state in before]
            for token in ids.T[:3]:
                model(token[:, None], past_key_values=cache, use_cache=True)
            model(ids[:, :4], past_key_values=cache, use_cache=True)
        after = [state for layer in layers for state in _states(layer)]
        assert layers and [id(state) for state in after] == [id(state) for state in before]
        copied = [layer for layer in snapshot.layers if getattr(layer, "recurrent_states", None)]
        assert all(map(torch.equal, [state for layer in copied for state in _states(layer)], kept))
        return [kept, after]

    expected = run()
    liteboost_adaptor.apply(model)
    with calls.served() as served:
        found = run()
    assert FAMILIES[family] <= served.rules.keys()
    for ours, theirs in zip(found, expected, strict=True):
        for state, right in zip(ours, theirs, strict=True):
            assert state.dtype == right.dtype and numbers.relative(state.double(), right.double()) <= 2e-5


def _states(layer: Any) -> list[Tensor]:
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def inputs_of(rule: str, tokens: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments that are served."""
    torch.manual_seed(0)
    if rule.startswith("causal_conv"):
        x = torch.randn(2, tokens, 24).to(dtype).transpose(1, 2)
        weight, state = torch.randn(24, 4).to(dtype), torch.randn(2, 24, 4).to(dtype)
        named = {"hidden_states": x, "weight": weight, "bias": None, "activation": "silu"}
        return named if rule.endswith("prompt") else {**named, "conv_state": state}
    query, key = (torch.randn(2, tokens, 2, 8).mul(8**-0.5).to(dtype) for _ in range(2))
    return {
        "query": query,
        "key": key,
        "value": torch.randn(2, tokens, 4, 6).to(dtype),
        "g": -torch.rand(2, tokens, 4),
        "beta": torch.rand(2, tokens, 4).to(dtype),
        "initial_state": torch.randn(2, 4, 8, 6),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def served_and_original(rule: str) -> tuple[Callable[..., Any], Callable[..., Any], CallCounter]:
    name = {
        "delta_rule.recurrent": "recurrent_gated_delta_rule",
        "delta_rule.chunk": "chunk_gated_delta_rule",
    }
    name |= {"causal_conv.prompt": "causal_conv1d", "causal_conv.step": "causal_conv1d_update"}
    original, counter = getattr(modeling, FUNCTIONS[rule]), CallCounter()
    return getattr(linear_attention, name[rule])(original, counter), original, counter


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


#: What is unlike a model's call -> the rules it concerns, and the arguments.
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("", {}),
    "no state": ("delta_rule", {"initial_state": None}),
    "no state wanted": ("delta_rule", {"output_final_state": False}),
    "no lengths": ("delta_rule", {"use_qk_l2norm_in_kernel": False}),
    "unused arguments": ("delta_rule", {"position_ids": 1, "cu_seqlens": None}),
    "no activation": ("causal_conv", {"activation": None}),
    "swish": ("causal_conv", {"activation": "swish"}),
    "a bias": ("causal_conv", {"bias": torch.randn(24)}),
    "a longer state": ("causal_conv.step", {"conv_state": torch.randn(2, 24, 7)}),
    "a shorter state": ("causal_conv.step", {"conv_state": torch.randn(2, 24, 3)}),
}


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(
    ("form", "rule"), [(f, r) for f in SERVED for r in FUNCTIONS if r.startswith(SERVED[f][0])]
)
def test_calls(form: str, rule: str, tokens: int) -> None:
    _, change = SERVED[form]
    ours, original, counter = served_and_original(rule)
    arguments, theirs = (copied({**inputs_of(rule, tokens), **change}) for _ in range(2))
    with torch.no_grad():
        found, expected = listed(ours(**arguments)), listed(original(**theirs))
    assert counter.calls == 1 and not counter.fallbacks
    for result, right in zip(found, expected, strict=True):
        if right is None:
            assert result is None
            continue
        assert result.dtype == right.dtype and result.shape == right.shape
        torch.testing.assert_close(result, right, rtol=1e-5, atol=2e-6)
    for name, value in arguments.items():  # the convolution's state changes in both, nothing else in either
        assert not isinstance(value, Tensor) or torch.equal(value, theirs[name]), name


PACKED = torch.tensor([0, 5])
REFUSED: dict[str, tuple[str | tuple[str, ...], dict[str, Any]]] = {
    "packed sequences": (("delta_rule", "causal_conv.prompt"), {"cu_seqlens": PACKED}),
    "mixed dtypes": ("delta_rule", {"key": torch.randn(2, 5, 2, 8).bfloat16()}),
    "g or beta in another dtype than query or fp32": ("delta_rule", {"g": -torch.rand(2, 5, 4).double()}),
    "a state that is not in fp32": ("delta_rule", {"initial_state": torch.zeros(2, 4, 8, 6).bfloat16()}),
    "a state of another shape": ("delta_rule", {"initial_state": torch.zeros(1, 4, 8, 6)}),
    "g or beta of another shape": ("delta_rule", {"beta": torch.rand(2, 5, 1)}),
    "an activation that is not served": ("causal_conv", {"activation": "gelu"}),
    "a weight of another dtype than x": ("causal_conv", {"weight": torch.randn(24, 4).double()}),
    "dtype float64": ("causal_conv.prompt", {"hidden_states": torch.zeros(2, 24, 5).double()}),
}


@pytest.mark.parametrize(
    ("reason", "rule"), [(why, r) for why in REFUSED for r in FUNCTIONS if r.startswith(REFUSED[why][0])]
)
def test_calls_left_to_the_original(reason: str, rule: str) -> None:
    _, change = REFUSED[reason]
    ours, original, counter = served_and_original(rule)
    arguments = {**inputs_of(rule), **change}
    with torch.no_grad():
        outcomes = []
        for function in (ours, original):
            try:
                outcomes.append(listed(function(**copied(arguments))))
            except (ValueError, RuntimeError) as fault:
                outcomes.append([str(fault)])
    assert counter.fallbacks == {reason: 1} and not counter.calls
    for result, right in zip(*outcomes, strict=True):
        assert torch.equal(result, right) if isinstance(right, Tensor) else result == right


@pytest.mark.parametrize("rule", FUNCTIONS)
def test_autocast_gradients_and_wrong_calls_are_the_originals(rule: str) -> None:
    ours, _, counter = served_and_original(rule)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours(**inputs_of(rule))
    ours(**inputs_of(rule))
    with torch.no_grad(), pytest.raises(TypeError):
        ours(inputs_of(rule))
    assert dict(counter.fallbacks) == {
        "autocast": 1,
        "grad mode": 1,
        "arguments that the function does not take": 1,
    }


# ---- what counts as one of the functions ------------------------------------------------------------------


@functools.cache
def matcher() -> RuleMatcher:
    rules = load()[0]
    return RuleMatcher(tuple(rule for rule in rules if rule.id in FUNCTIONS))


def verdict(function: Any) -> Fit | Refusal | None:
    return matcher().function(function)


def test_every_copy_of_the_functions_is_known() -> None:
    found = {}
    for family in ("qwen3_5", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp", "mamba", "lfm2", "falcon_h1"):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for rule, name in FUNCTIONS.items():
            if hasattr(module, name):
                assert verdict(getattr(module, name)).rule.id == rule, (family, name)
                found[rule] = found.get(rule, 0) + 1
    assert set(found.values()) == {4, 7}
    assert verdict(modeling_lfm3.causal_conv1d_fn).rule.id == "causal_conv.prompt"  # without a wrapper


#: What differs -> rule, old text, new text.
MISSES = {
    "another eps": (
        "delta_rule.chunk",
        "key = l2norm(key, dim=-1, eps=1e-6)",
        "key = l2norm(key, dim=-1, eps=1e-5)",
    ),
    "lengths by another sum": ("delta_rule.recurrent", "(x * x).sum(", "(x * x).mean("),
    "another scaling": ("delta_rule.chunk", "query.shape[-1] ** -0.5", "query.shape[-1] ** -1.0"),
    "no decay": ("delta_rule.recurrent", "decay[:, :, i].exp()", "decay[:, :, i]"),
    "beta for the value alone": ("delta_rule.recurrent", "(v_t - kv_mem) * beta_t", "v_t * beta_t - kv_mem"),
    "output before the update": ("delta_rule.recurrent", "* q_t.unsqueeze(-1)", "* k_t.unsqueeze(-1)"),
    "heads side by side": (
        "delta_rule.chunk",
        "key = key.repeat_interleave(num_v_heads // num_k_heads, dim=2)",
        "key = key.repeat(1, 1, num_v_heads // num_k_heads, 1)",
    ),
    "the whole chunk": ("delta_rule.chunk", ".triu(1)", ".triu(2)"),
    "the future": ("causal_conv.prompt", "[:, :, :seq_len]", "[:, :, -seq_len:]"),
    "less padding": ("causal_conv.prompt", "weight.shape[-1] - 1", "weight.shape[-1] - 2"),
    "an older state": (
        "causal_conv.step",
        "hidden_states_new[:, :, -state_len:]",
        "hidden_states_new[:, :, :state_len]",
    ),
    "no activation": ("causal_conv.step", "if activation is not None", "if activation is None"),
}


def rewritten(folder: Path, rule: str, old: str, new: str) -> Any:
    """The function of ``rule`` from a file where ``old`` is ``new``."""
    name = FUNCTIONS[rule]
    helper = inspect.getsource(modeling.l2norm) if rule.startswith("delta") else ""
    text = helper + inspect.getsource(inspect.unwrap(getattr(modeling, name)))
    assert old in text
    head = (
        inspect.getsource(modeling)
        .split("\nclass ")[0]
        .replace("from ... ", "from transformers ")
        .replace("from ...", "from transformers.")
    )
    head = head.split("from .configuration")[0].split("# Copyright")[1].split("\n\n", 1)[1]
    file = folder / "modeling_changed.py"
    file.write_text(head + "\n\n" + text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("modeling_changed", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_are_refused(miss: str, tmp_path: Path) -> None:
    rule, old, new = MISSES[miss]
    (tmp_path / "same").mkdir()
    assert verdict(rewritten(tmp_path / "same", rule, old, old)).rule.id == rule
    fit = verdict(rewritten(tmp_path, rule, old, new))
    assert isinstance(fit, Refusal) and "is not in the catalogue" in fit.reason


def test_another_wrapper_is_left_alone() -> None:
    inner = inspect.unwrap(modeling.causal_conv1d_fn)

    @functools.wraps(inner)
    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * inner(*args, **kwargs)

    for function in (doubled, functools.wraps(modeling.causal_conv1d_fn)(lambda *args: args)):
        fit = verdict(function)
        assert isinstance(fit, Refusal) and fit.state == "foreign"


def test_a_packages_kernel_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package that transformers asks for is installed, its function stands behind the wrapper."""
    package = types.ModuleType("causal_conv1d")
    package.causal_conv1d_fn = lambda hidden_states, weight, bias=None, activation=None: hidden_states
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    from transformers.integrations import use_kernel_func_from_hub_with_fallback as decorator

    inner = inspect.unwrap(modeling.causal_conv1d_fn)
    function = decorator("causal_conv1d_fn", "causal_conv1d")(inner)
    assert behind_wrapper(function) == (function, "")
    assert isinstance(verdict(function), Refusal)
    monkeypatch.delitem(sys.modules, "causal_conv1d")
    assert behind_wrapper(decorator("causal_conv1d_fn", "causal_conv1d")(inner))[0] is inner
