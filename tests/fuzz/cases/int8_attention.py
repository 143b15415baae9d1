"""quantize_kv and int8_attention."""

from __future__ import annotations

import torch
from fuzz import tensors
from fuzz.table import Case, fuzzes
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.int8_attention import dequantized
from liteboost_adaptor.ops.int8_attention import quantize_kv as reference

from .attention import attention, check


@fuzzes("quantize_kv")
def quantize_kv(draw: DrawFn) -> Case:
    x = tensors.tensor(draw, tensors.shape(draw), draw(tensors.DTYPES), draw(tensors.SCALES))

    def check_bits(results: list[Tensor]) -> None:
        assert results[0].is_contiguous() and torch.equal(results[0], reference(x))

    return Case({"x": x}, check_bits)


@fuzzes("int8_attention")
def int8_attention(draw: DrawFn) -> Case:
    arguments = attention(draw).arguments
    values = {name: reference(arguments[name]) for name in ("key", "value")}
    exact = {name: dequantized(rows, torch.float32) for name, rows in values.items()}
    given = {**arguments, **{name: _laid_out(draw, rows) for name, rows in values.items()}}
    return Case(given, lambda results: check("attention", results[0], {**arguments, **exact}))


def _laid_out(draw: DrawFn, rows: Tensor) -> Tensor:
    """The same rows in a layout of `tensors`, in an allocation that ends where they end."""
    room = tensors.tensor(draw, rows.shape, torch.float32, layouts=tensors.WRITABLE)
    bytes_of = torch.full((room.untyped_storage().nbytes() // 4,), 85, dtype=torch.int8)
    return bytes_of.as_strided(room.shape, room.stride(), room.storage_offset()).copy_(rows)
