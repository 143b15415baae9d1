"""What a step was recorded with is changed between two tokens: the next token is the right one."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache, DynamicLayer

from liteboost_adaptor.program import shadow, step
from liteboost_adaptor.program.reasons import STOPS

from .conftest import Pair, reasons, served


def layer(model: torch.nn.Module) -> Any:
    return model.model.layers[1]


def doubled(*values: Any) -> Any:
    """A forward hook: twice what the module gives."""
    return values[-1] * 2


class Shifted(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def a_forward_of_its_own(model: torch.nn.Module) -> None:
    norm = layer(model).post_attention_layernorm
    original = norm.forward
    norm.forward = lambda x: original(x) * 2


def another_child(model: torch.nn.Module) -> None:
    layer(model).mlp.down_proj = Shifted(layer(model).mlp.down_proj)


def an_adapter_on_a_linear(model: torch.nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), model)


def loaded_values(model: torch.nn.Module) -> None:
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def assigned_values(model: torch.nn.Module) -> None:
    state = {name: (value * 1.5).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def an_optimizer_step(model: torch.nn.Module) -> None:
    weight = layer(model).mlp.down_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    weight.grad = None


def exchanged_class(model: torch.nn.Module) -> None:
    norm = layer(model).input_layernorm
    norm.__class__ = type("Louder", (type(norm),), {"forward": lambda self, x: x * 3})


class Doubling(torch.nn.Parameter):
    """A weight whose products count double."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


def exchanged_class_of_a_weight(model: torch.nn.Module) -> None:
    layer(model).self_attn.q_proj.weight.__class__ = Doubling


CHANGES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "the class of a weight": exchanged_class_of_a_weight,
    "a hook": lambda m: layer(m).mlp.register_forward_hook(doubled),
    "a hook on a leaf": lambda m: layer(m).mlp.down_proj.register_forward_hook(doubled),
    "a hook before": lambda m: layer(m).mlp.register_forward_pre_hook(lambda _, xs: (xs[0] * 2,)),
    "a hook on the model": lambda m: m.model.norm.register_forward_hook(doubled),
    "a forward of its own": a_forward_of_its_own,
    "another child": another_child,
    "an adapter": an_adapter_on_a_linear,
    "a weight's data": lambda m: setattr(layer(m).mlp.down_proj.weight, "data", torch.ones(64, 96) / 64),
    "a weight's data, in place": lambda m: layer(m).mlp.down_proj.weight.data.mul_(2),
    "a weight": lambda m: setattr(
        layer(m).mlp.down_proj, "weight", torch.nn.Parameter(layer(m).mlp.down_proj.weight * 2)
    ),
    "an optimizer step": an_optimizer_step,
    "loaded values": loaded_values,
    "loaded and assigned values": assigned_values,
    "a class": exchanged_class,
    "a number": lambda m: setattr(layer(m).input_layernorm, "variance_epsilon", 0.5),
    "a number of attention": lambda m: setattr(layer(m).self_attn, "scaling", 0.9),
    "a buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(2),
    "another buffer": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 2),
    "the configuration": lambda m: setattr(m.config, "_attn_implementation", "eager"),
    "a module left out": lambda m: setattr(m.model, "layers", m.model.layers[:1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_tokens_is_seen(
    recorded: Pair, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "is_due", lambda runs: False)  # which would find it, too, but not in each run
    unchanged = copy.deepcopy(recorded.caches[1])
    recorded.both(CHANGES[change])
    ours, theirs = recorded.step()
    assert torch.allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert unchanged.get_seq_length() + 1 == recorded.caches[0].get_seq_length()
    recorded.agree(8)


def test_a_change_of_dtype_is_seen(recorded: Pair) -> None:
    recorded.both(lambda model: model.bfloat16())
    with pytest.raises(RuntimeError):  # as transformers does: what the cache keeps is float32
        recorded.theirs(recorded.tokens(1, 1), past_key_values=recorded.caches[1])
    with pytest.raises(RuntimeError):
        recorded.ours(recorded.tokens(1, 1), past_key_values=recorded.caches[0])
    recorded.start()
    recorded.agree(8, tolerance=2e-2)


def test_a_parameter_of_another_layout_is_named_as_the_reason(
    recorded: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transpose(model: torch.nn.Module) -> None:
        weight = layer(model).mlp.down_proj.weight
        weight.data = weight.data.t().contiguous().t()

    monkeypatch.setattr(
        step, "RECORDED_AT", 1000
    )  # not recorded anew at once, which would be the reason then
    before = Counter(reasons())
    recorded.both(transpose)
    recorded.agree()
    assert Counter(reasons()) - before == {STOPS[1]: 1}


def test_a_patched_class_is_seen(recorded: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(recorded.theirs.model.layers[0].mlp)
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: original(self, x) * 2)
    recorded.agree(2)
    monkeypatch.undo()
    recorded.agree(2)


def test_a_patched_function_is_seen(recorded: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = sys.modules[type(recorded.theirs).__module__]
    masks = modeling.create_causal_mask
    called = []
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **kw: called.append(1) or masks(**kw))
    recorded.agree(1)
    assert len(called) == 2  # ours called it, too


def test_a_function_of_somebody_else_is_called_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    modeling, called = sys.modules[type(pair.theirs).__module__], []
    masks = modeling.create_causal_mask
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **kw: called.append(1) or masks(**kw))
    pair.start()
    before = served()
    pair.agree(8)
    assert len(called) == 2 * 9 and served() == before
    assert any(reason.startswith("changes") for reason in reasons())


def test_the_first_copy_of_a_cache_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python notes the slots of a class in its namespace when the first instance is copied or pickled."""
    for cls in (DynamicCache, DynamicLayer, torch.Tensor):
        monkeypatch.delattr(cls, "__slotnames__", raising=False)
    pair = Pair()
    pair.start()
    pair.agree(40)
    assert served()
    copied = copy.deepcopy(pair.caches[0])
    pickle.dumps(torch.ones(2))
    assert all("__slotnames__" in vars(cls) for cls in (DynamicCache, DynamicLayer, torch.Tensor))
    pair.agree(2)  # the cache takes memory of its own again
    before = served()
    pair.agree(3)
    assert served() == before + 3
    assert copied.get_seq_length() + 5 == pair.caches[0].get_seq_length()


def test_who_is_told_of_collected_garbage_is_no_part_of_a_step() -> None:
    """As hypothesis is. Every allocation collects here; what it calls belongs to nobody's model."""
    pair, collections = Pair(), []
    foreign = {"__name__": "somebody.elses", "collections": collections}
    exec("def told(phase, info):\n    collections.append(phase)", foreign)
    pair.start()
    gc.callbacks.append(foreign["told"])
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        before = served()
        pair.agree(8)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(foreign["told"])
    assert collections and gc.isenabled()
    assert served() > before


def test_a_global_hook_is_called(recorded: Pair) -> None:
    seen = []
    handle = nn_module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        recorded.agree(1)
    finally:
        handle.remove()
    assert any(module is layer(recorded.ours).mlp for module in seen)


def test_a_dispatch_mode_sees_the_operators(recorded: Pair) -> None:
    seen = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    before = served()
    with Noting():
        recorded.ours(recorded.tokens(1, 1), past_key_values=recorded.caches[0])
    assert seen and served() == before


def test_gradients_take_the_original(recorded: Pair) -> None:
    before = served()
    with torch.enable_grad():
        ours, theirs = recorded.step()
        ours.logits.sum().backward()
        theirs.logits.sum().backward()
    ours_grad = layer(recorded.ours).mlp.down_proj.weight.grad
    assert torch.allclose(ours_grad, layer(recorded.theirs).mlp.down_proj.weight.grad, atol=1e-4)
    assert served() == before


def test_what_undo_gives_back_is_not_served(recorded: Pair) -> None:
    import liteboost_adaptor

    before = served()
    liteboost_adaptor.undo()
    recorded.agree(2)
    assert served() == before
