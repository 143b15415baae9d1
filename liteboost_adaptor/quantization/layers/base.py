"""The base of modules with a quantized weight: its buffers, prepacked in memory, plain rows in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ... import native
from ...errors import StateError
from ...ops.quantized_linear import from_int4
from ..schemes import QuantizedTensor, QuantScheme

#: What to do about a ``state_dict`` that is not that of a quantized model.
REMEDY = (
    "Quantize the model that has these numbers (liteboost_adaptor.apply(model, quant=...)), or load them "
    "into this one after model.dequantize()"
)


class QuantizedLayer(torch.nn.Module):
    """A module with a weight ``[out_features, in_features]`` of 8 or 4 bits.

    Its buffers::

        buffer          files, state_dict    prepacked for a CPU        prepacked for an NPU
        weight, 8 bits  int8 [out, in]       int8 [tiles, in32/4, 64]   as in files
        weight, 4 bits  uint8 [out, in/2]    uint8 [tiles, in/8, 64]    int32 [out, in/8]
        scales, 8 bits  [out]                [tiles, 1, 16]             [out] in `dtype`, if bf16 or fp16
        scales, 4 bits  [out, groups]        [tiles, groups, 16]        [groups, out]
        zero_points     uint8 [out, groups]  uint8 [tiles, groups, 16]  8 - z, [groups, out], dtype of scales
        columns         int32 [columns]      as in files                as in files

    ``in32`` is ``in`` rounded up to a multiple of 32. ``scales`` are fp32 for 8 bits and bf16 for 4, unless
    the checkpoint of another format has chosen; they keep their dtype when the module is cast. In an NPU's
    memory ``exact_scales`` has those of 8 bits as in files. ``zero_points`` is None where 8 stands for zero,
    ``columns`` where the weight's columns are those of the input in order: else it has the input's column
    for each of the weight's, whose number is then ``in``. w8a8 is never prepacked. Experts on an NPU have
    ``[experts, groups, out]`` of 4 bits.

    Raises:
        NativeLibraryError: The compiled kernels cannot be used.

    Attributes:
        dtype: Of what the weight is multiplied by, as far as is known.
        holds_integers: That buffers are weights, for whoever moves weights.
    """

    holds_integers = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: QuantScheme,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        native.require("a quantized layer")
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.dtype = dtype
        for name, (shape, kind) in scheme.buffer_specs(out_features, in_features).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        for name in ("zero_points", "columns"):
            if name not in self._buffers:
                self.register_buffer(name, None)
        # In an NPU's memory, where `scales` of 8 bits have the dtype of what they are multiplied by.
        self.register_buffer("exact_scales", None, persistent=False)

    def fill(self, quantized: QuantizedTensor) -> None:
        """Take the tensors of a quantized weight."""
        with torch.inference_mode(False):
            for name, tensor in quantized.tensors().items():
                setattr(self, name, tensor)

    @property
    def is_packed(self) -> bool:
        """Whether the buffers are laid out as one kind of device reads them, not as in files."""
        return self.weight.dim() == 3 or self.is_packed_for_npu

    @property
    def is_packed_for_npu(self) -> bool:
        """Whether 4 bits are packed as CANN does, or scales of 8 have the dtype that its operator takes."""
        return self.weight.dtype == torch.int32 or self.exact_scales is not None

    def is_read_by_npu(self) -> bool:
        """Whether an NPU's operator takes the buffers as they are: 8 bits as in files, 4 prepacked."""
        weight = self.weight
        if weight.dim() == 3 or weight.device.type != "npu" or not _has_npu_kernels():
            return False
        return self.scheme.bits == 8 or self.is_packed_for_npu

    def prepack(self) -> None:
        """Lay the buffers out as the device reads them: in tiles for a CPU, as CANN packs them for an NPU.

        Nothing happens where they are already, on other devices, and for w8a8, which reads rows.
        """
        if self.is_packed or self.scheme.is_w8a8:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.weight.device.type == "cpu":
                self.fill(self._buffers_as_tensor().prepack())
            elif self.weight.device.type == "npu" and _has_npu_kernels():
                self._prepack_for_npu()

    def _buffers_as_tensor(self) -> QuantizedTensor:
        return QuantizedTensor(self.weight, self.scales, self.zero_points)

    def _prepack_for_npu(self) -> None:
        if self.scheme.bits == 8:
            if self.dtype in (torch.bfloat16, torch.float16) and self.scales.dtype != self.dtype:
                self.exact_scales, self.scales = self.scales, self.scales.to(self.dtype)
            return
        self.weight = torch.ops.liteboost._npu_int4(self.weight)
        if self.zero_points is not None:  # what is added to integers of -8 to 7; exact
            self.zero_points = self._pack_groups(8 - self.zero_points.to(self.scales.dtype))
        self.scales = self._pack_groups(self.scales)

    def _pack_groups(self, groups: Tensor) -> Tensor:
        """Scales or zero points ``[out, groups]`` as an NPU's operator for 4 bits reads them."""
        return groups.t().contiguous()

    def _unpack_groups(self, groups: Tensor) -> Tensor:
        """The inverse of `_pack_groups`."""
        return groups.t().contiguous()

    def unpacked(self) -> QuantizedTensor:
        """The tensors as files have them; copies, if the layer is prepacked."""
        if not self.is_packed:
            return self._buffers_as_tensor()
        if self.is_packed_for_npu:
            return self._unpacked_from_npu()
        width = self.in_features if self.columns is None else len(self.columns)
        return self._buffers_as_tensor().unpack(self.out_features, width)

    def _unpacked_from_npu(self) -> QuantizedTensor:
        if self.scheme.bits == 8:
            exact = self.exact_scales
            is_unchanged = torch.equal(exact.to(self.scales.dtype), self.scales)
            return QuantizedTensor(self.weight, exact if is_unchanged else self.scales.to(exact.dtype))
        zeros = self.zero_points
        return QuantizedTensor(
            from_int4(self.weight.cpu()).to(self.weight.device),
            self._unpack_groups(self.scales),
            None if zeros is None else self._unpack_groups(8 - zeros).to(torch.uint8),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[out_features, in_features]`` in floating point."""
        if self.columns is None:
            return self.unpacked().dequantize(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        columns = self.unpacked().dequantize(wide)
        whole = columns.new_zeros(self.out_features, self.in_features)
        return whole.index_add_(1, self.columns, columns).to(dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        native.require("a quantized layer")
        super().__setstate__(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLayer:
        device = self.weight.device
        if self.is_packed_for_npu:
            self.unpack()
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.dtype = self.scales.dtype
            self.scales = scales.to(self.scales.device)
        if self.is_packed and self.weight.device != device:
            self.unpack()
        if self.weight.device.type == "npu":
            self.prepack()
        return self

    def unpack(self) -> None:
        """Lay the buffers out as files have them."""
        plain, self.exact_scales = self.unpacked(), None
        self.fill(plain)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_packed:
            destination.update({prefix + name: each for name, each in self.unpacked().tensors().items()})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._check_state(state_dict, prefix)
        was_packed = self.is_packed
        if was_packed:
            self.unpack()
        super()._load_from_state_dict(state_dict, prefix, *args)
        if was_packed:
            self.prepack()

    def _check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise `StateError` before torch casts numbers to integers, or mixes integers with other scales."""
        specs = self.scheme.buffer_specs(self.out_features, self.in_features)
        given = {name: state_dict[prefix + name] for name in specs if prefix + name in state_dict}
        for name, tensor in given.items():
            dtype = specs[name][1]
            is_cast = dtype.is_floating_point and tensor.dtype.is_floating_point
            if tensor.dtype != dtype and not is_cast:
                raise StateError(
                    f"{prefix}{name} of the state_dict is {tensor.dtype}, and this model keeps {dtype} there "
                    f"({self.scheme.name}). {REMEDY}"
                )
        for name in ("zero_points", "columns"):
            if name not in specs and state_dict.get(prefix + name) is not None:
                raise StateError(
                    f"the state_dict has {prefix}{name}, and this model's {self.scheme.name} has none: "
                    f"integers mean something else without it. {REMEDY}"
                )
        missing = [prefix + name for name in specs if name not in given]
        if given and missing:
            raise StateError(
                f"the state_dict has {prefix}{next(iter(given))} without {', '.join(missing)}, and integers "
                f"mean nothing with the scales of others. {REMEDY}"
            )


def _has_npu_kernels() -> bool:
    return hasattr(torch.ops.liteboost, "_npu_linear_packed")
