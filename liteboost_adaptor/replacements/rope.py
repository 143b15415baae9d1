"""Functions that apply a rotary position embedding, in every form of argument, table and layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..eligibility import PROBE, autocast_dtype, unserved
from ..report import CallCounter
from .layout import memory_order

ops = torch.ops.liteboost


#: Arguments of one call: q, k (None where one tensor is rotated), cos or a complex table, sin, unsqueeze_dim.
_Call = tuple[Any, Any, Any, Any, Any]
_NOT_TAKEN = "arguments that the function does not take"


def rotary(
    original: Callable[..., Any],
    counter: CallCounter,
    *,
    arguments: Sequence[str] = (),
    unsqueeze_dim: int = 1,
    layout: str = "half",
    table: str = "full",
    channels: str = "all",
    keeps_dtype: bool = False,
    may_lack_k: bool = False,
    reverse: bool = False,
) -> Callable[..., Any]:
    """``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`` and its kin.

    Args:
        arguments: What the original's arguments are, in order: ``q``, ``k``, ``cos``, ``sin``,
            ``unsqueeze_dim``; ``freqs`` for a complex table; ``ignored`` for one the original does not use.
            Without a ``k`` the original returns one tensor. Left out: as in the line above, and what comes
            between ``sin`` and ``unsqueeze_dim`` has to be left at its default.
        unsqueeze_dim: Where the original widens the tables if no argument says so.
        layout: ``half``, ``interleaved`` or ``deinterleave``, as of the op.
        table: ``full``: an entry a channel; ``half``: an entry a pair; ``first_half``: an entry a channel, of
            which the first half is used, an entry a pair; ``complex``: cos + i sin, a number a pair.
        channels: Those that are rotated: ``all``, the ``first`` or the ``last`` as many as the tables have.
        keeps_dtype: The original computes in fp32 where the tables are fp32, and returns the dtype of q.
        may_lack_k: The original takes None for ``k``, and then returns one tensor.
        reverse: The original turns by the negative angle.
    """
    read = _reader(original, arguments, unsqueeze_dim)
    wants_k = ("k" in arguments or not arguments) and not may_lack_k
    is_partial = channels != "all"
    # Elementwise to the end; the others put their result together with ``cat``, which makes it contiguous.
    keeps_layout = not is_partial and layout != "deinterleave" and table != "half"
    channels_an_entry = 2 if table in ("half", "complex") else 1

    def apply(*args: Any, **kwargs: Any) -> Any:
        call = read(args, kwargs)
        if call is None:
            counter.count_fallback(_NOT_TAKEN)
            return original(*args, **kwargs)
        reason = _call_unserved(call, table, wants_k)
        if not reason:
            q, k, cos, sin, dim = call
            if table == "complex":
                cos, sin = torch.view_as_real(cos.resolve_conj()).unbind(-1)
            elif not keeps_dtype and cos.dtype == torch.float32 and q.dtype == autocast_dtype(q):
                # Products of a model in fp32; the tables promote them, which is exact.
                q, k = q.float(), None if k is None else k.float()
            width, heads = cos.shape[-1] * channels_an_entry, _heads(q, cos, dim)
            reason = _tensors_unserved(q, k, cos, sin, heads, width, is_partial, keeps_dtype)
        if reason:
            counter.count_fallback(reason)
            return original(*args, **kwargs)
        counter.count_served()
        if table == "first_half":
            cos, sin = cos.narrow(-1, 0, width // 2), sin.narrow(-1, 0, width // 2)
        if reverse:
            sin = sin.neg()
        if keeps_layout and not q.is_contiguous() and _are_transposed(q, k):
            return _rotate_transposed(q, k, cos, sin, heads, layout, width)
        if k is None:
            return _rotate_one(q, cos, sin, heads, layout, width, channels)
        if channels == "last":
            return tuple(_rotate_one(x, cos, sin, heads, layout, width, channels) for x in (q, k))
        if q.ndim == 3:
            turned = ops.rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, heads + 1, layout, width)
            return turned[0].squeeze(0), turned[1].squeeze(0)
        return ops.rope(q, k, cos, sin, heads, layout, width)

    return apply


def _are_transposed(q: torch.Tensor, k: torch.Tensor | None) -> bool:
    """Whether dimensions 1 and 2 stand the other way round in memory, as where attention makes its heads."""
    if q.ndim != 4 or memory_order(q) != [0, 2, 1, 3]:
        return False
    return k is None or 1 in k.shape[1:3] or memory_order(k) == [0, 2, 1, 3]


def _rotate_transposed(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    layout: str,
    width: int,
) -> Any:
    """The op on the dimensions in the order they have in memory, in which its results come back."""
    heads, q = 3 - heads, q.transpose(1, 2)
    other = q.narrow(heads, 0, 0) if k is None else k.transpose(1, 2)
    turned = ops.rope(q, other, cos, sin, heads, layout, width)
    if k is None:
        return turned[0].transpose(1, 2)
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def _rotate_one(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    layout: str,
    width: int,
    channels: str,
) -> torch.Tensor:
    """The op for one tensor, with or without a batch, and for the last channels."""
    if x.ndim == 3:
        return _rotate_one(x.unsqueeze(0), cos, sin, heads + 1, layout, width, channels).squeeze(0)
    passed = x.shape[-1] - width
    if passed and channels == "last":
        rest, turned = x.split((passed, width), -1)
        return torch.cat((rest, _rotate_one(turned, cos, sin, heads, layout, width, channels)), -1)
    return ops.rope(x, x.narrow(heads, 0, 0), cos, sin, heads, layout, width)[0]


def _reader(
    original: Callable[..., Any], arguments: Sequence[str], default_dim: int
) -> Callable[[tuple[Any, ...], dict[str, Any]], _Call | None]:
    """A function that sorts the arguments of a call; None for a call that cannot be sorted.

    By position where the rule says what is where: a copy of a listed body may name its parameters otherwise.
    """
    parameters = inspect.signature(original).parameters
    names = tuple(parameters)
    defaults = tuple(None if p.default is p.empty else p.default for p in parameters.values())
    roles = tuple(arguments or ("q", "k", "cos", "sin", *_trailing_roles(names[4:])))[: len(names)]
    place = {role: index for index, role in enumerate(roles)}
    place.setdefault("cos", place.get("freqs", len(names)))
    # What the function has no argument for is found behind those it has.
    fill = (None, default_dim)
    at_q, at_k, at_cos, at_sin = (place.get(role, len(names)) for role in ("q", "k", "cos", "sin"))
    at_dim = place.get("unsqueeze_dim", len(names) + 1)
    fixed = tuple(index for index, role in enumerate(roles) if role == "fixed")

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        if kwargs:
            given = dict(zip(names, args, strict=False))
            given.update(kwargs)
            if len(given) != len(args) + len(kwargs) or any(name not in names for name in kwargs):
                return None
            args = tuple(given.get(name, default) for name, default in zip(names, defaults, strict=True))
        elif len(args) > len(names):
            return None
        args = (*args, *defaults[len(args) :], *fill)
        if fixed and any(args[index] is not defaults[index] for index in fixed):
            return None
        return args[at_q], args[at_k], args[at_cos], args[at_sin], args[at_dim]

    return read


def _trailing_roles(names: tuple[str, ...]) -> tuple[str, ...]:
    """What the parameters behind the tables are, where the rule does not say."""
    if len(names) == 1:
        return ("unsqueeze_dim",)
    known = {"unsqueeze_dim": "unsqueeze_dim", "position_ids": "ignored"}  # transformers up to 4.57: not read
    return tuple(known.get(name, "fixed") for name in names)


def _heads(x: torch.Tensor, table: torch.Tensor, unsqueeze_dim: int) -> int:
    """The dimension of ``x`` that the table has not, once widened in ``unsqueeze_dim``."""
    return x.ndim + unsqueeze_dim - (table.ndim + 1 if unsqueeze_dim >= 0 else 0)


def _call_unserved(call: _Call, table: str, wants_k: bool) -> str:
    q, k, cos, sin, unsqueeze_dim = call
    if wants_k and k is None:
        return _NOT_TAKEN
    reason = unserved(q, k, cos, sin)
    if reason:
        return reason
    if type(unsqueeze_dim) is not int:
        return "an unsqueeze_dim that is no number"
    if cos is None or (sin is None) != (table == "complex"):
        return "no tables"
    if table == "complex" and not cos.is_complex():
        return "a table that is not complex"
    if table == "complex" and q.ndim != 4:
        return "a rank that is not served"  # the originals flatten dimension 3
    return ""


def _tensors_unserved(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    width: int,
    is_partial: bool,
    keeps_dtype: bool,
) -> str:
    """Served are ``q`` as [B, H, S, D], [B, S, H, D] or [S, H, D], and a row of the tables a position.

    The originals broadcast whatever can be.
    """
    shape, rows, dtype = q.shape, cos.shape, q.dtype
    rank = len(shape)
    if cos.dtype != dtype and not (keeps_dtype and cos.dtype == torch.float32):
        return "tables of another dtype than q"
    if sin.dtype != cos.dtype or sin.shape != rows:
        return "cos and sin of different dtypes or shapes"
    if rank not in (3, 4) or len(rows) not in (2, rank - 1) or heads not in (1, rank - 2):
        return "a rank that is not served"
    positions = 0 if rank == 3 else 3 - heads
    if rows[-2] != shape[positions]:
        return "tables for another length"
    if len(rows) == 3 and rows[0] not in (1, shape[0]):
        return "tables for another batch size"
    if width % 2 or width > shape[-1] or (width < shape[-1] and not is_partial):
        return "tables of another width than the heads"
    if k is None:
        return ""
    other = k.shape
    if k.dtype != dtype:
        return "mixed dtypes"
    if (
        len(other) != rank
        or other[0] != shape[0]
        or other[-1] != shape[-1]
        or other[positions] != shape[positions]
    ):
        return "k of another shape than q"
    return ""


def rotary_cases(dtype: torch.dtype) -> Iterator[tuple[str, None, tuple[Any, ...], dict[str, Any]]]:
    """Probe cases: odd lengths, grouped heads, several head sizes, full-width tables without symmetry."""
    generator = torch.Generator("cpu").manual_seed(22)
    for head_dim, scale, unsqueeze_dim in ((16, 1.0, 1), (64, 1e-4, 1), (80, 1e4, 2), (128, 1.0, 2)):
        q, k = (torch.randn(2, 7, heads, head_dim, generator=generator, **PROBE) * scale for heads in (4, 2))
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        angles = torch.rand(2, 7, head_dim, generator=generator, **PROBE) * 6
        tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        yield (
            f"heads of {head_dim}, values about {scale:g}, tables widened in {unsqueeze_dim}",
            None,
            (q.to(dtype), k.to(dtype), *tables),
            {"unsqueeze_dim": unsqueeze_dim},  # named, for in some functions position_ids comes before it
        )
