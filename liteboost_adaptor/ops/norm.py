"""RMSNorm in its rounding orders, with a residual or a gate, and its factor alone; LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LiteBoostError, ShapeError
from .checks import (
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_same_shape,
    check_vector,
    shape_text,
)
from .registry import define

GATES = ("silu", "sigmoid")


class NormError(LiteBoostError, ValueError):
    """A parameter of a norm has a value the op is not defined for."""


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, late: bool = False
) -> Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    Args:
        x: ``[..., hidden_size]``, fp32/bf16/fp16 (here also fp64). Any strides; rows with one stride and
            adjacent elements are read in place by the kernel, others are copied first.
        weight: ``[hidden_size]``, dtype of ``x`` or fp32; None for no weight. For groups with weights of
            their own, in an ``x`` of ``[..., groups, hidden_size]``: ``[groups, hidden_size]``.
        eps: Added to the mean square, inside the root.
        weight_offset: Added to ``weight``: 1 where a model stores the difference from one.
        late: Round after the product with the weight, not before.

    Returns:
        ``[..., hidden_size]``, contiguous. ``late``: dtype of ``x``; otherwise what ``weight * x`` has.

    Raises:
        ShapeError: ``weight`` has neither of the two shapes.
        DTypeError: A dtype not in the list above.
        NormError: ``eps`` is negative.

    Numerics:
        Mean square in fp32. Early (Llama): the row is rounded to ``x.dtype``, multiplied by the weight, and
        rounded again. Late (OLMo-2; Gemma with offset 1): all in fp32, rounded once.

    Source:
        Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4; ``LlamaRMSNorm``, ``Olmo2RMSNorm``,
        ``Gemma2RMSNorm`` and, in groups, ``Qwen4ExpTextRMSNorm`` in transformers 5.23.
    """
    _check_rms_norm("rms_norm", x, weight, eps)
    return _rms_norm(x, weight, eps, weight_offset, late)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    late: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add ``residual`` to ``x`` and normalise the sum.

    Args:
        x: ``[..., hidden_size]``; see `rms_norm` for it and for what is not listed here.
        residual: Shape and dtype of ``x``.
        weight: As in `rms_norm`.
        eps: As in `rms_norm`.
        weight_offset: As in `rms_norm`.
        late: As in `rms_norm`.

    Returns:
        ``rms_norm(sum)`` and ``sum``, both contiguous; ``sum`` is the next residual.

    Raises:
        ShapeError: The shapes differ, or ``weight`` has neither shape.
        DTypeError: A dtype not served, or ``residual`` has another one.
        NormError: ``eps`` is negative.

    Numerics:
        The sum is rounded to ``x.dtype`` before it is normalised, as the separate addition does it.

    Source:
        Addition and next norm of a pre-norm decoder layer: ``LlamaDecoderLayer`` in transformers 5.23.
    """
    _check_rms_norm("add_rms_norm", x, weight, eps)
    _check_like_x("add_rms_norm", "residual", x, residual)
    total = (x + residual).contiguous()
    return _rms_norm(total, weight, eps, weight_offset, late), total


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """One over the root mean square of each row of ``x``: the factor of `rms_norm`, without its product.

    Args:
        x: ``[..., hidden_size]``, as in `rms_norm`.
        eps: As in `rms_norm`.

    Returns:
        ``[..., 1]``, contiguous, dtype of ``x``.

    Raises:
        DTypeError: A dtype not served.
        NormError: ``eps`` is negative.

    Numerics:
        All in fp32, rounded once, to ``x.dtype``.

    Source:
        ``DeepseekV4UnweightedRMSNorm``, which scales by the rounded factor, and ``HYV4UnweightedRMSNorm``,
        which returns it, in transformers 5.23.
    """
    _check_input("inverse_rms", x, eps)
    return _factor(x.to(torch.promote_types(x.dtype, torch.float32)), eps).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    gate_first: bool = False,
    late: bool = False,
    group_size: int = 0,
) -> Tensor:
    """Normalise ``x`` and multiply it by the activated ``gate``, in either order.

    Args:
        x: ``[..., hidden_size]``, as in `rms_norm`.
        gate: Shape and dtype of ``x``.
        weight: ``[hidden_size]``, dtype of ``x`` or fp32.
        eps: Added to the mean square, inside the root.
        activation: Of the gate: ``silu`` or ``sigmoid``.
        gate_first: Multiply by the gate before normalising, and not after.
        late: Round once at the end, not before the product with the weight.
        group_size: With ``gate_first``: channels normalised together; 0 for the whole row.

    Returns:
        ``[..., hidden_size]``, contiguous, dtype of ``x``; with ``gate_first`` and not ``late`` that of
        ``weight * x``.

    Raises:
        ShapeError: ``gate`` or ``weight`` has the wrong shape.
        DTypeError: A dtype not served.
        NormError: Negative ``eps``, unknown ``activation``, or a ``group_size`` that does not fit.

    Numerics:
        Squares, gate and its product in fp32. Norm first: early rounds the row to ``x.dtype``, multiplies by
        the weight and rounds, then gates and rounds. Gate first: as `rms_norm` on the unrounded product.

    Source:
        ``Qwen3NextRMSNormGated`` (norm first) and ``MambaRMSNormGated`` (gate first) in transformers 5.23.
    """
    _check_gated_rms_norm(x, gate, weight, eps, activation, gate_first, group_size)
    compute = torch.promote_types(x.dtype, torch.float32)
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    gate = act(gate.to(compute))
    if not gate_first:
        if late:
            return (_scaled(x.to(compute), eps) * weight.to(compute) * gate).to(x.dtype).contiguous()
        normed = weight * _scaled(x.to(compute), eps).to(x.dtype)
        return (normed.to(compute) * gate).to(x.dtype).contiguous()
    h = x.to(compute) * gate
    if group_size:
        h = h.unflatten(-1, (-1, group_size))
    h = _scaled(h, eps).reshape(x.shape)
    out = (h * weight.to(compute)).to(x.dtype) if late else weight * h.to(x.dtype)
    return out.contiguous()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Shift and scale each row of ``x`` to zero mean and unit variance, then by ``weight`` and ``bias``.

    Args:
        x: ``[..., hidden_size]``, as in `rms_norm`.
        weight: ``[hidden_size]``, dtype of ``x`` or fp32; None for no weight.
        bias: ``[hidden_size]``, dtype of ``weight``, or of ``x`` or fp32 without one; None for no bias.
        eps: Added to the variance, inside the root.

    Returns:
        ``[..., hidden_size]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: ``weight`` or ``bias`` is not ``[hidden_size]``.
        DTypeError: A dtype not served.
        NormError: ``eps`` is negative.

    Numerics:
        Biased variance, from the differences to the mean. All in fp32, rounded once.

    Source:
        Ba et al. 2016, arXiv:1607.06450; ``torch.nn.LayerNorm``.
    """
    op = "layer_norm"
    _check_input(op, x, eps)
    if weight is not None:
        _check_parameter(op, "weight", x, weight)
    if bias is not None:
        _check_parameter(op, "bias", x, bias)
    if weight is not None and bias is not None:
        check_same_dtype(op, "bias", bias, "weight", weight)
    compute = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(compute) - x.to(compute).mean(-1, keepdim=True)
    out = _scaled(centred, eps)
    if weight is not None:
        out = out * weight.to(compute)
    if bias is not None:
        out = out + bias.to(compute)
    return out.to(x.dtype).contiguous()


def _factor(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _scaled(x: Tensor, eps: float) -> Tensor:
    return x * _factor(x, eps)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, late: bool) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    y = _scaled(x.to(compute), eps)
    if weight is None:
        out = y.to(x.dtype)
    elif late:
        out = (y * (weight_offset + weight.to(compute))).to(x.dtype)
    else:
        scale = (weight_offset + weight.to(compute)).to(weight.dtype) if weight_offset else weight
        out = scale * y.to(x.dtype)
    return out.contiguous()


def _check_input(op: str, x: Tensor, eps: float) -> None:
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have at least one dimension, got a scalar; pass x.unsqueeze(0)"
        )
    check_dtype(op, "x", x)
    if not eps >= 0:
        raise NormError(f"liteboost::{op}: eps must not be negative, got {eps}; pass the norm's own eps")


def _check_parameter(op: str, argument: str, x: Tensor, parameter: Tensor, in_groups: bool = False) -> None:
    if not (in_groups and parameter.dim() == 2):
        check_vector(op, argument, parameter, x.shape[-1], "hidden_size")
    elif x.dim() < 2 or parameter.shape != x.shape[-2:]:
        raise ShapeError(
            f"liteboost::{op}: {argument} must have shape [groups, hidden_size] = the last two of x = "
            f"{shape_text(x.shape)}, got {shape_text(parameter.shape)}; "
            f"pass [hidden_size] for one {argument} in all groups"
        )
    check_same_dtype(op, argument, parameter, "x", x, or_float32=True)
    check_same_device(op, argument, parameter, "x", x)


def _check_like_x(op: str, argument: str, x: Tensor, other: Tensor) -> None:
    check_same_dtype(op, argument, other, "x", x)
    check_same_device(op, argument, other, "x", x)
    check_same_shape(op, argument, other, "x", x)


def _check_rms_norm(op: str, x: Tensor, weight: Tensor | None, eps: float) -> None:
    _check_input(op, x, eps)
    if weight is not None:
        _check_parameter(op, "weight", x, weight, in_groups=True)


def _check_gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, gate_first: bool, group_size: int
) -> None:
    op = "gated_rms_norm"
    _check_input(op, x, eps)
    _check_like_x(op, "gate", x, gate)
    _check_parameter(op, "weight", x, weight)
    if group_size != 0 and not gate_first:
        raise NormError(
            f"liteboost::{op}: group_size must be 0 unless gate_first is True, got {group_size}; "
            "pass 0, or x and gate as [..., groups, group_size]"
        )
    if group_size < 0 or (group_size > 0 and x.shape[-1] % group_size != 0):
        raise NormError(
            f"liteboost::{op}: group_size must divide hidden_size = {x.shape[-1]}, got {group_size}; "
            "pass 0 for one group"
        )
    if activation not in GATES:
        raise NormError(
            f"liteboost::{op}: activation must be silu or sigmoid, got '{activation}'; "
            "use the plain PyTorch code for other gates"
        )


define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, bool late=False) -> Tensor",
    rms_norm,
)
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, "
    "bool late=False) -> (Tensor normed, Tensor sum)",
    add_rms_norm,
)
define("inverse_rms(Tensor x, float eps) -> Tensor", inverse_rms)
define(
    'gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, str activation="silu", '
    "bool gate_first=False, bool late=False, int group_size=0) -> Tensor",
    gated_rms_norm,
)
define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", layer_norm)
