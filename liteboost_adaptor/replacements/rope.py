"""Rotary position embedding functions ``(q, k, cos, sin, ...)``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..report import Tally
from .guards import PROBE, unserved

ops = torch.ops.liteboost


def rotary(
    original: Callable[..., Any],
    tally: Tally,
    *,
    layout: str = "half",
    half_table: bool = False,
    keeps_dtype: bool = False,
    partial: bool = False,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``.

    Args:
        layout: ``half`` or ``interleaved``.
        half_table: cos and sin hold each angle once, for both channels of a pair.
        partial: Channels beyond the tables' width are passed on; otherwise the width must be the head's.
        keeps_dtype: The original rounds to the dtype of q whatever that of cos is.
    """

    default, names = _default_dim(original), list(inspect.signature(original).parameters)[4:]

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unsqueeze_dim, reason = _unsqueeze_dim(names, args, kwargs, default)
        reason = (
            reason or unserved(q, k, cos, sin) or _tables_unserved(q, k, cos, sin, unsqueeze_dim, keeps_dtype)
        )
        width = cos.shape[-1] * (2 if half_table else 1)
        if not reason and (width > q.shape[-1] or (width < q.shape[-1] and not partial)):
            reason = "tables of another width than the heads"
        if reason:
            tally.fell_back(reason)
            return original(q, k, cos, sin, *args, **kwargs)
        tally.served()
        return ops.rope(q, k, cos, sin, unsqueeze_dim, layout, width)

    return apply


def _default_dim(function: Callable[..., Any]) -> int:
    """The default of ``unsqueeze_dim``; 1 for functions that have no such parameter."""
    parameter = inspect.signature(function).parameters.get("unsqueeze_dim")
    return 1 if parameter is None or parameter.default is parameter.empty else parameter.default


def _unsqueeze_dim(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], default: int
) -> tuple[int, str]:
    """The dimension asked for, or why the call is not served. ``names``: parameters behind the tables."""
    if not args and not kwargs:
        return default, ""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("position_ids", None)  # most functions have it up to transformers 4.57; none reads it
    dim = given.pop("unsqueeze_dim", default)
    if given or len(args) > len(names) or type(dim) is not int:
        return 0, "arguments beyond unsqueeze_dim"
    return dim, ""


def _tables_unserved(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int,
    keeps_dtype: bool,
) -> str:
    if unsqueeze_dim not in (1, 2):
        return f"unsqueeze_dim {unsqueeze_dim}"
    if q.ndim != 4 or k.ndim != 4 or cos.ndim not in (2, 3) or cos.shape != sin.shape:
        return "a rank that is not served"
    if k.dtype != q.dtype or sin.dtype != cos.dtype:
        return "mixed dtypes"
    if cos.dtype != q.dtype and not (keeps_dtype and cos.dtype == torch.float32):
        return "tables of another dtype than q"
    if cos.ndim == 3 and cos.shape[0] not in (1, q.shape[0]):
        return "tables for another batch size"
    return ""


def rotary_cases(dtype: torch.dtype) -> Iterator[tuple[str, None, tuple[Any, ...], dict[str, Any]]]:
    """Probe cases: odd lengths, grouped heads, several head sizes, full-width tables without symmetry."""
    yield from _cases(dtype, half_table=False)


def half_table_cases(dtype: torch.dtype) -> Iterator[tuple[str, None, tuple[Any, ...], dict[str, Any]]]:
    """Probe cases with tables of half the width."""
    yield from _cases(dtype, half_table=True)


def _cases(
    dtype: torch.dtype, half_table: bool
) -> Iterator[tuple[str, None, tuple[Any, ...], dict[str, Any]]]:
    generator = torch.Generator("cpu").manual_seed(22)
    for head_dim, scale, unsqueeze_dim in ((16, 1.0, 1), (64, 1e-4, 1), (80, 1e4, 2), (128, 1.0, 2)):
        q, k = (torch.randn(2, 7, heads, head_dim, generator=generator, **PROBE) * scale for heads in (4, 2))
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        width = head_dim // 2 if half_table else head_dim
        angles = torch.rand(2, 7, width, generator=generator, **PROBE) * 6
        tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        yield (
            f"heads of {head_dim}, values about {scale:g}, tables widened in {unsqueeze_dim}",
            None,
            (q.to(dtype), k.to(dtype), *tables),
            {"unsqueeze_dim": unsqueeze_dim},  # named, for in some functions position_ids comes before it
        )
