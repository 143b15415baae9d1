"""How much of a model runs on our ops: its own calls, unpatched, and how many of them are left when served.

The denominators come from running the unpatched model (see `coverage_trace`), not from our catalogue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import liteboost_adaptor
from liteboost_adaptor.report import FAILED, FOREIGN, REFUSED

from . import calls
from .coverage_trace import Trace, modules_called, trace

KINDS = ("norm", "rope", "attention", "gated", "experts", "linear")

# Where a gated product belongs to an MLP or an expert, by the attribute names that lead to the module.
_MLP = re.compile(r"(\w*_)?(mlps?|ffn?|feed_forward|experts?|moe)|mlp_block")
_NO_MLP = re.compile(r"\w*(attn|attention|mamba|norm|connection|temporal)\w*")
_EXPERTS = re.compile(r"(?!.*Shared).*Experts")


@dataclass
class Coverage:
    """What was measured on one model.

    Attributes:
        calls: Kind -> (calls on our ops, calls the unpatched model makes).
        unserved: Kind -> name of what still runs the original -> calls.
        rules: Rules that served calls.
        refusals: "name: reason" of everything that looks like a target and was refused.
        fallbacks: "rule: reason" -> calls that fell back.
        tallied: Kind -> calls our replacements counted, which must say the same as ``calls``.
    """

    family: str
    calls: dict[str, tuple[int, int]]
    unserved: dict[str, dict[str, int]]
    rules: tuple[str, ...]
    refusals: tuple[str, ...]
    fallbacks: dict[str, int] = field(default_factory=dict)
    tallied: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Calls on our ops over all calls."""
        served, total = (sum(column) for column in zip(*self.calls.values(), strict=True))
        return served / total


def measure(family: str, model: torch.nn.Module, run: Callable[[], Any]) -> Coverage:
    """Run ``model`` without and with us. It must be unpatched, and is again afterwards."""
    with modules_called() as called:
        before = trace(run)
    targets = _Targets(model, called, before)
    expected = targets.counts(before)
    status = liteboost_adaptor.apply(model)
    with calls.served() as served:
        left = targets.counts(trace(run))
    liteboost_adaptor.undo()
    totals = {kind: (sum(expected[kind].values()), sum(left[kind].values())) for kind in KINDS}
    return Coverage(
        family=family,
        calls={kind: (total - remaining, total) for kind, (total, remaining) in totals.items()},
        unserved={kind: dict(left[kind]) for kind in KINDS if left[kind]},
        rules=tuple(sorted(served.rules)),
        refusals=tuple(sorted(set(_refusals(status)))),
        # No program serves a run that is watched; `test_every_family` names the families that have none.
        fallbacks={
            f"{rule}: {why}": n for (rule, why), n in sorted(served.fallbacks.items()) if rule != calls.STEPS
        },
        tallied=dict(served.kinds),
    )


def _refusals(status: Any) -> list[str]:
    found = []
    for row in status.rules:
        if row.state in (REFUSED, FOREIGN, FAILED):
            assert row.reason, f"{row.id} is {row.state} without a reason"
            found += [f"{target.split(':', 1)[1]}: {row.reason}" for target in row.where]
    return found


class _Targets:
    """What of one model we mean to serve, by the objects that do it in the unpatched model."""

    def __init__(self, model: torch.nn.Module, called: dict[int, torch.nn.Module], run: Trace) -> None:
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.names = {key: type(module).__name__ for key, module in called.items()}
        self.linear = id(torch.nn.Linear.forward.__code__)
        self.attention = run.interfaces.get("AttentionInterface", set())
        askers = run.askers.get("ExpertsInterface", set())
        self.experts_functions = run.interfaces.get("ExpertsInterface", set())
        # Experts that ask no registry, told by their class, and their parts; they count matrix products.
        outside = [k for k, n in self.names.items() if _EXPERTS.fullmatch(n) and k not in askers]
        self.experts = {id(part): self.names[key] for key in outside for part in called[key].modules()}
        self.norms = {
            key: id(calls.code_of(type(module).forward))
            for key, module in called.items()
            if _is_norm(module, run)
        }
        self.mlps = {key for key in run.products if self._is_mlp(key)}
        self.rotations = dict(run.rotations)

    def _is_mlp(self, key: int) -> bool:
        parts = self.paths.get(key, "").split(".")
        return any(map(_MLP.fullmatch, parts)) and not any(map(_NO_MLP.fullmatch, parts))

    def counts(self, run: Trace) -> dict[str, Counter[str]]:
        """Calls of the originals in ``run``: kind -> name -> calls."""
        found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        for key, code in self.norms.items():
            found["norm"][self.names[key]] += run.methods[code, key]
        for key, name in self.experts.items():
            found["experts"][name] += run.matmuls[key]
        for code in self.experts_functions:
            found["experts"][_name(run, code)] += run.calls[code]
        for code in self.rotations:
            found["rope"][_name(run, code)] += run.rotations[code]
        for code in self.attention:
            found["attention"][_name(run, code)] += run.calls[code]
        for key in self.mlps:
            found["gated"][self.names.get(key, "")] += run.products[key]
        for (code, key), n in run.methods.items():
            if code == self.linear:
                found["linear"][self._linear_name(key)] += n
        return {kind: +counter for kind, counter in found.items()}

    def _linear_name(self, key: int) -> str:
        """The attribute a layer goes by in its parent, which says more than its class."""
        return re.sub(r"(^|\.)\d+(?=\.|$)", "", self.paths.get(key, "?")).rsplit(".", 1)[-1]


def _name(run: Trace, code: int) -> str:
    return run.codes[code].co_qualname if code in run.codes else ""


def _is_norm(module: torch.nn.Module, run: Trace) -> bool:
    """A module without parts (but an activation) whose own code normalises, or whose class says so."""
    if any("activation" not in type(child).__module__ for child in module.children()):
        return False
    return id(module) in run.normalised or "norm" in type(module).__name__.lower()
