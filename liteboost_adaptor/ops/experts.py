"""Mixture of experts: products of tokens with the weights of their experts, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import DTypeError, LiteBoostError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, dtype_name, shape_text
from .registry import define


class ExpertIndexError(LiteBoostError, IndexError):
    """An expert that does not exist."""


def experts_linear(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
    """Apply, for each slot of each token, the linear layer of the expert that ``index`` names.

    ``out[t, s] = x[t, s] @ weight[e].T + bias[e]`` with ``e = index[t, s]``. Only the experts named are read,
    each of them once.

    Args:
        x: ``[tokens, in_features]``, the same row for all slots of a token, or ``[tokens, slots,
            in_features]``; fp32/bf16/fp16 (here also fp64). Any strides.
        weight: ``[experts, out_features, in_features]``, dtype of ``x``. Read in place by the kernel where
            one of the last two dimensions is contiguous: a transposed view costs nothing.
        bias: ``[experts, out_features]``, dtype of ``x``, or None.
        index: ``[tokens, slots]``, int64, from 0 to ``experts``. A slot with ``experts`` has no expert in
            this process, and a row of zeros. An expert may come more than once in a row.

    Returns:
        ``[tokens, slots, out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ or are not in the list above, or ``index`` is not int64.
        DeviceError: The tensors are on different devices.
        ExpertIndexError: ``index`` has a number below 0 or above ``experts``.

    Numerics:
        Products summed in fp32, the bias added in fp32, rounded once. Where an expert has few rows the
        result does not depend on the number of threads.

    Source:
        ``grouped_mm_experts_forward`` in transformers 5.23, ``integrations/moe.py``.
    """
    _check_experts_linear(x, weight, bias, index)
    experts = weight.shape[0]
    out = x.new_empty(*index.shape, weight.shape[1])
    if out.is_meta or isinstance(out, FakeTensor):
        return out  # traced: there are no experts to read
    out.zero_()
    for expert, place, rows in by_expert("experts_linear", x, index, experts):
        out[place] = F.linear(rows, weight[expert], None if bias is None else bias[expert])
    return out


def by_expert(
    op: str, x: Tensor, index: Tensor, experts: int
) -> Iterator[tuple[int, tuple[Tensor, ...], Tensor]]:
    """Each expert that ``index`` names, the tokens and slots that name it, and their rows of ``x``.

    Raises:
        ExpertIndexError: ``index`` has a number below 0 or above ``experts``.
    """
    for expert in index.unique().tolist():
        if not 0 <= expert <= experts:
            raise ExpertIndexError(
                f"liteboost::{op}: index must be 0 .. {experts} for {experts} experts ({experts} "
                f"for none), got {expert}; check the router"
            )
        if expert < experts:
            token, slot = torch.where(index == expert)
            yield expert, (token, slot), x[token] if x.dim() == 2 else x[token, slot]


def experts_combine(y: Tensor, scores: Tensor) -> Tensor:
    """Sum what the experts of each token made of it: ``out[t] = sum over s of y[t, s] * scores[t, s]``.

    Args:
        y: ``[tokens, slots, features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        scores: ``[tokens, slots]``, dtype of ``y`` or fp32.

    Returns:
        ``[tokens, features]``, dtype of ``y``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: ``scores`` has another dtype than ``y`` and is not fp32, or one is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        Summed in fp32, rounded once. The original rounds each product too where ``scores`` has the dtype
        of ``y``.

    Source:
        The end of ``grouped_mm_experts_forward`` in transformers 5.23, ``integrations/moe.py``.
    """
    _check_experts_combine(y, scores)
    compute = torch.promote_types(y.dtype, torch.float32)
    return (y.to(compute) * scores.to(compute).unsqueeze(-1)).sum(dim=1).to(y.dtype)


def _check_experts_linear(x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> None:
    op = "experts_linear"
    if weight.dim() != 3:
        raise ShapeError(
            f"liteboost::{op}: weight must have shape [experts, out_features, in_features], got "
            f"{shape_text(weight.shape)}; stack the weights of the experts"
        )
    if index.dim() != 2:
        raise ShapeError(
            f"liteboost::{op}: index must have shape [tokens, slots], got {shape_text(index.shape)}; "
            "flatten batch and length"
        )
    if x.dim() not in (2, 3):
        raise ShapeError(
            f"liteboost::{op}: x must have shape [tokens, in_features] or [tokens, slots, in_features], got "
            f"{shape_text(x.shape)}; flatten batch and length"
        )
    check_dtype(op, "x", x)
    check_same_dtype(op, "weight", weight, "x", x)
    if index.dtype != torch.int64:
        raise DTypeError(f"liteboost::{op}: index must be int64, got {dtype_name(index.dtype)}; convert it")
    check_same_device(op, "weight", weight, "x", x)
    check_same_device(op, "index", index, "x", x)
    if x.shape[-1] != weight.shape[2]:
        raise ShapeError(
            f"liteboost::{op}: x must have in_features = {weight.shape[2]} last, as weight "
            f"{shape_text(weight.shape)} has, got {shape_text(x.shape)}; pass a weight stored as "
            "[experts, in_features, out_features] transposed"
        )
    if x.shape[0] != index.shape[0]:
        raise ShapeError(
            f"liteboost::{op}: x must have tokens = {index.shape[0]} first, as index "
            f"{shape_text(index.shape)} has, got {shape_text(x.shape)}; pass the index of these tokens"
        )
    if x.dim() == 3 and x.shape[1] != index.shape[1]:
        raise ShapeError(
            f"liteboost::{op}: x must have slots = {index.shape[1]} second, as index "
            f"{shape_text(index.shape)} has, got {shape_text(x.shape)}; pass the index of these tokens"
        )
    if bias is None:
        return
    check_same_dtype(op, "bias", bias, "x", x)
    check_same_device(op, "bias", bias, "x", x)
    if bias.shape != weight.shape[:2]:
        raise ShapeError(
            f"liteboost::{op}: bias must have shape [experts, out_features] = "
            f"{shape_text(weight.shape[:2])}, got {shape_text(bias.shape)}; pass the biases of these experts"
        )


def _check_experts_combine(y: Tensor, scores: Tensor) -> None:
    op = "experts_combine"
    if y.dim() != 3:
        raise ShapeError(
            f"liteboost::{op}: y must have shape [tokens, slots, features], got {shape_text(y.shape)}; "
            "pass the result of experts_linear"
        )
    check_dtype(op, "y", y)
    check_same_dtype(op, "scores", scores, "y", y, or_float32=True)
    check_same_device(op, "scores", scores, "y", y)
    if scores.shape != y.shape[:2]:
        raise ShapeError(
            f"liteboost::{op}: scores must have shape [tokens, slots] = {shape_text(y.shape[:2])}, got "
            f"{shape_text(scores.shape)}; pass one weight a slot"
        )


define("experts_linear(Tensor x, Tensor weight, Tensor? bias, Tensor index) -> Tensor", experts_linear)
define("experts_combine(Tensor y, Tensor scores) -> Tensor", experts_combine)
