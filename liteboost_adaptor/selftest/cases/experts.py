"""Cases of the experts: some without a token, slots without an expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..case import Case, Kind, makes_cases

#: (tokens, slots, experts, in_features, out_features)
SIZES = ((1, 2, 4, 64, 96), (9, 3, 8, 96, 64))


@makes_cases("experts_linear", "", "bias")
def experts_linear(kind: Kind) -> Iterator[Case]:
    for tokens, slots, experts, inputs, outputs in SIZES:
        weight = kind.normal(experts, outputs, inputs, scale=inputs**-0.5)
        index = kind.integers(experts + 1, tokens, slots)
        label = f"{tokens} x {slots} of {experts}, [{outputs}, {inputs}]"
        x, bias = kind.normal(tokens, inputs), None
        if "bias" in kind.words:
            bias = kind.normal(experts, outputs)
        yield Case(label, {"x": x, "weight": weight, "bias": bias, "index": index})
        x = kind.normal(tokens, slots, inputs)
        yield Case(f"{label}, a row for each slot", {"x": x, "weight": weight, "bias": bias, "index": index})


@makes_cases("experts_combine")
def experts_combine(kind: Kind) -> Iterator[Case]:
    for tokens, slots, _, features, _ in SIZES:
        y, scores = kind.normal(tokens, slots, features), kind.normal(tokens, slots)
        label = f"[{tokens}, {slots}, {features}]"
        yield Case(label, {"y": y, "scores": scores})
        yield Case(f"{label}, fp32 scores", {"y": y, "scores": scores.to(torch.float32)})
