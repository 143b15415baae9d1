"""Linear layers with weights of 8 or 4 bits: how files have them, how a CPU reads them, and their product.

Rounding of `linear_packed`:
    Integers times ``x`` are summed in fp32 (in a group, where there are groups), times the scale, summed
    over groups, plus the bias, all in fp32, and rounded once. For more than 32 rows the weight may be
    rounded to the dtype of ``x`` first: where torch's product has units of its own for it, such as AMX, and
    for bf16 on CPUs with AVX-512 BF16, if there are groups. On the latter, bf16 values and partial sums below
    2^-126 count as 0. There, of one row (of 8 bits up to three), 32 columns at a time are integers times a
    power of two, whose products are summed exactly: each is rounded to a multiple of 2^-22 of the largest of
    them (or of 2^-100, if that is more).

    Outputs that are not finite are those of the weight dequantized in fp32, whatever the number of rows.

Rounding of `linear_w4a8`:
    Every 32 columns of a row of ``x`` are integers of 8 bits times a unit (`quantize_packs`). Their products
    with the integers of a weight, less its zero point, are summed exactly; these sums, times their unit and
    their scale, are summed in fp32, plus the bias, and rounded once. The number of rows changes no bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .checks import (
    check_dtype,
    check_same_device,
    check_same_dtype,
    check_same_shape,
    check_vector,
    dtype_name,
    shape_text,
)
from .int8_linear import quantize_rows
from .registry import define

#: Columns that `pack_w4` packs together: in_features and groups are multiples of it.
PACK = 32
#: The number of the packing below. Another order of bits gets another number.
PACKING = 1
#: Outputs of a tile, and bytes of a line of it: four of each output.
TILE, LINE = 16, 64


def pack_w4(integers: Tensor) -> Tensor:
    """Pack integers of 4 bits, packing 1.

    Args:
        integers: ``[out_features, in_features]``, uint8, 0 to 15; in_features a multiple of 32.

    Returns:
        ``[out_features, in_features / 2]``, uint8. 16 bytes hold 32 columns as eight little-endian 16-bit
        words: nibble ``j`` of word ``i``, lowest first, is column ``8 * j + i``.
    """
    rows, columns = integers.shape
    parts = integers.reshape(rows, columns // PACK, 4, 8)
    low, high = parts[:, :, 0] | parts[:, :, 1] * 16, parts[:, :, 2] | parts[:, :, 3] * 16
    return torch.stack([low, high], dim=-1).reshape(rows, columns // 2)


def unpack_w4(packed: Tensor) -> Tensor:
    """The integers that `pack_w4` packed."""
    rows, half = packed.shape
    low, high = packed.reshape(rows, 2 * half // PACK, 8, 2).unbind(-1)
    parts = torch.stack([low & 15, _upper(low), high & 15, _upper(high)], dim=2)
    return parts.reshape(rows, 2 * half)


def _upper(octets: Tensor) -> Tensor:
    """The upper 4 bits of each byte. On an NPU a shift is no aclnn operator beside torch_npu 2.9.0."""
    return octets >> 4 if octets.is_cpu else octets // 16


def prepack(tensor: Tensor) -> Tensor:
    """The rows that files have, with what belongs to 16 outputs side by side, as `linear_packed` takes them.

    Args:
        tensor: A weight ``[out_features, in_features]`` int8 or ``[out_features, in_features / 2]`` uint8 as
            `pack_w4` packs it; see `prepack_scales` for what comes with it.

    Returns:
        ``[tiles, in_features rounded up to 32 / 4, 64]`` int8, or ``[tiles, in_features / 8, 64]`` uint8:
        four bytes of each output, which are four or eight columns. The last tile is filled up with zeros.
    """
    if tensor.dtype == torch.int8:
        tensor = F.pad(tensor, (0, -tensor.shape[1] % PACK))
    return _side_by_side(_as_words(tensor)).view(tensor.dtype)


def unpack(tiles: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight that `prepack` packed; ``inputs`` are its in_features, which 8 bits do not say."""
    rows = _rows_of(_as_words(tiles))[:outputs].contiguous().view(tiles.dtype)
    return rows[:, :inputs].contiguous() if tiles.dtype == torch.int8 else rows


def columns_of_line(tiles: Tensor) -> int:
    """How many columns of an output a line of `prepack` has."""
    return 4 if tiles.dtype == torch.int8 else 8


def prepack_scales(scales: Tensor) -> Tensor:
    """Scales or zero points ``[out_features, groups]``, or ``[out_features]``, as ``[tiles, groups, 16]``."""
    return _side_by_side(scales if scales.dim() == 2 else scales[:, None])


def unpack_scales(tiles: Tensor, outputs: int) -> Tensor:
    """The scales ``[out_features, groups]`` that `prepack_scales` packed."""
    return _rows_of(tiles)[:outputs].contiguous()


def _as_words(tensor: Tensor) -> Tensor:
    """Four bytes as one integer; what starts elsewhere than at a multiple of four is copied."""
    if not tensor.numel():
        return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // 4), dtype=torch.int32)
    if torch.compiler.is_compiling() or not _is_in_words(tensor):  # a graph has no storage offsets
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.int32)


def _is_in_words(tensor: Tensor) -> bool:
    starts = tensor.storage_offset(), *tensor.stride()[:-1]
    return tensor.is_contiguous() and not any(start % 4 for start in starts)


def _rows_of(tiles: Tensor) -> Tensor:
    count, width, _ = tiles.shape
    return tiles.transpose(1, 2).reshape(count * TILE, width)


def _side_by_side(rows: Tensor) -> Tensor:
    count, width = rows.shape
    if count % TILE:
        rows = torch.cat([rows, rows.new_zeros(-count % TILE, width)])
    # A copy also where the order is the same: somebody else may hold the rows.
    tiles = rows.reshape(-(-count // TILE), TILE, width).transpose(1, 2)
    return tiles.clone(memory_format=torch.contiguous_format)


def from_int4(words: Tensor) -> Tensor:
    """What an NPU's layer of 4 bits is saved as.

    Args:
        words: ``[out_features, in_features / 8]``, int32: eight columns, the first in the lowest bits, in
            two's complement, as CANN packs them (aclnnConvertWeightToINT4Pack).

    Returns:
        ``[out_features, in_features / 2]``, uint8, as of `pack_w4`, whose 8 is 0 here.
    """
    pairs = words.contiguous().view(torch.uint8)
    integers = torch.stack([pairs & 15, _upper(pairs)], dim=-1).flatten(1)
    return pack_w4(integers ^ 8)


def dequantize_w8(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight of 8 bits in ``dtype``; products in fp32, or fp64 for that dtype.

    Args:
        weight: ``[out_features, in_features]``, int8.
        scales: ``[out_features]``.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (weight.to(wide) * scales.to(wide)[:, None]).to(dtype)


def dequantize_w4(
    weight: Tensor, scales: Tensor, zero_points: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weight of 4 bits in ``dtype``; products in fp32, or fp64 for that dtype.

    Args:
        weight: ``[out_features, in_features / 2]``, uint8, as `pack_w4` packs it.
        scales: ``[out_features, groups]``. A group is 32 columns or a multiple of it.
        zero_points: Shape of ``scales``, uint8: the integers that stand for 0. None stands for 8.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, width = weight.shape[0], 2 * weight.shape[1]
    groups = unpack_w4(weight).reshape(*scales.shape, width // scales.shape[1]).to(wide)
    zeros = 8 if zero_points is None else zero_points.to(wide)[..., None]
    return ((groups - zeros) * scales.to(wide)[..., None]).reshape(rows, width).to(dtype)


def linear_packed(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """Apply a linear layer whose weight is integers of 8 or 4 bits, in tiles.

    ``x @ ((integers - zero_points) * scales).T + bias``

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16 (here also fp64). Any strides.
        tiles: int8 ``[tiles, in_features rounded up to 32 / 4, 64]`` or uint8 ``[tiles, in_features / 8,
            64]``, of `prepack`.
        scales: ``[tiles, groups, 16]``, fp32/bf16/fp16, of `prepack_scales`: one group, or groups of 32
            columns or a multiple of it.
        zero_points: uint8 like ``scales``, for 4 bits; None stands for 8.
        bias: ``[out_features]``, dtype of ``x``, or None.
        out_features: How many of the outputs of all tiles there are.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: A dtype is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        As the module says.

    Source:
        Dettmers et al. 2022, arXiv:2208.07339 (per-channel absmax) and Frantar et al. 2022, arXiv:2210.17323
        (groups); packing and tiles are our own.
    """
    _check(x, tiles, scales, zero_points, bias, out_features)
    inputs = x.shape[-1]
    weight, factors = unpack(tiles, out_features, inputs), unpack_scales(scales, out_features)
    zeros = None if zero_points is None else unpack_scales(zero_points, out_features)
    if tiles.dtype == torch.uint8:
        return _product(x, dequantize_w4(weight, factors, zeros, _wide(x)), bias)
    spread = factors.repeat_interleave(inputs // factors.shape[1], dim=1)
    return _product(x, weight.to(_wide(x)) * spread.to(_wide(x)), bias)


def quantize_packs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each 32 columns of ``x`` to integers of 8 bits, as `linear_w4a8` does it.

    Args:
        x: ``[..., columns]``, floating point, columns a multiple of 32.

    Returns:
        Integers of -127 to 127 ``[..., columns]``, int8, and what each 32 are multiples of
        ``[..., columns / 32]``, fp32: NaN, with integers of 0, for those with NaN or infinity.
    """
    integers, units = quantize_rows(x.unflatten(-1, (-1, PACK)))
    return integers.flatten(-2), units[..., 0]


def linear_w4a8(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """Apply a linear layer whose weight is integers of 4 bits, in tiles, to rows rounded to 8 bits.

    ``q(x) @ ((integers - zero_points) * scales).T + bias``

    Args:
        x: ``[..., in_features]``, fp32/bf16/fp16. Any strides.
        tiles: uint8 ``[tiles, in_features / 8, 64]``, as of `linear_packed`.
        scales: ``[tiles, groups, 16]``, as of `linear_packed`.
        zero_points: uint8 like ``scales``; None stands for 8.
        bias: ``[out_features]``, dtype of ``x``, or None.
        out_features: How many of the outputs of all tiles there are.

    Returns:
        ``[..., out_features]``, dtype of ``x``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: A dtype is not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        As the module says. A row of which 32 columns hold NaN or infinity gives NaN.

    Source:
        Dettmers et al. 2022, arXiv:2208.07339 (absmax, here of 32 columns) and Frantar et al. 2022,
        arXiv:2210.17323 (groups).
    """
    if tiles.dtype != torch.uint8:
        raise DTypeError(
            f"liteboost::linear_w4a8: tiles must be uint8, of 4 bits, got {dtype_name(tiles.dtype)}; "
            "prepack the weight with QuantizedLinear.prepack"
        )
    _check(x, tiles, scales, zero_points, bias, out_features, "linear_w4a8")
    wide, packs = _wide(x), x.shape[-1] // PACK
    integers, units = quantize_packs(x)
    factors = unpack_scales(scales, out_features).to(wide)
    zeros = 8 if zero_points is None else unpack_scales(zero_points, out_features)[..., None]
    groups = unpack_w4(unpack(tiles, out_features, x.shape[-1])).unflatten(1, (factors.shape[1], -1))
    weight = (groups.to(wide) - zeros).reshape(out_features, packs, PACK)
    # Exact: small integers.
    sums = torch.einsum("...pc,npc->...np", integers.unflatten(-1, (packs, PACK)).to(wide), weight)
    spread = factors.repeat_interleave(packs // factors.shape[1], dim=1)
    result = (sums * (units.to(wide)[..., None, :] * spread)).sum(-1)
    return (result if bias is None else result + bias.to(wide)).to(x.dtype).contiguous()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = None if bias is None else bias.to(weight.dtype)
    return F.linear(x.to(weight.dtype), weight, wide).to(x.dtype).contiguous()


def _check(
    x: Tensor,
    tiles: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    op: str = "linear_packed",
) -> None:
    if x.dim() < 1:
        raise ShapeError(
            f"liteboost::{op}: x must have shape [..., in_features], got a scalar; add a dimension"
        )
    check_dtype(op, "x", x)
    check_packed(
        op,
        x,
        (tiles, scales, zero_points),
        advice="prepack the weight with QuantizedLinear.prepack",
        owner="this layer",
    )
    if outputs < 0 or -(-outputs // TILE) != tiles.shape[0]:
        raise ShapeError(
            f"liteboost::{op}: out_features must be those of {tiles.shape[0]} tiles of 16, got {outputs}; "
            "pass those of this layer"
        )
    if bias is not None:
        check_same_dtype(op, "bias", bias, "x", x)
        check_same_device(op, "bias", bias, "x", x)
        check_vector(op, "bias", bias, outputs, "out_features")


def check_packed(
    op: str, x: Tensor, packed: tuple[Tensor, Tensor, Tensor | None], *, advice: str, owner: str
) -> None:
    """Raise unless tiles, scales and zero points fit together, and ``x``.

    Args:
        op: For whom it is asked.
        x: ``[..., in_features]``.
        packed: Tiles, scales and zero points.
        advice: What to do about the tiles.
        owner: Whose they are.

    Raises:
        ShapeError, DTypeError, DeviceError: What was asked, what was found, what to do.
    """
    tiles, scales, zero_points = packed
    _check_tiles(op, x, tiles, advice, owner)
    check_dtype(op, "scales", scales)
    check_same_device(op, "scales", scales, "x", x)
    groups = scales.shape[1] if scales.dim() == 3 else 0
    if (
        not groups
        or (scales.shape[0], scales.shape[2]) != (tiles.shape[0], TILE)
        or (groups > 1 and x.shape[-1] % (groups * PACK))
    ):
        raise ShapeError(
            f"liteboost::{op}: scales must have shape [tiles, groups, 16], one group or groups of {PACK} "
            f"columns or a multiple of it, for tiles {shape_text(tiles.shape)}, got "
            f"{shape_text(scales.shape)}; pass the scales of {owner}"
        )
    if zero_points is None:
        return
    if tiles.dtype == torch.int8:
        raise ShapeError(f"liteboost::{op}: zero_points are for tiles of 4 bits, got int8; leave them out")
    if zero_points.dtype != torch.uint8:
        raise DTypeError(
            f"liteboost::{op}: zero_points must be uint8, got {dtype_name(zero_points.dtype)}; convert them"
        )
    check_same_device(op, "zero_points", zero_points, "x", x)
    check_same_shape(op, "zero_points", zero_points, "scales", scales)


def _check_tiles(op: str, x: Tensor, tiles: Tensor, advice: str, owner: str) -> None:
    is_w8 = tiles.dtype == torch.int8
    if not is_w8 and tiles.dtype != torch.uint8:
        raise DTypeError(
            f"liteboost::{op}: tiles must be int8 or uint8, got {dtype_name(tiles.dtype)}; {advice}"
        )
    check_same_device(op, "tiles", tiles, "x", x)
    columns = columns_of_line(tiles)
    if tiles.dim() != 3 or tiles.shape[2] != LINE or tiles.shape[1] % (PACK // columns):
        form = "in_features rounded up to 32 / 4, 64]"
        if not is_w8:
            form = "in_features / 8, 64] with in_features a multiple of 32"
        raise ShapeError(
            f"liteboost::{op}: tiles must have shape [tiles, {form}, got {shape_text(tiles.shape)}; {advice}"
        )
    inputs = x.shape[-1]
    if (-(-inputs // PACK) * PACK if is_w8 else inputs) != tiles.shape[1] * columns:
        raise ShapeError(
            f"liteboost::{op}: x must have in_features last, those of tiles {shape_text(tiles.shape)}, got "
            f"{shape_text(x.shape)}; pass the tiles of {owner}"
        )


define(
    "linear_packed(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
    "SymInt out_features) -> Tensor",
    linear_packed,
)
define(
    "linear_w4a8(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
    "SymInt out_features) -> Tensor",
    linear_w4a8,
)
