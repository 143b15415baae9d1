"""Cases of the experts: some without a token, slots without an expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ops.activation import ACTIVATIONS
from ..case import Case, Kind, makes_cases
from .activation import CLIPPED

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


@makes_cases("_npu_topk_softmax")
def topk_softmax(kind: Kind) -> Iterator[Case]:
    for tokens, k, experts in ((1, 2, 4), (9, 8, 128), (3, 4, 60)):
        # No two that are equal, or either may be chosen; of all numbers the dtypes have.
        logits = torch.stack([kind.different(experts, experts) for _ in range(tokens)]) / 16 - 2
        for renormalize in (False, True):
            label = f"{k} of {experts} for {tokens}{', renormalized' if renormalize else ''}"
            yield Case(label, {"logits": logits.to(kind.dtype), "k": k, "renormalize": renormalize})


@makes_cases("_npu_grouped_topk")
def grouped_topk(kind: Kind) -> Iterator[Case]:
    for tokens, k, experts, groups, topk_group in ((1, 8, 256, 8, 4), (5, 4, 16, 4, 2), (3, 6, 64, 1, 1)):
        # No two that are equal, in any dtype, or either may be chosen.
        logits = torch.stack([kind.different(experts, experts) for _ in range(tokens)]) / 32 - 4
        arguments = {"logits": logits.to(kind.dtype), "bias": kind.normal(experts, scale=0.1), "k": k}
        arguments |= {"groups": groups, "topk_group": topk_group, "factor": 2.5, "eps": 1e-20}
        yield Case(f"{k} of {experts} in {topk_group} of {groups} groups for {tokens}", arguments)


@makes_cases("_npu_fused_experts", *ACTIVATIONS, "silu clipped")
def fused_experts(kind: Kind) -> Iterator[Case]:
    gating = CLIPPED if "clipped" in kind.words else {"activation": kind.layout}
    for tokens, slots, experts, inputs, size in SIZES:
        up = kind.normal(experts, 2 * size, inputs, scale=inputs**-0.5)
        down = kind.normal(experts, inputs, size, scale=size**-0.5)
        arguments = {"x": kind.normal(tokens, inputs), "up": up, "up_bias": None, "down": down}
        arguments |= {"down_bias": None, "scores": kind.normal(tokens, slots)}
        arguments |= {"index": kind.integers(experts + 1, tokens, slots), **gating}
        label = f"{tokens} x {slots} of {experts}, [{size}, {inputs}]"
        yield Case(label, arguments)
        biases = {"up_bias": kind.normal(experts, 2 * size), "down_bias": kind.normal(experts, inputs)}
        chosen = torch.stack([kind.different(experts, slots) for _ in range(tokens)]).to(torch.int32)
        turned = {"up": up.mT.contiguous().mT, "interleaved": True, "index": chosen}
        yield Case(f"{label}, biases, in turns", arguments | biases | turned)
        scores = {"scores": kind.normal(tokens, slots).to(torch.float32)}
        yield Case(f"{label}, fp32 scores", arguments | scores)
