"""The weights of a layer's experts as integers, in place of the parameter that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import StateError
from ..ops.quantized_linear import TILE, dequantize_w4, dequantize_w8
from .rounding import Quantized, joined, quantize
from .schemes import Scheme
from .weights import QuantizedWeight


@dataclass(frozen=True)
class Experts:
    """A parameter with the weights of all experts, and the matrix that it is quantised as.

    The parameter is ``[count, outputs, inputs]``, or ``[count, inputs, outputs]`` where it is transposed. The
    matrix is ``[count * outputs, inputs]``: the experts one below the other.
    """

    count: int
    outputs: int
    inputs: int
    is_transposed: bool

    @classmethod
    def of(cls, parameter: Tensor, is_transposed: bool) -> Experts:
        """Of a parameter."""
        count, outputs, inputs = (parameter.mT if is_transposed else parameter).shape
        return cls(count, outputs, inputs, is_transposed)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter."""
        sizes = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        return (self.count, *sizes)

    def unsuited(self, scheme: Scheme) -> str:
        """Why these weights cannot be kept so, or an empty string."""
        if self.outputs % TILE:
            return f"out_features = {self.outputs} of an expert is not a multiple of {TILE}"
        return scheme.unsuited(self.outputs, self.inputs)

    def matrix(self, parameter: Tensor) -> Tensor:
        """``[count * outputs, inputs]``; a copy where the parameter is transposed."""
        return (parameter.mT if self.is_transposed else parameter).reshape(-1, self.inputs)

    def parameter(self, matrix: Tensor) -> Tensor:
        """As the model has it."""
        whole = matrix.view(-1, self.outputs, self.inputs)
        return whole.mT.contiguous() if self.is_transposed else whole

    def quantize(self, parameter: Tensor, scheme: Scheme, name: str) -> Quantized:
        """Each expert rounded by itself, which copies one at a time. Raises as `rounding.quantize` does."""
        plain = parameter.mT if self.is_transposed else parameter
        # Contiguous: sums over columns are then made in the order of a linear layer's.
        return joined([quantize(expert.contiguous(), scheme, name) for expert in plain])


class QuantizedExperts(QuantizedWeight):
    """The weights of a layer's experts as integers of 8 or 4 bits, a submodule where their parameter was.

    Buffers as of `QuantizedWeight`, of the matrix that `Experts` describes. `product` reads the integers of
    the experts that tokens have. Code that takes it for the parameter is given one expert multiplied out
    (``self.down_proj[expert]``), or all of them (torch's functions, methods of tensors): where gradients
    are wanted, or the model runs transformers' own loops.

    Attributes:
        form: Of the parameter.
    """

    #: For transformers, which would else initialise it as a parameter that no checkpoint has.
    _is_hf_initialized = True

    def __init__(
        self, form: Experts, scheme: Scheme, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        super().__init__(form.inputs, form.count * form.outputs, scheme, dtype, device)
        self.form = form
        self.register_load_state_dict_post_hook(_refuse_parameter)

    @classmethod
    def of(
        cls, parameter: Tensor, form: Experts, scheme: Scheme, rounded: Quantized, training: bool = False
    ) -> QuantizedExperts:
        """``parameter``, whose weights have been ``rounded``."""
        made = cls(form, scheme, parameter.dtype, device="meta")
        made.fill(rounded)
        return made.train(training)

    def product(self, x: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """`experts_linear` with these weights: x ``[tokens, (slots,) inputs]``, index ``[tokens, slots]``."""
        if self.weight.dim() == 3:
            return torch.ops.liteboost.experts_tiles(
                x, self.weight, self.scales, self.zero_points, bias, index, self.form.outputs
            )
        if self._is_read_by_npu():
            each = self.form.count, self.form.outputs
            scales = self.scales.view(each) if self.scheme.bits == 8 else self.scales
            return torch.ops.liteboost._npu_experts(
                x, self.weight.view(*each, -1), scales, self.zero_points, bias, index
            )
        return self._one_by_one(x, bias, index)

    def _is_read_by_npu(self) -> bool:
        """Whether one operator takes them all: 8 bits as they are saved, 4 as they are arranged."""
        if self.weight.device.type != "npu" or not hasattr(torch.ops.liteboost, "_npu_experts"):
            return False
        return self.scheme.bits == 8 or self.is_arranged_for_npu

    def _groups_for_npu(self, groups: Tensor) -> Tensor:
        return groups.unflatten(0, (self.form.count, -1)).transpose(1, 2).contiguous()

    def _groups_of_npu(self, groups: Tensor) -> Tensor:
        return groups.transpose(1, 2).flatten(0, 1).contiguous()

    def _one_by_one(self, x: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """Where nothing takes them all: on other devices, and where they are brought in for each call."""
        out = x.new_zeros(*index.shape, self.form.outputs)
        for expert in index.unique().tolist():
            if expert < self.form.count:  # the next stands for none
                token, slot = torch.where(index == expert)
                rows = x[token] if x.dim() == 2 else x[token, slot]
                out[token, slot] = self._multiply(rows, expert, None if bias is None else bias[expert])
        return out

    def _multiply(self, rows: Tensor, expert: int, bias: Tensor | None) -> Tensor:
        own, zeros = self._rows_of(expert), self.zero_points
        if self.scheme.bits == 8:
            return torch.ops.liteboost.linear_w8(rows, self.weight[own], self.scales[own], bias)
        zeros = None if zeros is None else zeros[own]
        return torch.ops.liteboost.linear_w4(rows, self.weight[own], self.scales[own], zeros, bias)

    def _rows_of(self, expert: int) -> slice:
        return slice(expert * self.form.outputs, (expert + 1) * self.form.outputs)

    # ---- as the parameter that it stands for ----

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.form.shape)

    @property
    def ndim(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def dequantized_kv(self) -> Tensor:
        """The parameter, with the weights that are multiplied by, in `dtype`."""
        return self.form.parameter(self.dequantized(self.dtype))

    def transpose(self, first: int, second: int) -> Tensor:
        return self.dequantized_kv().transpose(first, second)

    @property
    def mT(self) -> Tensor:
        return self.dequantized_kv().mT

    def __getitem__(self, index: Any) -> Tensor:
        is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
        if not is_one or self.is_arranged_for_npu:
            return self.dequantized_kv()[index]
        tiles = self.weight.dim() == 3
        kept = self._tiles_of(int(index)) if tiles else self._saved_rows(int(index))
        dequantize = dequantize_w8 if self.scheme.bits == 8 else dequantize_w4
        matrix = dequantize(**kept.tensors(), dtype=self.dtype)
        return matrix.t() if self.form.is_transposed else matrix

    def _saved_rows(self, expert: int) -> Quantized:
        own, zeros = self._rows_of(expert), self.zero_points
        return Quantized(self.weight[own], self.scales[own], None if zeros is None else zeros[own])

    def _tiles_of(self, expert: int) -> Quantized:
        many = self.form.outputs // TILE
        own, zeros = slice(expert * many, (expert + 1) * many), self.zero_points
        part = Quantized(self.weight[own], self.scales[own], None if zeros is None else zeros[own])
        return part.from_tiles(self.form.outputs, self.form.inputs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tree_map(
            lambda each: each.dequantized_kv() if isinstance(each, cls) else each, (args, dict(kwargs or {}))
        )
        return func(*given[0], **given[1])

    def extra_repr(self) -> str:
        form = self.form
        grouped = "" if self.scheme.bits == 8 else f", group_size={self.scheme.group_size}"
        return (
            f"{self.scheme.name}, experts={form.count}, in_features={form.inputs}, "
            f"out_features={form.outputs}{grouped}"
        )


def _refuse_parameter(module: torch.nn.Module, keys: Any) -> None:
    """Raise `StateError` where a ``state_dict`` had the parameter that a module of integers stands for."""
    missing = set(keys.missing_keys)
    for name in keys.unexpected_keys:
        if f"{name}.weight" in missing:
            raise StateError(
                f"{name} of the state_dict is a parameter, and this model keeps integers there. Quantise the "
                "model that has these numbers (liteboost_adaptor.apply(model, quant=...)), or load them into "
                "this one after model.dequantize()"
            )
