"""New keys and values into their places of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError, LiteBoostError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, dtype_name, shape_text
from .registry import define

OP = "kv_append"


class CacheLayoutError(LiteBoostError, ValueError):
    """The memory of a cache cannot be written to as the op does it."""


class SlotError(LiteBoostError, IndexError):
    """A slot is not in the cache."""


def kv_append(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into a cache, each token at its slot.

    ``keys[slot // block_size, :, slot % block_size] = key[b, :, t]`` with ``slot = slots[b, t]``; values
    likewise. A cache with one row a sequence has a block a sequence and ``block_size`` = capacity; a paged
    one has more, smaller blocks.

    Args:
        keys: ``[blocks, kv_heads, block_size, head_dim]``, fp32/bf16/fp16 (here also fp64); written to. Any
            strides with adjacent channels and no dimension expanded: ``[B, H, capacity, D]`` as it is, or a
            transposed view of ``[B, capacity, H, D]``, whole, which is what an NPU's operators take.
        values: ``[blocks, kv_heads, block_size, value_dim]``, dtype of ``keys``, in memory of their own;
            written to.
        key: ``[batch, kv_heads, q_len, head_dim]``, dtype of ``keys``, not a view of the cache. Any strides;
            read in place by the kernel where the channels are adjacent.
        value: ``[batch, kv_heads, q_len, value_dim]``, the same.
        slots: int64 ``[batch, q_len]``: each in ``0 .. blocks * block_size - 1``, no two the same (then one
            of their tokens, or a mixture, stays). The range is not checked on an NPU, because the host would
            have to wait for the device.

    Returns:
        Nothing.

    Raises:
        ShapeError: The shapes do not fit.
        DTypeError: A dtype not served, or slots that are not int64.
        DeviceError: The tensors are on several devices.
        CacheLayoutError: Channels of the cache are not adjacent, it is expanded, or it shares memory with
            ``key``, ``value`` or its own other half.
        SlotError: A slot is not in the cache; nothing has been written.

    Numerics:
        None: bits are copied.

    Source:
        The paged cache of Kwon et al. 2023, arXiv:2309.06180; ``StaticLayer.update`` of transformers 5.23.
    """
    _check_kv_append(keys, values, key, value, slots)
    _check_range(slots, keys)
    if not slots.numel():
        return
    block_size = keys.shape[2]
    block, place = torch.div(slots, block_size, rounding_mode="floor"), slots % block_size
    keys.transpose(1, 2)[block, place] = key.transpose(1, 2)
    values.transpose(1, 2)[block, place] = value.transpose(1, 2)


def _check_range(slots: Tensor, keys: Tensor) -> None:
    # Tensors without values, such as those of a trace, are of a type or on a device of their own.
    if type(slots) is not Tensor or slots.device.type != "cpu":
        return
    places = keys.shape[0] * keys.shape[2]
    outside = slots[(slots < 0) | (slots >= places)]
    if outside.numel():
        raise SlotError(
            f"liteboost::{OP}: slots must be 0 .. {places - 1}, below blocks * block_size of keys "
            f"{shape_text(keys.shape)}, got {outside[0].item()}; pass block * block_size + place of each "
            "token, or a larger cache"
        )


def _check_kv_append(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    _check_dimensions(keys, values, key, value)
    _check_sizes(keys, values, key, value, slots)
    check_dtype(OP, "keys", keys)
    for argument, tensor in (("values", values), ("key", key), ("value", value)):
        check_same_dtype(OP, argument, tensor, "keys", keys)
    if slots.dtype != torch.int64:
        raise DTypeError(f"liteboost::{OP}: slots must be int64, got {dtype_name(slots.dtype)}; convert it")
    for argument, tensor in (("values", values), ("key", key), ("value", value), ("slots", slots)):
        check_same_device(OP, argument, tensor, "keys", keys)
    _check_cache("keys", keys)
    _check_cache("values", values)
    _check_memory(keys, values, key, value)


def _check_dimensions(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
    for argument, tensor, size in (("keys", keys, "head_dim"), ("values", values, "value_dim")):
        if tensor.dim() != 4:
            raise ShapeError(
                f"liteboost::{OP}: {argument} must have shape [blocks, kv_heads, block_size, {size}], got "
                f"{shape_text(tensor.shape)}; view the cache so"
            )
    for argument, tensor, size in (("key", key, "head_dim"), ("value", value, "value_dim")):
        if tensor.dim() != 4:
            raise ShapeError(
                f"liteboost::{OP}: {argument} must have shape [batch, kv_heads, q_len, {size}], got "
                f"{shape_text(tensor.shape)}; reshape it"
            )


def _check_sizes(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    if values.shape[:3] != keys.shape[:3]:
        raise ShapeError(
            f"liteboost::{OP}: values must have the blocks, kv_heads and block_size of keys "
            f"{shape_text(keys.shape)}, got {shape_text(values.shape)}; pass the two halves of one cache"
        )
    if key.shape[1] != keys.shape[1] or key.shape[3] != keys.shape[3]:
        raise ShapeError(
            f"liteboost::{OP}: key must have kv_heads = {keys.shape[1]} and head_dim = {keys.shape[3]} as "
            f"keys {shape_text(keys.shape)} has, got {shape_text(key.shape)}; pass the cache of this layer"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ShapeError(
            f"liteboost::{OP}: value must have the batch, kv_heads and q_len of key {shape_text(key.shape)}, "
            f"got {shape_text(value.shape)}; pass the key and value of the same tokens"
        )
    if value.shape[3] != values.shape[3]:
        raise ShapeError(
            f"liteboost::{OP}: value must have value_dim = {values.shape[3]} as values "
            f"{shape_text(values.shape)} has, got {shape_text(value.shape)}; pass the cache of this layer"
        )
    if slots.shape != (key.shape[0], key.shape[2]):
        raise ShapeError(
            f"liteboost::{OP}: slots must have shape [batch, q_len] = [{key.shape[0]}, {key.shape[2]}], got "
            f"{shape_text(slots.shape)}; pass one slot a token"
        )


def _check_cache(argument: str, cache: Tensor) -> None:
    if not cache.numel():
        return
    if cache.shape[3] != 1 and cache.stride(3) != 1:
        raise CacheLayoutError(
            f"liteboost::{OP}: {argument} must have stride 1 in dimension 3, got strides "
            f"{shape_text(cache.stride())}; lay the cache out with the channels of a head side by side"
        )
    for dim in range(4):
        if cache.shape[dim] != 1 and cache.stride(dim) == 0:
            raise CacheLayoutError(
                f"liteboost::{OP}: {argument} must have memory for each element, got stride 0 in dimension "
                f"{dim}; pass what was expanded, or a copy"
            )


def _check_memory(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
    if keys.numel() and _share(keys, values) and keys.storage_offset() == values.storage_offset():
        raise CacheLayoutError(
            f"liteboost::{OP}: values must have memory of their own, got that of keys; pass the two halves "
            "of one cache"
        )
    for argument, tensor in (("key", key), ("value", value)):
        if _share(tensor, keys) or _share(tensor, values):
            raise CacheLayoutError(
                f"liteboost::{OP}: {argument} must not lie in the memory of the cache, got a view of it; "
                "pass a copy"
            )


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether both are views of one storage."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined] # not in torch's stub


define(
    "kv_append(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor slots) -> ()", kv_append
)
