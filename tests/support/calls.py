"""Which path ran: calls of the original functions, counted by code object, and calls our ops served."""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from liteboost_adaptor.program import reasons
from liteboost_adaptor.report import report

#: Families of rules, as `originals` groups the code they replace.
KINDS = ("norm", "rope", "activation", "attention", "linear")


def modeling_modules(model: torch.nn.Module) -> list[types.ModuleType]:
    """The Python modules that define the classes of ``model``'s parts, transformers' or remote ones."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.split(".")[0] != "torch"]


def originals(model: torch.nn.Module) -> dict[types.CodeType, str]:
    """Code object -> kind, for every function of an unpatched ``model`` that ours should replace."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    codes = {code_of(sdpa_attention_forward): "attention", code_of(torch.nn.Linear.forward): "linear"}
    for module in modeling_modules(model):
        for name, kind in (("apply_rotary_pos_emb", "rope"), ("eager_attention_forward", "attention")):
            if hasattr(module, name):
                codes[code_of(getattr(module, name))] = kind
    for part in model.modules():
        cls = type(part)
        if "Norm" in cls.__name__:
            codes[code_of(cls.forward)] = "norm"
        elif cls.__name__.endswith("Experts") and hasattr(cls, "_apply_gate"):
            codes[code_of(cls._apply_gate)] = "activation"
        elif "activation" in cls.__module__:
            codes[code_of(cls.forward)] = "activation"
    return codes


def code_of(function: Any) -> types.CodeType:
    """The code object of the plain function behind ``function``."""
    return inspect.unwrap(function).__code__


def count(codes: dict[types.CodeType, str], action: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Result of ``action`` and how often the functions with these code objects were called in it, by kind."""
    seen: Counter[str] = Counter()

    def observe(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            seen[codes[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        result = action()
    finally:
        sys.setprofile(before)
    return result, seen


def counters() -> Counter[str]:
    """Rule id -> calls served so far in this process."""
    return Counter({rule: counter.calls for rule, counter in report.counters.items() if counter.calls})


def fallbacks() -> Counter[tuple[str, str]]:
    """(rule id, reason) -> calls that fell back to the original so far in this process."""
    return Counter(
        {(rule, why): n for rule, counter in report.counters.items() for why, n in counter.fallbacks.items()}
    )


#: The rule of recorded steps.
STEPS = "step.program"


def faults_of_steps(counted: Counter[str]) -> list[str]:
    """Of reasons counted by ``step.program``: why there is no program, not what comes before there is one."""
    return [why for why in counted if why not in reasons.UNDERWAY]


class Served:
    """What happened inside `served`: by rule, and by kind of `originals`."""

    def __init__(self) -> None:
        self.rules: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    @property
    def kinds(self) -> Counter[str]:
        """Calls by kind: every rule of a family together; ``mlp`` rules are activations."""
        kinds: Counter[str] = Counter()
        for rule, calls in self.rules.items():
            family = rule.split(".")[0]
            kinds["activation" if family == "mlp" else family] += calls
        return kinds


@contextmanager
def served() -> Iterator[Served]:
    """Count what our replacements serve, and what falls back, inside the block.

    Not the steps that come before there is a program.
    """
    found, calls, handed_back = Served(), counters(), fallbacks()
    yield found
    found.rules = counters() - calls
    new = fallbacks() - handed_back
    faults = faults_of_steps(Counter({why: n for (rule, why), n in new.items() if rule == STEPS}))
    found.fallbacks = Counter({key: n for key, n in new.items() if key[0] != STEPS or key[1] in faults})
