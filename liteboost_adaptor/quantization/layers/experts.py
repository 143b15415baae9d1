"""The weights of a layer's experts, quantized, in place of the parameter that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import StateError
from ...ops.quantized_linear import TILE
from ..schemes import QuantizedTensor, QuantScheme
from .base import REMEDY, QuantizedLayer
from .weight_shape import WeightShape


class QuantizedExperts(QuantizedLayer):
    """The weights of a layer's experts in 8 or 4 bits, a submodule where their parameter was.

    Buffers as of `QuantizedLayer`, of the matrix that `WeightShape` describes. `product` reads the integers
    of the experts that tokens have. Code that takes it for the parameter is given one expert dequantized
    (``self.down_proj[expert]``), or all of them (torch's functions, methods of tensors): where gradients
    are wanted, or the model runs transformers' own loops.

    Attributes:
        weight_shape: Of the parameter.
    """

    #: For transformers, which would else initialise it as a parameter that no checkpoint has.
    _is_hf_initialized = True

    def __init__(
        self,
        weight_shape: WeightShape,
        scheme: QuantScheme,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__(weight_shape.in_features, weight_shape.rows, scheme, dtype, device)
        self.weight_shape = weight_shape
        self.register_load_state_dict_post_hook(_refuse_parameter)

    def product(self, x: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """`experts_linear` with these weights: x ``[tokens, (slots,) inputs]``, index ``[tokens, slots]``."""
        if self.weight.dim() == 3:
            return torch.ops.liteboost.experts_packed(
                x, self.weight, self.scales, self.zero_points, bias, index, self.weight_shape.out_features
            )
        if self.is_read_by_npu():
            each = self.weight_shape.num_experts, self.weight_shape.out_features
            scales = self.scales.view(each) if self.scheme.bits == 8 else self.scales
            return torch.ops.liteboost._npu_experts_packed(
                x, self.weight.view(*each, -1), scales, self.zero_points, bias, index
            )
        return self._one_by_one(x, bias, index)

    def _pack_groups(self, groups: Tensor) -> Tensor:
        return groups.unflatten(0, (self.weight_shape.num_experts, -1)).transpose(1, 2).contiguous()

    def _unpack_groups(self, groups: Tensor) -> Tensor:
        return groups.transpose(1, 2).flatten(0, 1).contiguous()

    def _one_by_one(self, x: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """Where nothing takes them all: on other devices, and where they are brought in for each call."""
        out = x.new_zeros(*index.shape, self.weight_shape.out_features)
        for expert in index.unique().tolist():
            if expert < self.weight_shape.num_experts:  # the next stands for none
                token, slot = torch.where(index == expert)
                rows = x[token] if x.dim() == 2 else x[token, slot]
                out[token, slot] = self._multiply(rows, expert, None if bias is None else bias[expert])
        return out

    def _multiply(self, rows: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        outputs = self.weight_shape.out_features
        own = self._rows_of(expert, outputs).prepack()
        return torch.ops.liteboost.linear_packed(rows, own.weight, own.scales, own.zero_points, bias, outputs)

    def _rows_of(self, expert: int, rows: int) -> QuantizedTensor:
        return self._buffers_as_tensor().rows(expert * rows, (expert + 1) * rows)

    # ---- as the parameter that it stands for ----

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.weight_shape.shape)

    @property
    def ndim(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def dequantized_parameter(self, dtype: torch.dtype | None = None) -> Tensor:
        """The parameter in floating point, by default in `dtype`."""
        return self.weight_shape.parameter(self.dequantize(dtype or self.dtype))

    def transpose(self, first: int, second: int) -> Tensor:
        return self.dequantized_parameter().transpose(first, second)

    @property
    def mT(self) -> Tensor:
        return self.dequantized_parameter().mT

    def __getitem__(self, index: Any) -> Tensor:
        is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
        if not is_one or self.is_packed_for_npu:
            return self.dequantized_parameter()[index]
        outputs = self.weight_shape.out_features
        if self.weight.dim() == 3:
            tiles = self._rows_of(int(index), outputs // TILE)
            expert = tiles.unpack(outputs, self.weight_shape.in_features)
        else:
            expert = self._rows_of(int(index), outputs)
        matrix = expert.dequantize(self.dtype)
        return matrix.t() if self.weight_shape.is_transposed else matrix

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(
            lambda each: each.dequantized_parameter() if isinstance(each, cls) else each,
            (args, dict(kwargs or {})),
        )
        return func(*args, **kwargs)

    def extra_repr(self) -> str:
        shape = self.weight_shape
        grouped = "" if self.scheme.bits == 8 else f", group_size={self.scheme.group_size}"
        return (
            f"{self.scheme.name}, experts={shape.num_experts}, in_features={shape.in_features}, "
            f"out_features={shape.out_features}{grouped}"
        )


def _refuse_parameter(module: torch.nn.Module, keys: Any) -> None:
    """Raise `StateError` where a ``state_dict`` had the parameter that a quantized module replaces."""
    missing = set(keys.missing_keys)
    for name in keys.unexpected_keys:
        if f"{name}.weight" in missing:
            raise StateError(
                f"{name} of the state_dict is a parameter, and this model keeps integers there. {REMEDY}"
            )
