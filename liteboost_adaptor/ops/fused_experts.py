"""Mixture of experts in one call, for recorded steps on an NPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import gated_activation
from .experts import experts_combine, experts_linear
from .registry import define_for_npu


def topk_softmax(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``k`` experts of each token with the largest logits, and their share of the softmax.

    Args:
        logits: ``[tokens, experts]``, fp32/bf16/fp16 (here also fp64).
        k: From 1 to the number of experts.
        renormalize: Whether the shares are those among the ``k``, which sum up to 1, or among all experts.

    Returns:
        Scores ``[tokens, k]``, dtype of ``logits``, largest first, and the numbers of their experts, int32.

    Numerics:
        The softmax in fp32, rounded once.

    Source:
        ``Qwen3MoeTopKRouter`` and ``GptOssTopKRouter`` in transformers 5.23.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    values, index = torch.topk(logits, k, dim=-1)
    if renormalize:
        scores = torch.softmax(values.to(compute), dim=-1)
    else:
        scores = torch.softmax(logits.to(compute), dim=-1).gather(-1, index)
    return scores.to(logits.dtype), index.to(torch.int32)


def grouped_topk(
    logits: Tensor, bias: Tensor, k: int, groups: int, topk_group: int, factor: float, eps: float
) -> tuple[Tensor, Tensor]:
    """The ``k`` experts of each token with the largest sigmoid and bias, of its ``topk_group`` best groups.

    Args:
        logits: ``[tokens, experts]``, fp32/bf16/fp16 (here also fp64).
        bias: ``[experts]``: added for the choice, not to the scores.
        k: From 1 to the number of experts in ``topk_group`` groups.
        groups: How many groups there are, of neighbours; a group is as good as its best two together.
        topk_group: In how many groups experts may be chosen.
        factor: Of the scores.
        eps: Added to the sum of the chosen sigmoids, which divides each.

    Returns:
        Scores ``[tokens, k]``, dtype of ``logits``, and the numbers of their experts, int32.

    Numerics:
        In fp32, rounded once.

    Source:
        ``DeepseekV3TopkRouter`` in transformers 5.23.
    """
    every = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    choice = (every + bias).unflatten(-1, (groups, -1))
    strength = choice.topk(2, dim=-1)[0].sum(dim=-1)
    opened = torch.zeros_like(strength, dtype=torch.bool)
    opened.scatter_(-1, strength.topk(topk_group, dim=-1)[1], True)
    index = choice.masked_fill(~opened.unsqueeze(-1), -torch.inf).flatten(-2).topk(k, dim=-1)[1]
    chosen = every.gather(-1, index)
    scores = chosen / (chosen.sum(dim=-1, keepdim=True) + eps) * factor
    return scores.to(logits.dtype), index.to(torch.int32)


def fused_experts(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    scores: Tensor,
    index: Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Gated MLPs of the experts of each token, and their sum: ``sum over s of scores[t, s] * mlp[e](x[t])``.

    With ``e = index[t, s]``; ``experts_linear``, ``gated_activation``, ``experts_linear`` and
    ``experts_combine`` in this order, rounded where one of these ends.

    Args:
        x: ``[tokens, hidden_size]``, fp32/bf16/fp16 (here also fp64).
        up: ``[experts, 2 * size, hidden_size]``, dtype of ``x``: gate and up.
        up_bias: ``[experts, 2 * size]`` or None.
        down: ``[experts, hidden_size, size]``.
        down_bias: ``[experts, hidden_size]`` or None.
        scores: ``[tokens, slots]``, dtype of ``x`` or fp32.
        index: ``[tokens, slots]``, int32 or int64, from 0 to ``experts``, which is no expert: a row of zeros.
        activation, alpha, limit, up_offset: Of ``gated_activation``.
        interleaved: Whether gate and up have the even and the odd outputs, or else the first and second half.

    Returns:
        ``[tokens, hidden_size]``, dtype of ``x``.
    """
    index = index.to(torch.int64)
    both = experts_linear(x, up, up_bias, index)
    gate, up_states = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    states = gated_activation(gate, up_states, activation, alpha, limit, up_offset)
    return experts_combine(experts_linear(states, down, down_bias, index), scores)


define_for_npu(
    "_npu_topk_softmax(Tensor logits, int k, bool renormalize) -> (Tensor, Tensor)",
    topk_softmax,
)
define_for_npu(
    "_npu_grouped_topk(Tensor logits, Tensor bias, int k, int groups, int topk_group, float factor, "
    "float eps) -> (Tensor, Tensor)",
    grouped_topk,
)
define_for_npu(
    "_npu_fused_experts(Tensor x, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor scores, "
    'Tensor index, str activation="silu", float alpha=1.0, float? limit=None, float up_offset=0.0, '
    "bool interleaved=False) -> Tensor",
    fused_experts,
)
