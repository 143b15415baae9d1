"""A weight kept as integers: its buffers, how they lie in a device's memory, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..errors import StateError
from ..ops.quantized_linear import (
    dequantize_w4,
    dequantize_w8,
    from_int4,
    scales_to_tiles,
    to_tiles,
)
from .rounding import Quantized
from .schemes import Scheme


class QuantizedWeight(torch.nn.Module):
    """A weight ``[out_features, in_features]`` of 8 or 4 bits.

    Buffers: ``weight``, ``scales`` and, where the scheme has them, ``zero_points``, as `linear_w8`,
    `linear_w4` and `linear_w8a8` take them, or after `arrange` as the device reads them: what is saved is the
    former either way. ``columns`` where the weight's columns are not those of the input in order: the column
    of the input that each is multiplied by. Scales keep their dtype when the module is cast.

    Attributes:
        dtype: Of what the weight is multiplied by, as far as is known.
        keeps_integers: That buffers are weights, for whoever moves weights.
    """

    keeps_integers = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        native.load()  # the ops
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.dtype = dtype
        for name, (shape, kind) in scheme.shapes(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        for name in ("zero_points", "columns"):
            if name not in self._buffers:
                self.register_buffer(name, None)
        # In an NPU's memory, where `scales` of 8 bits have the dtype of what they are multiplied by.
        self.register_buffer("exact_scales", None, persistent=False)

    @property
    def width(self) -> int:
        """Columns of the weight as it is kept."""
        return self.in_features if self.columns is None else len(self.columns)

    def fill(self, quantized: Quantized) -> None:
        """Take the tensors of a quantised weight."""
        with torch.inference_mode(False):
            for name, tensor in quantized.tensors().items():
                setattr(self, name, tensor)

    @property
    def is_arranged(self) -> bool:
        """Whether the buffers lie as one kind of device reads them, not as they are saved."""
        return self.weight.dim() == 3 or self.is_arranged_for_npu

    @property
    def is_arranged_for_npu(self) -> bool:
        """Whether 4 bits lie as CANN packs them, or scales of 8 have the dtype that its operator takes."""
        return self.weight.dtype == torch.int32 or self.exact_scales is not None

    def arrange(self) -> None:
        """Lay the buffers out as the device reads them: in tiles for a CPU, as CANN packs them for an NPU.

        Nothing happens where they are already, on other devices, and where they meet rounded activations.
        """
        if self.is_arranged or self.scheme.rounds_activations:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.weight.device.type == "cpu":
                self._arrange_in_tiles()
            elif self.weight.device.type == "npu" and hasattr(torch.ops.liteboost, "_npu_int4"):
                self._arrange_for_npu()

    def _arrange_in_tiles(self) -> None:
        self.weight = to_tiles(self.weight)
        self.scales = scales_to_tiles(self.scales)
        if self.zero_points is not None:
            self.zero_points = scales_to_tiles(self.zero_points)

    def _arrange_for_npu(self) -> None:
        if self.scheme.bits == 8:
            if self.dtype in (torch.bfloat16, torch.float16) and self.scales.dtype != self.dtype:
                self.exact_scales, self.scales = self.scales, self.scales.to(self.dtype)
            return
        self.weight = torch.ops.liteboost._npu_int4(self.weight)
        if self.zero_points is not None:  # what is added to integers of -8 to 7; exact
            self.zero_points = self._groups_for_npu(8 - self.zero_points.to(self.scales.dtype))
        self.scales = self._groups_for_npu(self.scales)

    def _groups_for_npu(self, groups: Tensor) -> Tensor:
        """What comes with the groups of outputs, ``[out, groups]``, as the operator for 4 bits reads it."""
        return groups.t().contiguous()

    def _groups_of_npu(self, groups: Tensor) -> Tensor:
        """The inverse of `_groups_for_npu`."""
        return groups.t().contiguous()

    def saved(self) -> Quantized:
        """The tensors as they are saved; copies, if the layer is arranged."""
        if not self.is_arranged:
            return Quantized(self.weight, self.scales, self.zero_points)
        if self.is_arranged_for_npu:
            return self._saved_of_npu()
        return Quantized(self.weight, self.scales, self.zero_points).from_tiles(self.out_features, self.width)

    def _saved_of_npu(self) -> Quantized:
        if self.scheme.bits == 8:
            exact = self.exact_scales
            is_unchanged = torch.equal(exact.to(self.scales.dtype), self.scales)
            return Quantized(self.weight, exact if is_unchanged else self.scales.to(exact.dtype))
        zeros = self.zero_points
        return Quantized(
            from_int4(self.weight.cpu()).to(self.weight.device),
            self._groups_of_npu(self.scales),
            None if zeros is None else self._groups_of_npu(8 - zeros).to(torch.uint8),
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the layer multiplies by."""
        kept = self.saved()
        if self.scheme.bits == 8:
            return dequantize_w8(kept.weight, kept.scales, dtype)
        if self.columns is None:
            return dequantize_w4(kept.weight, kept.scales, kept.zero_points, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        picked = dequantize_w4(kept.weight, kept.scales, kept.zero_points, wide)
        whole = picked.new_zeros(self.out_features, self.in_features)
        return whole.index_add_(1, self.columns, picked).to(dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        native.load()
        super().__setstate__(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        device = self.weight.device
        if self.is_arranged_for_npu:
            self.lay_back()
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.dtype = self.scales.dtype
            self.scales = scales.to(self.scales.device)
        if self.is_arranged and self.weight.device != device:
            self.lay_back()
        if self.weight.device.type == "npu":
            self.arrange()
        return self

    def lay_back(self) -> None:
        """Lay the buffers out as they are saved."""
        kept, self.exact_scales = self.saved(), None
        self.fill(kept)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_arranged:
            destination.update({prefix + name: each for name, each in self.saved().tensors().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._check_state(state_dict, prefix)
        was_arranged = self.is_arranged
        if was_arranged:
            self.lay_back()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if was_arranged:
            self.arrange()

    def _check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise `StateError` before torch casts numbers to integers, or mixes integers with other scales."""
        wanted = self.scheme.shapes(self.out_features, self.in_features)
        given = {part: state_dict[prefix + part] for part in wanted if prefix + part in state_dict}
        remedy = (
            "Quantise the model that has these numbers (liteboost_adaptor.apply(model, quant=...)), or load "
            "them into this one after model.dequantize()"
        )
        for part, tensor in given.items():
            dtype = wanted[part][1]
            is_cast = dtype.is_floating_point and tensor.dtype.is_floating_point
            if tensor.dtype != dtype and not is_cast:
                raise StateError(
                    f"{prefix}{part} of the state_dict is {tensor.dtype}, and this model keeps {dtype} there "
                    f"({self.scheme.name}). {remedy}"
                )
        missing = [prefix + part for part in wanted if part not in given]
        if given and missing:
            raise StateError(
                f"the state_dict has {prefix}{next(iter(given))} without {', '.join(missing)}, and integers "
                f"mean nothing with the scales of others. {remedy}"
            )
