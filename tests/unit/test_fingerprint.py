"""The digest names a computation: blind to spelling, sensitive to meaning."""

import functools

import pytest
import torch
import wrapt
from torch import nn
from torch.nn import functional as F

from liteboost_adaptor.engine.fingerprint import Opaque, behind_wrapper, fingerprint


def base(x, weight):
    """Some documentation."""
    input_dtype = x.dtype
    x = x.to(torch.float32)
    return weight * x.to(input_dtype)


def renamed(hidden_states, scale):
    kept = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    return scale * hidden_states.to(kept)


def annotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    input_dtype: torch.dtype = x.dtype
    x = x.to(torch.float32)
    # a comment
    return weight * x.to(input_dtype)


def other_constant(x, weight):
    input_dtype = x.dtype
    x = x.to(torch.float64)
    return weight * x.to(input_dtype)


def other_order(x, weight):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    return (weight * x).to(input_dtype)


def swapped_arguments(weight, x):
    input_dtype = x.dtype
    x = x.to(torch.float32)
    return weight * x.to(input_dtype)


@pytest.mark.parametrize("same", [renamed, annotated])
def test_spelling_does_not_count(same):
    assert fingerprint(same).digest == fingerprint(base).digest


@pytest.mark.parametrize("other", [other_constant, other_order, swapped_arguments])
def test_meaning_does(other):
    assert fingerprint(other).digest != fingerprint(base).digest


def half(x):
    return torch.cat((-x[..., 1:], x[..., :1]), dim=-1)


def calls_half(x):
    return x + half(x)


def test_a_callee_is_part_of_the_digest(monkeypatch):
    before = fingerprint(calls_half)

    def half(x):
        return torch.cat((x[..., 1:], -x[..., :1]), dim=-1)

    monkeypatch.setitem(globals(), "half", half)
    fingerprint.__globals__["_fingerprint"].cache_clear()
    after = fingerprint(calls_half)
    assert before.digest != after.digest
    assert "cat" in before.operations


def with_default(x, scale=2.0):
    return x * scale


def calls_with_default(x):
    return with_default(x)


def test_defaults_of_a_callee_are_part_of_the_digest(monkeypatch):
    before = fingerprint(calls_with_default).digest
    monkeypatch.setattr(with_default, "__defaults__", (3.0,))
    fingerprint.__globals__["_fingerprint"].cache_clear()
    assert fingerprint(calls_with_default).digest != before


class ByModuleAlias(nn.Module):
    def forward(self, x):
        return F.silu(x)


class ByFullName(nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x)


class ByOtherFunction(nn.Module):
    def forward(self, x):
        return F.gelu(x)


def test_torch_functions_are_known_by_what_they_are():
    alias = fingerprint(ByModuleAlias.forward, ByModuleAlias)
    assert alias.digest == fingerprint(ByFullName.forward, ByFullName).digest
    assert alias.digest != fingerprint(ByOtherFunction.forward, ByOtherFunction).digest


class HoldsCallable(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


def test_callables_of_the_instance_are_part_of_the_digest():
    def digest(act):
        return fingerprint(HoldsCallable.forward, HoldsCallable, HoldsCallable(act)).digest

    tanh = functools.partial(F.gelu, approximate="tanh")
    assert len({digest(F.gelu), digest(F.silu), digest(tanh), digest(nn.SiLU())}) == 4
    assert digest(tanh) == digest(functools.partial(F.gelu, approximate="tanh"))


class CallsMethod(nn.Module):
    def scale(self, x):
        return x * 2

    def forward(self, x):
        return self.scale(x)


class OverridesMethod(CallsMethod):
    def scale(self, x):
        return x * 3


def test_methods_are_those_of_the_instance():
    assert (
        fingerprint(CallsMethod.forward, CallsMethod).digest
        != fingerprint(OverridesMethod.forward, OverridesMethod).digest
    )


def branches(x):
    if x.shape[-2] > 4096:
        return x
    return x * 1


def test_control_flow_is_an_operation():
    assert {"If", "Compare", "Gt"} <= fingerprint(branches).operations


def test_wrapped_functions_are_opaque():
    @functools.wraps(base)
    def wrapper(*args):
        return base(*args)

    for foreign in (wrapper, wrapt.FunctionWrapper(base, lambda f, i, a, k: f(*a, **k))):
        with pytest.raises(Opaque, match="wrapped"):
            fingerprint(foreign)


def test_a_builtin_is_opaque():
    with pytest.raises(Opaque, match="not a plain function"):
        fingerprint(torch.rsqrt)


def test_code_that_is_not_its_source_is_opaque():
    def impostor(x, weight):
        return x

    impostor.__code__ = base.__code__.replace(
        co_consts=tuple(impostor.__code__.co_consts) + base.__code__.co_consts
    )
    with pytest.raises(Opaque):
        fingerprint(impostor)


def test_code_without_source_is_opaque():
    namespace = {}
    exec("def made(x):\n    return x", namespace)
    with pytest.raises(Opaque, match="source"):
        fingerprint(namespace["made"])


unknown = object()


def reads_unknown(x):
    return x * unknown


def test_an_unknown_global_is_opaque():
    with pytest.raises(Opaque, match="unknown"):
        fingerprint(reads_unknown)


def test_digests_of_the_catalogue_are_stable():
    """Written down, because a change of the serialiser would orphan every rule."""
    from transformers.models.llama import modeling_llama as llama

    assert fingerprint(llama.LlamaRMSNorm.forward, llama.LlamaRMSNorm).digest == "64c708187c897e4a"
    assert fingerprint(llama.apply_rotary_pos_emb).digest == "1151e479e944f607"


def doubling(base: type[nn.Module]) -> type[nn.Module]:
    """A class of one text over a base of choice."""

    class Doubling(base):
        def forward(self, x):
            return 2 * super().forward(x)

    return Doubling


def test_what_super_reaches_counts():
    over_norm, over_other = doubling(nn.LayerNorm), doubling(nn.GroupNorm)
    first, second = (fingerprint(cls.forward, cls) for cls in (over_norm, over_other))
    assert first.digest != second.digest
    assert "layer_norm" in first.operations and "group_norm" in second.operations
    again = doubling(nn.LayerNorm)
    assert fingerprint(again.forward, again).digest == first.digest


def test_super_with_arguments_is_opaque():
    class Base(nn.LayerNorm):
        def forward(self, x):
            return super(nn.LayerNorm, self).forward(x)

    with pytest.raises(Opaque, match="super"):
        fingerprint(Base.forward, Base)


def in_a_comprehension(x, weight):
    x, weight = (part.to(torch.float32) for part in (x, weight))
    return sum([x * part for part in weight])


def in_one_name(x, weight):
    return [x * each for each in weight]


def in_one_with_other_names(a, b):
    return [a * row for row in b]


def with_another_sum(x, weight):
    x, weight = (part.to(torch.float32) for part in (x, weight))
    return sum([x + part for part in weight])


part = 2.0


def with_a_name_that_is_also_a_global(x):
    return sum([part for part in x]), part


def test_comprehensions_bind_names_of_their_own():
    assert fingerprint(in_a_comprehension).digest != fingerprint(with_another_sum).digest
    assert fingerprint(in_one_name).digest == fingerprint(in_one_with_other_names).digest
    with pytest.raises(Opaque, match="part inside a comprehension and for something else"):
        fingerprint(with_a_name_that_is_also_a_global)


def wrapped(function, note=None):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if note is not None:
            note(args)
        return function(*args, **kwargs)

    return wrapper


def test_a_wrapper_that_holds_nothing_else_is_seen_through():
    inner, digest = behind_wrapper(wrapped(base))
    assert inner is base and digest == behind_wrapper(wrapped(renamed))[1]
    noting = wrapped(base, print)  # the same text, with another function in it
    assert behind_wrapper(noting) == (noting, "")
    assert behind_wrapper(base) == (base, "")
    for proxy in (wrapt.FunctionWrapper(base, lambda f, _, args, kwargs: f(*args)), wrapped(wrapped(base))):
        assert behind_wrapper(proxy)[0] is not base
    with pytest.raises(Opaque, match="wrapped"):  # by itself the digest of the body is not the wrapper's
        fingerprint(wrapped(base))
