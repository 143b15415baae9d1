"""Block-sparse attention of long prompts, in place of the dense op where a user asked for it."""

from __future__ import annotations

import torch

from ..ops.block_selection import select_blocks
from ..report import report
from ..setting_values import Sparse

ops = torch.ops.liteboost
#: Under which name calls are counted and listed.
RULE = "attention.sparse"
#: Attribute of a bound class: what the settings of its model ask for.
CHOICE = "__liteboost_sparse__"

counter = report.counter(RULE)


def choice_of(module: torch.nn.Module) -> Sparse | None:
    """What the settings of the model that ``module`` is in ask for."""
    return getattr(module, CHOICE, None)


def attend(
    choice: Sparse,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    hides_by: str,
) -> torch.Tensor | None:
    """Attention over chosen blocks, or ``None`` where the dense op is to do the call; counted either way.

    Args:
        choice: What is asked for.
        query: ``[batch, num_heads, q_len, head_dim]`` with several queries: a token that is decoded is not
            asked about.
        key, value: ``[batch, num_kv_heads, q_len, head_dim]``.
        scaling: Factor of the dot products.
        hides_by: What beside causality hides keys or changes logits, or that causality does not; empty for
            plain causal attention.
    """
    reason = hides_by or _unserved(choice, query)
    if reason:
        counter.count_fallback(reason)
        return None
    counter.count_served()
    select_idx, select_num_idx = select_blocks(
        query, key, choice.sparsity, choice.block, choice.sinks, choice.window, shared=True
    )
    shape = [choice.block, choice.block]
    return ops.block_sparse_attention(query, key, value, select_idx, select_num_idx, shape, scaling, True)


def _unserved(choice: Sparse, query: torch.Tensor) -> str:
    if query.shape[2] < choice.min_length:
        return "a prompt shorter than min_length"
    if not query.is_cpu:
        # Operators of CANN that read chosen blocks know no causality; the reference is slower than they are.
        return f"device {query.device.type}, where dense attention is faster"
    return ""
