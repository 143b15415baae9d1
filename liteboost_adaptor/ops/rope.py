"""Rotary position embedding of query and key in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LiteBoostError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, check_same_shape, shape_text
from .registry import define

LAYOUTS = ("half", "interleaved", "deinterleave")
OP = "rope"


class RopeError(LiteBoostError, ValueError):
    """A parameter of the rotation has a value the op is not defined for."""


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    layout: str = "half",
    rotary_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels of ``q`` and ``k`` by the angles of their positions.

    Args:
        q: ``[B, H, S, D]`` with ``unsqueeze_dim`` 1, ``[B, S, H, D]`` with 2; fp32/bf16/fp16 (here also
            fp64). Any strides; read in place by the kernel where the channels are adjacent.
        k: The same with its own number of heads; 0 of them to rotate ``q`` alone.
        cos: ``[B or 1, S, W]`` or ``[S, W]``, dtype of ``q`` or fp32. ``W`` is ``rotary_dim``, or half of it:
            then each entry serves both channels of a pair.
        sin: Shape and dtype of ``cos``.
        unsqueeze_dim: Where the heads are: 1 or 2.
        layout: ``half`` pairs channel ``i`` with ``i + rotary_dim / 2``; ``interleaved`` pairs ``2i`` with
            ``2i + 1``; ``deinterleave`` pairs these too, and puts the results, and has the entries of
            full-width tables, where ``half`` has them.
        rotary_dim: Channels that are rotated; the rest is copied. 0 for the width of ``cos``.

    Returns:
        ``q`` and ``k`` rotated: shapes and dtype of the arguments, contiguous.

    Raises:
        ShapeError: ``k``, ``cos`` or ``sin`` do not fit ``q``.
        DTypeError: A dtype not served.
        RopeError: Unknown ``layout`` or ``unsqueeze_dim``, or a ``rotary_dim`` that does not fit.

    Numerics:
        Both products and their sum in fp32, rounded once, to ``q.dtype``.

    Source:
        Su et al. 2021, arXiv:2104.09864, eq. 34; ``apply_rotary_pos_emb`` of Llama (half) and Cohere
        (interleaved), ``apply_rotary_pos_emb_interleave`` of DeepSeek V3 (deinterleave) in transformers 5.23.
    """
    width = _check_rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim)
    rotary_dim = rotary_dim or width
    compute = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos.to(compute), sin.to(compute)
    if width != rotary_dim:
        cos, sin = _full_width(cos, layout), _full_width(sin, layout)
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin, layout, rotary_dim), _rotate(k, cos, sin, layout, rotary_dim)


def rope_(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    layout: str = "half",
    rotary_dim: int = 0,
) -> None:
    """`rope`, written to ``q`` and ``k``. On a CPU it saves nothing; on an NPU it is one operator for both.

    Args:
        q: As in `rope`, with memory of its own for each element; written to.
        k: The same; written to.
        cos: As in `rope`.
        sin: As in `rope`.
        unsqueeze_dim: As in `rope`.
        layout: As in `rope`.
        rotary_dim: As in `rope`.

    Returns:
        Nothing.

    Raises:
        ShapeError, DTypeError, RopeError: As `rope`; nothing has been written.

    Numerics:
        Those of `rope`.

    Source:
        That of `rope`.
    """
    turned = rope(q, k, cos, sin, unsqueeze_dim, layout, rotary_dim)
    q.copy_(turned[0])
    k.copy_(turned[1])


def _full_width(table: Tensor, layout: str) -> Tensor:
    return table.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat((table, table), -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_dim: int) -> Tensor:
    rotated = x[..., :rotary_dim].to(cos.dtype)
    if layout == "deinterleave":
        rotated = torch.cat((rotated[..., ::2], rotated[..., 1::2]), -1)
    if layout == "interleaved":
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    out = (rotated * cos + turned * sin).to(x.dtype)
    return torch.cat((out, x[..., rotary_dim:]), -1).contiguous()


def _check_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, layout: str, rotary_dim: int
) -> int:
    """Return the width of the tables."""
    if unsqueeze_dim not in (1, 2):
        raise RopeError(
            f"liteboost::{OP}: unsqueeze_dim must be 1 or 2, got {unsqueeze_dim}; "
            "pass the dimension of q that counts the heads"
        )
    if q.dim() != 4:
        raise ShapeError(
            f"liteboost::{OP}: q must have 4 dimensions, got shape {shape_text(q.shape)}; "
            "split its channels into heads, and add a batch of 1 where there is none"
        )
    check_dtype(OP, "q", q)
    seq_dim = 3 - unsqueeze_dim
    _check_key(q, k, seq_dim)
    _check_table("cos", q, cos, seq_dim)
    _check_table("sin", q, sin, seq_dim)
    check_same_shape(OP, "sin", sin, "cos", cos)
    check_same_dtype(OP, "sin", sin, "cos", cos)
    width = cos.shape[-1]
    rotated = rotary_dim or width
    if rotary_dim < 0 or rotated % 2 or rotated > q.shape[3]:
        raise RopeError(
            f"liteboost::{OP}: rotary_dim must be even and at most head_dim = {q.shape[3]}, got {rotated}; "
            "pass how many channels of each head are rotated"
        )
    if rotated not in (width, 2 * width):
        raise RopeError(
            f"liteboost::{OP}: cos must have rotary_dim = {rotated} or half as many columns, got {width}; "
            "rotary_dim tells how many channels are rotated"
        )
    if layout not in LAYOUTS:
        raise RopeError(
            f"liteboost::{OP}: layout must be half, interleaved or deinterleave, got '{layout}'; "
            "pass the one whose pairs of channels are the model's"
        )
    return width


def _check_key(q: Tensor, k: Tensor, seq_dim: int) -> None:
    if k.dim() != 4:
        raise ShapeError(
            f"liteboost::{OP}: k must have 4 dimensions like q, got shape {shape_text(k.shape)}; "
            "split its channels into heads as those of q are"
        )
    check_same_dtype(OP, "k", k, "q", q)
    check_same_device(OP, "k", k, "q", q)
    if any(k.shape[dim] != q.shape[dim] for dim in (0, seq_dim, 3)):
        raise ShapeError(
            f"liteboost::{OP}: k must match q in all but the heads: q is {shape_text(q.shape)}, "
            f"got {shape_text(k.shape)}; check unsqueeze_dim"
        )


def _check_table(argument: str, q: Tensor, table: Tensor, seq_dim: int) -> None:
    check_same_dtype(OP, argument, table, "q", q, or_float32=True)
    check_same_device(OP, argument, table, "q", q)
    if table.dim() not in (2, 3):
        raise ShapeError(
            f"liteboost::{OP}: {argument} must have shape [batch or 1, q_len, rotary_dim] or "
            f"[q_len, rotary_dim], got {shape_text(table.shape)}; "
            "pass one row a position, without a dimension for the heads"
        )
    batch = table.shape[0] if table.dim() == 3 else 1
    if batch not in (1, q.shape[0]) or table.shape[-2] != q.shape[seq_dim]:
        raise ShapeError(
            f"liteboost::{OP}: {argument} must have batch 1 or {q.shape[0]} and q_len = {q.shape[seq_dim]}, "
            f"got {shape_text(table.shape)}; pass the rows of the positions of this call"
        )


define(
    'rope(Tensor q, Tensor k, Tensor cos, Tensor sin, int unsqueeze_dim=1, str layout="half", '
    "int rotary_dim=0) -> (Tensor, Tensor)",
    rope,
)
define(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, int unsqueeze_dim=1, "
    'str layout="half", int rotary_dim=0) -> ()',
    rope_,
)
