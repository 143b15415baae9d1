"""Mixture of experts whose weights are integers: products of tokens with the weights of their experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import DTypeError, ShapeError
from .checks import (
    check_dtype,
    check_same_device,
    check_same_dtype,
    dtype_name,
    shape_text,
)
from .experts import by_expert
from .quantized_linear import TILE, check_packed, linear_packed
from .registry import define

_OP = "experts_packed"
_ADVICE = "prepack the weights with QuantizedExperts.prepack"


def experts_packed(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    out_features: int,
) -> Tensor:
    """`experts_linear` with weights of 8 or 4 bits: only the integers of the experts named are read.

    ``out[t, s] = x[t, s] @ weight[e].T + bias[e]`` with ``e = index[t, s]``.

    Args:
        x: ``[tokens, in_features]``, the same row for all slots of a token, or ``[tokens, slots,
            in_features]``; fp32/bf16/fp16 (here also fp64). Any strides.
        tiles: The weights of all experts one below the other, as `quantized_linear.prepack` arranges them:
            int8 ``[tiles, in_features rounded up to 32 / 4, 64]`` or uint8 ``[tiles, in_features / 8, 64]``.
        scales: ``[tiles, groups, 16]``, fp32/bf16/fp16, as of `linear_packed`.
        zero_points: uint8 like ``scales``, for 4 bits; None stands for 8.
        bias: ``[experts, out_features]``, dtype of ``x``, or None.
        index: ``[tokens, slots]``, int64, from 0 to ``experts``. A slot with ``experts`` has no expert in
            this process, and a row of zeros.
        out_features: Of one expert; a multiple of 16, so that no tile is of two.

    Returns:
        ``[tokens, slots, out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: A dtype is not in the list above, ``bias`` has not that of ``x``, or ``index`` is not
            int64.
        DeviceError: The tensors are on different devices.
        ExpertIndexError: ``index`` has a number below 0 or above ``experts``.

    Numerics:
        As of `linear_packed`, with the rows of an expert for the rows of ``x``.

    Source:
        ``grouped_mm_experts_forward`` in transformers 5.23, ``integrations/moe.py``; the arrangement is our
        own.
    """
    _check_tokens(x, index)
    check_packed(_OP, x, (tiles, scales, zero_points), advice=_ADVICE, owner="these experts")
    _check_outputs(tiles, out_features)
    a_expert = out_features // TILE
    experts = tiles.shape[0] // a_expert
    _check_bias(x, bias, experts, out_features)
    out = x.new_empty(*index.shape, out_features)
    if out.is_meta or isinstance(out, FakeTensor):
        return out  # traced: there are no experts to read
    out.zero_()
    for expert, place, rows in by_expert(_OP, x, index, experts):
        own = slice(expert * a_expert, (expert + 1) * a_expert)
        out[place] = linear_packed(
            rows,
            tiles[own],
            scales[own],
            None if zero_points is None else zero_points[own],
            None if bias is None else bias[expert],
            out_features,
        )
    return out


def _check_tokens(x: Tensor, index: Tensor) -> None:
    if index.dim() != 2:
        raise ShapeError(
            f"liteboost::{_OP}: index must have shape [tokens, slots], got {shape_text(index.shape)}; "
            "flatten batch and length"
        )
    if x.dim() not in (2, 3):
        raise ShapeError(
            f"liteboost::{_OP}: x must have shape [tokens, in_features] or [tokens, slots, in_features], got "
            f"{shape_text(x.shape)}; flatten batch and length"
        )
    check_dtype(_OP, "x", x)
    if index.dtype != torch.int64:
        raise DTypeError(f"liteboost::{_OP}: index must be int64, got {dtype_name(index.dtype)}; convert it")
    check_same_device(_OP, "index", index, "x", x)
    for dim, name in enumerate(("tokens", "slots")[: x.dim() - 1]):
        if x.shape[dim] != index.shape[dim]:
            raise ShapeError(
                f"liteboost::{_OP}: x must have {name} = {index.shape[dim]} {('first', 'second')[dim]}, as "
                f"index {shape_text(index.shape)} has, got {shape_text(x.shape)}; pass the index of these "
                "tokens"
            )


def _check_outputs(tiles: Tensor, out_features: int) -> None:
    if not tiles.shape[1]:
        raise ShapeError(
            f"liteboost::{_OP}: tiles must have columns, got {shape_text(tiles.shape)}; {_ADVICE}"
        )
    if out_features <= 0 or out_features % TILE or tiles.shape[0] % (out_features // TILE):
        raise ShapeError(
            f"liteboost::{_OP}: out_features must be those of an expert, a multiple of 16, in "
            f"{tiles.shape[0]} tiles of 16, got {out_features}; pass those of these experts"
        )


def _check_bias(x: Tensor, bias: Tensor | None, experts: int, out_features: int) -> None:
    if bias is None:
        return
    check_same_dtype(_OP, "bias", bias, "x", x)
    check_same_device(_OP, "bias", bias, "x", x)
    if bias.shape != (experts, out_features):
        raise ShapeError(
            f"liteboost::{_OP}: bias must have shape [experts, out_features] = [{experts}, {out_features}], "
            f"got {shape_text(bias.shape)}; pass the biases of these experts"
        )


define(
    "experts_packed(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, Tensor index, "
    "SymInt out_features) -> Tensor",
    experts_packed,
)
