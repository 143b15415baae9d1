"""The schemes: how many bits of weights and activations, over which groups, with or without zero points."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ...errors import QuantizationError
from ...ops.int8_linear import COLUMNS
from ...setting_values import QUANT_GROUPS as GROUP_SIZES
from ...setting_values import QUANT_SCHEMES as SCHEMES
from ...setting_values import W4_SCHEMES

_SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Names of fields in configurations, where they are other ones.
_IN_FILES = {"scale_dtype_name": "scales", "num_columns": "columns"}


@dataclass(frozen=True)
class QuantScheme:
    """How the weight of a linear layer is quantized.

    Attributes:
        name: ``"w8a16"``: int8 with a scale for each output; ``"w8a8"``: the same, and activations quantized
            dynamically, per token; ``"w4a16"``: 4 bits with a scale for each group; ``"w4a8"``: the same, and
            activations quantized dynamically, for each 32 columns of a token.
        group_size: Columns that share a scale, of 4 bits.
        symmetric: Whether 8 stands for zero in every group; else each group has a zero point.
        scale_dtype_name: Dtype of the scales, where the checkpoint of another format has chosen it.
        num_columns: Number of columns of the weight, where they are not those of the input in order; else 0.
    """

    name: str
    group_size: int = 32
    symmetric: bool = True
    scale_dtype_name: str = ""
    num_columns: int = 0

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise QuantizationError(f"scheme must be one of {', '.join(SCHEMES)}, got {self.name!r}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, GROUP_SIZES))
            raise QuantizationError(f"group_size must be one of {allowed}, got {self.group_size!r}")
        if not isinstance(self.symmetric, bool):
            raise QuantizationError(f"symmetric must be True or False, got {self.symmetric!r}")
        if self.bits == 8 and not self.symmetric:
            raise QuantizationError(f"scheme {self.name} is symmetric; symmetric=False is for 4 bits")
        if type(self.num_columns) is not int or self.num_columns < 0 or (self.num_columns and self.bits == 8):
            raise QuantizationError(
                f"columns must be a number of columns, of 4 bits, got {self.num_columns!r}"
            )

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 4 if self.name in W4_SCHEMES else 8

    @property
    def quantizes_activations(self) -> bool:
        """Whether the inputs of a layer are quantized to 8 bits, too."""
        return self.name in ("w8a8", "w4a8")

    @property
    def is_w8a8(self) -> bool:
        """Whether both factors are int8: the op reads plain rows, and nothing is prepacked."""
        return self.name == "w8a8"

    @property
    def scale_dtype(self) -> torch.dtype:
        """One scale an output costs nothing in fp32; one for 32 weights of 4 bits does."""
        if self.scale_dtype_name:
            return _SCALE_DTYPES[self.scale_dtype_name]
        return torch.float32 if self.bits == 8 else torch.bfloat16

    def why_unsupported(self, out_features: int, in_features: int) -> str:
        """Why a layer of this size cannot have the scheme, or an empty string."""
        width = self.num_columns or in_features
        if self.bits == 4 and (width % self.group_size or not width):
            return f"in_features = {width} is not a multiple of the group size {self.group_size}"
        if self.is_w8a8 and width > COLUMNS:
            return f"in_features = {width} is more than {COLUMNS}, whose products fit 32 bits"
        return ""

    def buffer_specs(
        self, out_features: int, in_features: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the buffers of a layer, by name."""
        if self.bits == 8:
            weight = (out_features, in_features), torch.int8
            return {"weight": weight, "scales": ((out_features,), self.scale_dtype)}
        width = self.num_columns or in_features
        groups = (out_features, width // self.group_size)
        specs = {"weight": ((out_features, width // 2), torch.uint8), "scales": (groups, self.scale_dtype)}
        if not self.symmetric:
            specs["zero_points"] = groups, torch.uint8
        return {**specs, "columns": ((self.num_columns,), torch.int32)} if self.num_columns else specs

    def to_dict(self) -> dict[str, Any]:
        """As the configuration of a checkpoint has it, of a layer that comes from another format."""
        return {_IN_FILES.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Any) -> QuantScheme:
        """What `to_dict` wrote.

        Raises:
            QuantizationError: It is something else.
        """
        known = {_IN_FILES.get(each.name, each.name): each.name for each in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known.keys() or "name" not in values:
            raise QuantizationError(f"a layer must be given by {', '.join(sorted(known))}, got {values!r}")
        scheme = cls(**{known[name]: value for name, value in {"scales": "float32", **values}.items()})
        dtype = scheme.scale_dtype_name
        if not isinstance(dtype, str) or dtype not in _SCALE_DTYPES:
            raise QuantizationError(f"scales must be of one of {', '.join(_SCALE_DTYPES)}, got {dtype!r}")
        return scheme
