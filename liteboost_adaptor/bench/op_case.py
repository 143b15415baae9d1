"""One op with its inputs, as ``bench.ops`` compares and times it, and the sizes they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.registry import ops as references

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 151_936
#: Keys that a decode step attends to.
CONTEXT = 512
#: [out_features, in_features] of the products of a layer.
LAYER_WEIGHTS = {
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k, v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate, up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
#: Weights together larger than any cache are taken in turn, as a model takes its layers'.
WEIGHT_BYTES = 256 << 20
EPS = 1e-6
EXPERTS, EXPERTS_A_TOKEN, EXPERT_HIDDEN, EXPERT_INTERMEDIATE = 64, 8, 2048, 768
DELTA_KEY_HEADS, DELTA_VALUE_HEADS = 16, 32

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One op with one set of inputs.

    Attributes:
        op: Name without namespace.
        shapes: Of the inputs, for the table.
        dtype: Of the inputs.
        ours: One call of the op.
        original: The ATen sequence, with the same inputs.
        exact: The reference in float64.
        weights: What `ours` and `original` take theirs from, in turn, one a call; None for ops whose inputs
            may stay in a cache.
        terms: How many products are added up for a result.
    """

    op: str
    shapes: str
    dtype: torch.dtype
    ours: Run
    original: Run
    exact: Run
    weights: Iterator[Tensor] | None = None
    terms: int = 1


def exact_of(name: str, *args: object, **kwargs: object) -> object:
    doubled = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
    return references()[name].reference(*doubled, **kwargs)


def case(name: str, shapes: str, original: Callable[..., object], *args: object, **kwargs: object) -> Case:
    op = getattr(torch.ops.liteboost, name)
    return Case(
        name,
        shapes,
        next(arg.dtype for arg in args if isinstance(arg, Tensor)),
        lambda: op(*args, **kwargs),
        lambda: original(*args),
        lambda: exact_of(name, *args, **kwargs),
    )
