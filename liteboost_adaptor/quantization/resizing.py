"""``resize_token_embeddings`` of a model whose output layer keeps integers.

Rows that stay keep their integers and scales bit for bit. New ones are made as transformers makes them, of
the weight multiplied out, and are the only ones that are rounded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError
from .layers import QuantizedLinear
from .rounding import Quantized, joined, quantize
from .schemes import Scheme

_MODELING = "transformers.modeling_utils"
_METHOD = "PreTrainedModel._get_resized_lm_head"


def install(hooks: Any) -> None:
    """Have transformers resize output layers of integers."""
    hooks.set_attribute(_MODELING, _METHOD, _resizing)


def _resizing(original: Any) -> Any:
    @functools.wraps(original)
    def _get_resized_lm_head(
        self: torch.nn.Module,
        old_lm_head: torch.nn.Module,
        new_num_tokens: int | None = None,
        transposed: bool = False,
        mean_resizing: bool = True,
    ) -> torch.nn.Module:
        arguments = new_num_tokens, transposed, mean_resizing
        if not isinstance(old_lm_head, QuantizedLinear) or new_num_tokens is None:
            return original(self, old_lm_head, *arguments)
        if new_num_tokens == old_lm_head.out_features:
            return old_lm_head
        if "shares" in vars(old_lm_head):
            raise QuantizationError(
                "the output layer is divided over processes, and none of them has all rows: resize the "
                "undivided model, save it, and load that"
            )
        plain = _plain(old_lm_head)
        wanted = original(self, plain, new_num_tokens, False, mean_resizing)
        return resized(old_lm_head, wanted)

    return _get_resized_lm_head


def _plain(head: QuantizedLinear) -> torch.nn.Linear:
    """The layer that ``head`` stands for, ``[out, in]`` whether that is transposed or not."""
    with torch.device("meta"):
        made = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    made.weight = torch.nn.Parameter(head.dequantized(head.dtype), requires_grad=False)
    made.bias = head.bias
    return made


def resized(head: QuantizedLinear, wanted: torch.nn.Linear) -> QuantizedLinear:
    """``head`` with as many rows as ``wanted`` has; its own, and behind them those of ``wanted``."""
    kept, outputs = head.saved(), wanted.out_features
    if outputs > head.out_features:
        new = wanted.weight.detach()[head.out_features :]
        rows = rounded(new.cpu(), head.scheme, None if head.columns is None else head.columns.cpu())
        kept = joined([kept, Quantized(**{n: t.to(head.scales.device) for n, t in rows.tensors().items()})])
    else:
        # Copies: a part of a tensor would keep the rest of it in memory.
        kept = Quantized(**{name: part.clone() for name, part in kept.rows(0, outputs).tensors().items()})
    made = QuantizedLinear(head.in_features, outputs, False, head.scheme, head.dtype, device="meta")
    made.fill(kept)
    if head.columns is not None:
        made.columns = head.columns
    made.bias, made.is_transposed = wanted.bias, head.is_transposed
    made.train(head.training)
    if head.is_arranged:
        made.arrange()
    return made


def rounded(rows: Tensor, scheme: Scheme, columns: Tensor | None) -> Quantized:
    """``rows`` of a weight, rounded to ``scheme``.

    Args:
        columns: Which column of ``rows`` each that is kept is multiplied by; None: the same, in order. Where
            a column occurs twice (8 bits as two of 4), the second has what the first has left.
    """
    if columns is None:
        return quantize(rows, scheme, "new rows of the output layer")
    columns = columns.long()
    left, values = rows.float(), rows.new_zeros(len(rows), len(columns), dtype=torch.float32)
    result = quantize(values, scheme)
    for occurrence in range(2):
        own = _occurrence(columns) == occurrence
        values[:, own] = left[:, columns[own]]
        result = quantize(values, scheme, "new rows of the output layer")
        left = rows.float().index_add(1, columns, -result.dequantized())
    return result


def _occurrence(columns: Tensor) -> Tensor:
    """How often each has occurred before."""
    order = torch.argsort(columns, stable=True)
    sorted_columns = columns[order]
    first = torch.searchsorted(sorted_columns, sorted_columns)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(columns)) - first)
