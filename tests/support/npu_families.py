"""Families on an NPU in bf16: whether every norm, rotation, attention and gate is an aclnn call of ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, quantize_model

from . import coverage, families, families_matrix, numbers, tiny_models
from .families_matrix import Run, hangs_on_no_close_choice, logits_with, paddings

HEAD_DIM, LENGTH = 64, 12
#: Heads and kv heads, in the order they are tried.
HEADS = ((4, 2), (4, 4), (2, 2), (4, 1))
#: Share of the positions of `SEEDS` that must be compared. Routers of random weights leave few choices clear,
#: and which depends on how the CPU rounds; where there are too few, further models are compared as well.
LEAST_KEPT = 0.1
KINDS = ("norm", "rope", "attention", "gated")
SEEDS, FURTHER_SEEDS = (0, 1, 2), (3, 4, 5)
#: Fused operators called by the model's own code, and in recorded steps with merged weights.
LEVELS = (1, 2)


@dataclass
class Outcome:
    """What one family showed.

    Attributes:
        unserved: What still runs the original, or fell back to the reference on the NPU, in words.
        launches: Of our ops by name, counted where they launch.
        ours: Distance of our logits from fp32 over all seeds, relative, at the level that is farther.
        own: That of the unpatched model in bf16 on the CPU.
        kept: Positions compared, as a share of those of `SEEDS`; the others hang on too close a choice.
    """

    family: str
    unserved: list[str] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)
    ours: float = 0.0
    own: float = 0.0
    kept: float = 0.0

    @property
    def is_whole(self) -> bool:
        """No norm, rotation, attention or gate but as an aclnn call."""
        return not self.unserved

    @property
    def is_near(self) -> bool:
        """At most 1.5 times as far as the original, or one rounding of the logits."""
        return self.kept >= LEAST_KEPT and self.ours <= max(1.5 * self.own, numbers.ULP[torch.bfloat16])


def build(family: str, seed: int = 0) -> torch.nn.Module:
    """A tiny model with heads of `HEAD_DIM`, in fp32 on the CPU."""
    fault: Exception | None = None
    for heads in HEADS:
        try:
            return tiny_models.build(family, seed, tiny_models.sizes(family, HEAD_DIM, *heads))
        except Exception as error:  # noqa: BLE001 - whatever a configuration class has against a value
            fault = error
    raise AssertionError(f"{family} has no model with heads of {HEAD_DIM}: {fault}")


def examine(family: str) -> Outcome:
    """Measure a family: coverage on one seed, distances over all."""
    outcome = Outcome(family)
    liteboost_adaptor.apply(level=0)  # the original, too, has what it needs beside older torch_npu
    model = families.cast(build(family), torch.bfloat16).to("npu")
    plain, padded = _inputs(model, 0, "npu")
    assert native_npu.load().loaded
    torch.ops.liteboost._npu_forget_counts()
    measured = coverage.measure(family, model, lambda: _run(model, plain, padded))
    for kind in KINDS:
        outcome.unserved += [f"{kind}: {name} x {n}" for name, n in measured.unserved.get(kind, {}).items()]
    outcome.launches = {op: n for op, reason, n in native_npu.calls() if not reason}
    distances: list[tuple[float, ...]] = []
    for seed in (*SEEDS, *FURTHER_SEEDS):
        if seed in FURTHER_SEEDS and outcome.kept >= LEAST_KEPT:
            break
        distances.append(_distances(family, seed))
        outcome.ours, outcome.own, share = _relative(distances)
        outcome.kept = share * len(distances) / len(SEEDS)
    # Of the measured calls and of those of the runs compared: a recorded step may call what no code calls.
    outcome.unserved += [f"{op}: {reason} x {n}" for op, reason, n in native_npu.calls() if reason]
    return outcome


def examine_quantized(family: str, scheme: str) -> Outcome:
    """Measure a family whose weights are integers, at level 2, beside its dequantized weights."""
    outcome = Outcome(family)
    assert native_npu.load().loaded
    torch.ops.liteboost._npu_forget_counts()
    distances: list[tuple[float, ...]] = []
    for seed in SEEDS:  # one will do, where enough positions can be compared
        distances.append(_quantized(family, scheme, seed))
        outcome.ours, outcome.own, outcome.kept = _relative(distances)
        if outcome.kept >= LEAST_KEPT:
            break
    for op, reason, n in native_npu.calls():
        if op in ("linear_packed", "linear_w8a8", "experts_packed") and reason:
            outcome.unserved.append(f"{op}: {reason} x {n}")
        elif not reason:
            outcome.launches[op] = n
    return outcome


def _quantized(family: str, scheme: str, seed: int) -> tuple[float, ...]:
    """As `_distances`, of one level."""
    liteboost_adaptor.apply(level=0)
    model = families.cast(build(family, seed), torch.bfloat16)
    plain, padded = _inputs(model, seed, "cpu")
    with liteboost_adaptor.patched(model, level=0):
        quantize_model(model, LiteBoostConfig(scheme))
        exact_model, own_model = (_multiplied_out(model, dtype) for dtype in (torch.float32, model.dtype))
        exact = Run(families.cast(exact_model, torch.float32), plain, padded, None)
        own = Run(own_model, plain, padded, exact.tokens)
    kept = hangs_on_no_close_choice(exact, own, LENGTH) & own.logits.isfinite().all(-1)
    with liteboost_adaptor.patched(model.to("npu"), level=2):
        found = logits_with(model, *_inputs(model, seed, "npu"), exact.tokens.to("npu")).cpu()
    return _squares([found, own.logits], exact, kept)


def _multiplied_out(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy in plain layers, whose inputs are rounded where those of the quantized layer are."""
    twin = copy.deepcopy(model).dequantize(dtype=dtype)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear) and layer.scheme.quantizes_activations:
            twin.get_submodule(name).register_forward_pre_hook(
                lambda _, x, layer=layer: (layer.quantized_input(x[0]),)
            )
    return twin


def _squares(runs: list[torch.Tensor], exact: Run, kept: torch.Tensor) -> tuple[float, ...]:
    """Squared distances of runs, the square of what they are held against, positions compared and all."""
    wanted = exact.logits[kept].double()
    far = [float((logits[kept].double() - wanted).norm() ** 2) for logits in runs]
    return *far, float(wanted.norm() ** 2), int(kept.sum()), kept.numel()


def _relative(distances: list[tuple[float, ...]]) -> tuple[float, float, float]:
    """Over all of `_squares`: relative distances, ours of the farthest, and the share compared."""
    *ours, own, wanted, kept, positions = map(sum, zip(*distances, strict=True))
    if not kept:
        return float("inf"), 0.0, 0.0
    return (max(ours) / wanted) ** 0.5, (own / wanted) ** 0.5, kept / positions


def _distances(family: str, seed: int) -> tuple[float, ...]:
    """`_squares` of ours at each level and of the original, held against fp32."""
    # What transformers gets wrong wherever torch_npu is (additive biases) is no measure of ours.
    liteboost_adaptor.apply(level=0)
    model = families.cast(build(family, seed), torch.bfloat16)
    plain, padded = _inputs(model, seed, "cpu")
    with liteboost_adaptor.patched(model, level=0):
        exact = Run(families.cast(model, torch.float32), plain, padded, None)
        own = Run(families.cast(model, torch.bfloat16), plain, padded, exact.tokens)
    kept = hangs_on_no_close_choice(exact, own, LENGTH) & own.logits.isfinite().all(-1)
    model = model.to("npu")
    found = []
    for level in LEVELS:
        with liteboost_adaptor.patched(model, level=level):
            logits = logits_with(model, *_inputs(model, seed, "npu"), exact.tokens.to("npu"))
        found.append(logits.cpu())
    return _squares([*found, own.logits], exact, kept)


def _inputs(model: torch.nn.Module, seed: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    both = (
        families.inputs_of(model, LENGTH, (0, 0), seed),
        families.inputs_of(model, LENGTH, paddings(LENGTH), seed),
    )
    return tuple({name: _to(value, device) for name, value in inputs.items()} for inputs in both)


def _to(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _run(model: torch.nn.Module, plain: dict[str, Any], padded: dict[str, Any]) -> None:
    families.prefill(model, plain)
    families.decode(model, padded, families_matrix.STEPS)
