"""Do two variants compute the same? Answered before any of them is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Largest relative error of logits that rounding explains, by dtype. Eager attention against sdpa, both of
#: transformers, differs by 1.5e-6 and 2.1e-2 in float32 and bfloat16 (28 layers, random weights); these are
#: ten and three times as much.
BOUNDS = {"float32": 2e-5, "float16": 8e-3, "bfloat16": 6e-2}
#: The same where activations, or keys and values, are rounded to 8 bits: what another rounding moves over a
#: tie differs by a whole step from there on. With activations on the same integers, level 2 and transformers'
#: code differ by 6.4e-2 in bfloat16.
ROUNDED_BOUNDS = {"float32": 2e-2, "float16": 4e-2, "bfloat16": 1.2e-1}


@dataclass(frozen=True)
class Agreement:
    """How far the logits of a variant are from those of the reference.

    Attributes:
        relative_l2: Larger of prefill and decode: length of the difference over length of the reference.
        relative_max: Larger of prefill and decode: largest difference over the largest logit. A few wrong
            rows of the vocabulary vanish in the length; here they do not.
        equal_tokens: Decode steps at which greedy search chooses the same token.
        tokens: All decode steps.
        bound: What both errors must stay below.
    """

    relative_l2: float
    relative_max: float
    equal_tokens: int
    tokens: int
    bound: float

    @property
    def agrees(self) -> bool:
        """Whether both errors are numbers within the bound. In float32 the tokens must be equal too."""
        # Written so that NaN, which compares false, is a disagreement.
        within = self.relative_l2 <= self.bound and self.relative_max <= self.bound
        return within and (self.bound > BOUNDS["float32"] or self.equal_tokens == self.tokens)

    def __str__(self) -> str:
        return (
            f"relative error {self.relative_l2:.2e} (length), {self.relative_max:.2e} (largest), "
            f"{self.equal_tokens} of {self.tokens} tokens equal; bound {self.bound:.0e}"
        )


def compare(
    reference: dict[str, torch.Tensor],
    candidate: dict[str, torch.Tensor],
    dtype_name: str,
    rounds: bool = False,
) -> Agreement:
    """Compare what two workers saved.

    Args:
        reference: ``prefill`` ``[B, P, V]`` and ``decode`` ``[B, new, V]`` of the reference, fp32.
        candidate: The same of the variant, its decode steps forced along the reference's tokens.
        dtype_name: Chooses the bound.
        rounds: Whether the variant, as its reference, rounds inputs of layers or keys and values to 8 bits.
    """
    l2 = largest = 0.0
    for phase in ("prefill", "decode"):
        expected, found = reference[phase], candidate[phase]
        difference = found - expected
        l2 = _worst(l2, float(difference.norm() / expected.norm()))
        largest = _worst(largest, float(difference.abs().max() / expected.abs().max()))
    bounds = ROUNDED_BOUNDS if rounds else BOUNDS
    chosen = candidate["decode"].argmax(-1) == reference["decode"].argmax(-1)
    return Agreement(l2, largest, int(chosen.sum()), chosen.numel(), bounds[dtype_name])


def _worst(first: float, second: float) -> float:
    """The larger; NaN if either is (``max`` would drop it or not, depending on the order)."""
    return second if second != second or second > first else first
