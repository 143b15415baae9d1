"""Run an original and its would-be replacement on the same hard inputs and compare.

A probe is the second of two conditions for a body that is not in the catalogue (the first: it uses
only operations of the family). It never runs in an import hook, and its verdict is cached by digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Largest error over the largest value. fp32: sums in another order. bf16: a rounding or two.
_LARGEST = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
#: Share of bf16 elements that may differ at all where both round at the same places. Another rounding
#: *order* changes a quarter of them.
_SHARE = 0.02

Case = tuple[str, Any, tuple[Any, ...]] | tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def probe(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    cases: Callable[[torch.dtype], Iterable[Case]],
    same_rounding: bool,
) -> str:
    """Why the two differ, or an empty string.

    Args:
        original, replacement: Called as ``f(instance, *args)``, or ``f(*args)`` if the instance is ``None``.
        cases: For a dtype, yields (description, instance or ``None``, args), and keyword arguments if any.
        same_rounding: Whether the two are meant to round at the same places.
    """
    for dtype in _LARGEST:
        share = _SHARE if same_rounding and dtype == torch.bfloat16 else 1.0
        for description, instance, args, *rest in cases(dtype):
            named = rest[0] if rest else {}
            prefix = () if instance is None else (instance,)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                try:
                    expected = _tensors(original(*prefix, *args, **named))
                except Exception as fault:  # noqa: BLE001 - becomes the reason
                    return f"the original raises on a probe ({description}): {type(fault).__name__}: {fault}"
                found = _tensors(replacement(*prefix, *args, **named))
            reason = _difference(expected, found, share)
            if reason:
                return f"a probe with {description} in {str(dtype).removeprefix('torch.')} differs: {reason}"
    return ""


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _difference(expected: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...], share: float) -> str:
    if len(expected) != len(found):
        return f"{len(found)} results in place of {len(expected)}"
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{tuple(ours.shape)} {ours.dtype} in place of {tuple(theirs.shape)} {theirs.dtype}"
        if not torch.equal(ours.isfinite(), theirs.isfinite()):
            return "values that are not finite lie elsewhere"
        finite = theirs.isfinite()
        if not finite.any():
            continue
        a, b = ours[finite].double(), theirs[finite].double()
        largest = _LARGEST.get(theirs.dtype, _LARGEST[torch.float32])
        error = (a - b).abs().max().item() / max(b.abs().max().item(), 1e-30)
        differing = (a != b).double().mean().item()
        if error > largest:
            return f"relative error {error:.1e}, allowed {largest:.0e}"
        if differing > share:
            return f"{differing:.1%} of the elements differ, allowed {share:.0%} (another rounding order?)"
    return ""
