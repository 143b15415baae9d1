"""``resize_token_embeddings`` of a model whose output layer is quantized.

Rows that stay keep their integers and scales bit for bit. New ones are made as transformers makes them, of
the dequantized weight, and are the only ones that are rounded.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..schemes import QuantizedTensor, QuantScheme, quantize
from .linear import QuantizedLinear

if TYPE_CHECKING:
    from ...engine.undo_stack import UndoStack

_MODELING = "transformers.modeling_utils"
_METHOD = "PreTrainedModel._get_resized_lm_head"
_NEW_ROWS = "new rows of the output layer"


def install(stack: UndoStack) -> None:
    """Have transformers resize quantized output layers."""
    stack.set_attribute(_MODELING, _METHOD, _resizing)


def _resizing(original: Any) -> Any:
    @functools.wraps(original)
    def _get_resized_lm_head(
        self: torch.nn.Module,
        old_lm_head: torch.nn.Module,
        new_num_tokens: int | None = None,
        transposed: bool = False,
        mean_resizing: bool = True,
    ) -> torch.nn.Module:
        if not isinstance(old_lm_head, QuantizedLinear) or new_num_tokens is None:
            return original(self, old_lm_head, new_num_tokens, transposed, mean_resizing)
        if new_num_tokens == old_lm_head.out_features:
            return old_lm_head
        dequantized = _as_linear(old_lm_head)
        return _resized(old_lm_head, original(self, dequantized, new_num_tokens, False, mean_resizing))

    return _get_resized_lm_head


def _as_linear(head: QuantizedLinear) -> torch.nn.Linear:
    """``head`` in floating point, ``[out, in]`` whether the layer it replaces is transposed or not."""
    with torch.device("meta"):
        linear = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    linear.weight = torch.nn.Parameter(head.dequantize(head.dtype), requires_grad=False)
    linear.bias = head.bias
    return linear


def _resized(head: QuantizedLinear, target: torch.nn.Linear) -> QuantizedLinear:
    """``head`` with as many rows as ``target`` has; its own, and behind them those of ``target``."""
    quantized, outputs = head.unpacked(), target.out_features
    if outputs > head.out_features:
        new = target.weight.detach()[head.out_features :]
        rows = _quantize_rows(new.cpu(), head.scheme, None if head.columns is None else head.columns.cpu())
        quantized = QuantizedTensor.cat([quantized, rows.map(lambda tensor: tensor.to(head.scales.device))])
    else:
        # Copies: a part of a tensor would keep the rest of it in memory.
        quantized = quantized.rows(0, outputs).map(torch.clone)
    layer = QuantizedLinear(head.in_features, outputs, False, head.scheme, head.dtype, device="meta")
    layer.fill(quantized)
    if head.columns is not None:
        layer.columns = head.columns
    layer.bias, layer.is_transposed = target.bias, head.is_transposed
    layer.train(head.training)
    if head.is_packed:
        layer.prepack()
    return layer


def _quantize_rows(rows: Tensor, scheme: QuantScheme, columns: Tensor | None) -> QuantizedTensor:
    """``rows`` of a weight, rounded to ``scheme``.

    Args:
        columns: Which column of ``rows`` each of the result is multiplied by; None: the same, in order. Where
            a column occurs twice (8 bits as two of 4), the second has what the first has left.
    """
    if columns is None:
        return quantize(rows, scheme, _NEW_ROWS)
    columns = columns.long()
    occurrences = _occurrences(columns)
    residual, values = rows.float(), rows.new_zeros(len(rows), len(columns), dtype=torch.float32)
    result = quantize(values, scheme)
    for occurrence in range(2):
        own = occurrences == occurrence
        values[:, own] = residual[:, columns[own]]
        result = quantize(values, scheme, _NEW_ROWS)
        residual = rows.float().index_add(1, columns, -result.dequantize())
    return result


def _occurrences(columns: Tensor) -> Tensor:
    """How often each has occurred before."""
    order = torch.argsort(columns, stable=True)
    sorted_columns = columns[order]
    first = torch.searchsorted(sorted_columns, sorted_columns)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(columns)) - first)
