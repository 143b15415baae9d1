"""PEFT's adapters and models that are bound already: the layers they wrap are served as they were before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTuner
from support import calls, numbers, processes, state, tiny_models
from support.ways import families
from torch import nn

import liteboost_adaptor
from liteboost_adaptor.engine import swap
from liteboost_adaptor.engine.bind import Binder

TARGETS = ["q_proj", "v_proj", "down_proj"]
#: Reason with which a caller of an adapted layer hands the call to the adapter.
TO_THE_ADAPTER = "the layer is a peft.tuners.lora.layer.Linear"


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**numbers.padded_inputs(model)).logits


def lora(**settings: Any) -> peft.LoraConfig:
    torch.manual_seed(7)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(**{**chosen, **settings})


def adapted(model: nn.Module, config: peft.PeftConfig) -> nn.Module:
    torch.manual_seed(7)
    return peft.get_peft_model(model, config).eval()


def warmed(family: str, level: int = 2, **settings: Any) -> tuple[nn.Module, torch.Tensor, Counter[str]]:
    """A bound model, its logits, and the calls that were served for them."""
    model = tiny_models.build(family)
    liteboost_adaptor.apply(model, level=level, **settings)
    with calls.served() as served:
        found = logits(model)
    assert served.rules["linear.call"] > 0 or settings
    return model, found, served.rules


def wrapped_layers(model: nn.Module) -> list[nn.Module]:
    return [part.base_layer for part in model.modules() if isinstance(part, peft.tuners.lora.LoraLayer)]


def is_bound(model: nn.Module) -> bool:
    return any(swap.mark_of(part) is not None for part in model.modules())


def by_peft(model: nn.Module, folder: Path) -> nn.Module:
    return adapted(model, lora())


def by_injection(model: nn.Module, folder: Path) -> nn.Module:
    return peft.inject_adapter_in_model(lora(), model).eval()


def by_transformers(model: nn.Module, folder: Path) -> nn.Module:
    try:
        model.add_adapter(lora())
    except ValueError as fault:
        if "version of PEFT" in str(fault):
            pytest.skip(f"this transformers asks for a PEFT newer than that of constraints.txt: {fault}")
        raise
    return model.eval()


def by_loading(model: nn.Module, folder: Path) -> nn.Module:
    adapted(tiny_models.build("llama"), lora()).save_pretrained(folder)
    return peft.PeftModel.from_pretrained(model, folder).eval()


def by_a_second_adapter(model: nn.Module, folder: Path) -> nn.Module:
    found = adapted(model, lora(target_modules=["k_proj"]))
    found.add_adapter("second", lora())
    found.set_adapter("second")
    return found


WAYS = (by_peft, by_injection, by_transformers, by_loading, by_a_second_adapter)


@pytest.mark.parametrize("way", WAYS)
def test_layers_put_into_a_bound_model_are_served(
    way: Callable[[nn.Module, Path], nn.Module], level: int, tmp_path: Path
) -> None:
    expected = logits(way(tiny_models.build("llama"), tmp_path / "reference"))
    model, base, served_before = warmed("llama", level)
    assert numbers.relative(base, expected) > 1e-2, "the adapter changes nothing"
    adapted_model = way(model, tmp_path / "ours")
    with calls.served() as served:
        assert numbers.relative(logits(adapted_model), expected) <= 2e-5
    assert served.rules == served_before
    assert set(served.fallbacks) == {("linear.call", TO_THE_ADAPTER)}
    assert len(wrapped_layers(model)) >= 2 * len(TARGETS)
    assert liteboost_adaptor.undo() == []
    assert not is_bound(adapted_model)
    assert torch.equal(logits(adapted_model), expected)


@families("llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "phi3")
def test_a_disabled_adapter_changes_no_bit(family: str, level: int) -> None:
    """What was served without an adapter is served the same, also where the model is bound once more."""
    model, base, served_before = warmed(family, level)
    found = adapted(model, lora(target_modules="all-linear"))
    assert numbers.relative(logits(found), base) > 1e-2
    # An adapter of kv_b_proj, disabled or not, is in the way of absorbing that: the rule does not fit.
    del served_before["latent_attention.expand"]
    with found.disable_adapter(), calls.served() as served:
        assert torch.equal(logits(found), base)
    assert served.rules == served_before
    liteboost_adaptor.apply(found, level=level)
    with found.disable_adapter(), calls.served() as served:
        assert torch.equal(logits(found), base)
    assert served.rules == served_before


@pytest.mark.filterwarnings("ignore:.*alpha_pattern.*")
def test_adapted_parameters_of_experts(level: int) -> None:
    model, base, served_before = warmed("gpt_oss", level)
    config = lora(target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.down_proj"])
    reference = logits(adapted(tiny_models.build("gpt_oss"), config))
    found = adapted(model, config)
    assert numbers.relative(logits(found), reference) <= 2e-5
    assert numbers.relative(reference, base) > 1e-2
    with found.disable_adapter(), calls.served() as served:
        assert torch.equal(logits(found), base)
    assert served.rules == served_before


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS, init_weights=False),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=TARGETS, init_weights=False, d_initial=1.0),
    "oft": lambda: peft.OFTConfig(r=4, oft_block_size=0, target_modules=TARGETS, init_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_adapters(kind: str, level: int) -> None:
    reference = adapted(tiny_models.build("llama"), KINDS[kind]())
    expected = logits(reference)
    model, base, served_before = warmed("llama", level)
    found = adapted(model, KINDS[kind]())
    assert numbers.relative(expected, base) > 1e-3
    with calls.served() as served:
        assert numbers.relative(logits(found), expected) <= 2e-5
    assert served.rules["linear.call"] > 0
    with found.disable_adapter(), calls.served() as served:
        assert torch.equal(logits(found), base)
    assert served.rules == served_before


def test_a_merged_adapter_acts_through_the_served_layer(level: int) -> None:
    reference = adapted(tiny_models.build("llama"), lora())
    expected = logits(reference)
    model, base, served_before = warmed("llama", level)
    found = adapted(model, lora())
    found.merge_adapter()
    with calls.served() as served:
        assert numbers.relative(logits(found), expected) <= 2e-5
    assert served.rules == served_before
    with found.disable_adapter():  # takes the merged weights out again
        assert numbers.relative(logits(found), base) <= 2e-5
    found.unmerge_adapter()
    assert numbers.relative(logits(found), expected) <= 2e-5


@pytest.mark.parametrize("how", ["unload", "merge_and_unload", "delete_adapter"])
def test_adapters_that_are_taken_away(how: str, level: int) -> None:
    model, base, served_before = warmed("llama", level)
    expected = logits(adapted(tiny_models.build("llama"), lora())) if how == "merge_and_unload" else base
    found = adapted(model, lora())
    if how == "delete_adapter":
        found.delete_adapter("default")
    else:
        assert getattr(found, how)() is model
    with calls.served() as served:
        assert numbers.relative(logits(model), expected) <= 2e-5
    assert served.rules == served_before
    assert liteboost_adaptor.undo() == []
    assert not is_bound(found) and not is_bound(model)


class Quantized(nn.Linear):
    """Stands for the layers of quantization libraries, which derive from ``nn.Linear``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def hooked(layer: nn.Module) -> str:
    layer.register_forward_hook(lambda module, args, out: out * 2)
    return "a hook on the module"


def with_a_forward_of_its_own(layer: nn.Module) -> str:
    layer.forward = lambda x: nn.functional.linear(x, layer.weight, layer.bias) * 2
    return "the instance has a forward of its own"


def quantized(layer: nn.Module) -> str:
    layer.__class__ = Quantized
    return f"the layer is a {__name__}.Quantized"


def parametrized(layer: nn.Module) -> str:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return "the layer is a torch.nn.utils.parametrize.ParametrizedLinear"


@pytest.mark.parametrize("change", [hooked, with_a_forward_of_its_own, quantized, parametrized])
@pytest.mark.parametrize("when", ["before the adapter", "after the adapter"])
def test_wrapped_layers_that_are_not_what_they_were(
    when: str, change: Callable[[nn.Module], str], level: int
) -> None:
    def run(model: nn.Module) -> tuple[torch.Tensor, str]:
        layer = model.model.layers[1].self_attn.v_proj
        if when == "before the adapter":
            change(layer)
        found = adapted(model, lora())
        reason = change(layer) if when == "after the adapter" else ""
        return logits(found), reason

    expected, _ = run(tiny_models.build("llama"))
    model, _, _ = warmed("llama", level)
    with calls.served() as served:
        found, reason = run(model)
    assert numbers.relative(found, expected) <= 2e-5
    assert numbers.relative(expected, logits(adapted(tiny_models.build("llama"), lora()))) > 1e-3
    if reason:
        assert served.fallbacks["linear.call", reason] == 1


def test_nothing_is_served_in_grad_mode(level: int) -> None:
    model, _, _ = warmed("llama", level)
    found, reference = adapted(model, lora()), adapted(tiny_models.build("llama"), lora())
    inputs = numbers.padded_inputs(model)
    with calls.served() as served:
        assert torch.equal(found(**inputs).logits, reference(**inputs).logits)
    assert served.rules == {} and {why for _, why in served.fallbacks} == {"grad mode", TO_THE_ADAPTER}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mine, theirs = found(**inputs).logits, reference(**inputs).logits
    assert mine.dtype == theirs.dtype and numbers.relative(mine.float(), theirs.float()) <= 3e-2


def test_what_the_user_has_taken_back_stays_so(level: int) -> None:
    model, base, _ = warmed("llama", level)
    first, second = model.model.layers[:2]
    liteboost_adaptor.undo(first)
    liteboost_adaptor.apply(second.mlp, level=level, disable="linear.*")
    found = adapted(model, lora())
    assert not is_bound(first)
    assert is_bound(second.self_attn.q_proj) and not is_bound(second.mlp.down_proj)
    with found.disable_adapter():
        assert numbers.relative(logits(found), base) <= 2e-5
    found.unload()
    liteboost_adaptor.undo(model)
    found = adapted(model, lora())
    logits(found)
    assert not is_bound(found)


def test_undo_leaves_every_class_what_it_was(level: int) -> None:
    original = vars(BaseTuner)["inject_adapter"]
    model = tiny_models.build("llama")
    found = adapted(model, lora())
    logits(found)
    snapshot = state.Snapshot(found)
    liteboost_adaptor.apply(model, level=level)
    assert vars(BaseTuner)["inject_adapter"] is not original
    found.add_adapter("second", lora(target_modules=["k_proj"]))
    assert is_bound(model.model.layers[0].self_attn.k_proj)
    found.delete_adapter("second")
    for layer in model.model.layers:  # what injection left in the model
        layer.self_attn.k_proj = layer.self_attn.k_proj.base_layer
    found.set_adapter("default")
    assert liteboost_adaptor.undo() == []
    assert vars(BaseTuner)["inject_adapter"] is original
    assert [line for line in snapshot.differences() if "another class" in line or "class <" in line] == []
    assert not is_bound(found)


def test_a_fault_of_ours_does_not_reach_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = warmed("llama")

    def broken(*_: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Binder, "bind", broken)
        found = adapted(model, lora())
    rows = [row for row in liteboost_adaptor.status().rules if "planted" in str(row)]
    assert rows and rows[0].state == "failed"
    expected = logits(adapted(tiny_models.build("llama"), lora()))
    assert numbers.relative(logits(found), expected) <= 2e-5


SCRIPT = """
import json, sys, torch, liteboost_adaptor
from support import calls, numbers, tiny_models
torch.set_grad_enabled(False)
model = tiny_models.build("llama")
liteboost_adaptor.apply(model)
inputs = numbers.padded_inputs(model)
with calls.served() as before:
    model(**inputs)
assert "peft" not in sys.modules, "peft came too early to show anything"
import peft
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
with calls.served() as after:
    adapted(**inputs)
print(json.dumps([before.rules, after.rules]))
"""


def test_peft_may_come_after_the_model_was_bound() -> None:
    before, after = processes.python_json(SCRIPT, is_forked=True)
    assert before == after and before["linear.call"] == 15
