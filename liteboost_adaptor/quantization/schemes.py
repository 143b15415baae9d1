"""The schemes: how many bits of weights and activations, over which groups, with or without zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import QUANT_GROUPS as GROUP_SIZES
from ..config import QUANT_SCHEMES as SCHEMES
from ..errors import QuantizationError
from ..ops.int8_linear import COLUMNS


@dataclass(frozen=True)
class Scheme:
    """How the weight of a linear layer is kept.

    Attributes:
        name: ``"w8a16"``: int8 with a scale for each output; ``"w8a8"``: the same, and activations rounded to
            8 bits row by row as they come; ``"w4a16"``: 4 bits with a scale for each group.
        group_size: Columns that share a scale, for w4a16.
        symmetric: Whether 8 stands for zero in every group; else each group has a zero point.
    """

    name: str
    group_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise QuantizationError(f"scheme must be one of {', '.join(SCHEMES)}, got {self.name!r}")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            allowed = ", ".join(map(str, GROUP_SIZES))
            raise QuantizationError(f"group_size must be one of {allowed}, got {self.group_size!r}")
        if not isinstance(self.symmetric, bool):
            raise QuantizationError(f"symmetric must be True or False, got {self.symmetric!r}")
        if self.bits == 8 and not self.symmetric:
            raise QuantizationError(f"scheme {self.name} is symmetric; symmetric=False is for w4a16")

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 4 if self.name == "w4a16" else 8

    @property
    def rounds_activations(self) -> bool:
        """Whether the inputs of a layer are rounded to 8 bits, too."""
        return self.name == "w8a8"

    @property
    def scale_dtype(self) -> torch.dtype:
        """One scale an output costs nothing in fp32; one for 32 weights of 4 bits does."""
        return torch.float32 if self.bits == 8 else torch.bfloat16

    def unsuited(self, outputs: int, inputs: int) -> str:
        """Why a layer of this size cannot be kept so, or an empty string."""
        if self.bits == 4 and (inputs % self.group_size or not inputs):
            return f"in_features = {inputs} is not a multiple of the group size {self.group_size}"
        if self.rounds_activations and inputs > COLUMNS:
            return f"in_features = {inputs} is more than {COLUMNS}, whose products fit 32 bits"
        return ""

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the tensors that `rounding.quantize` gives, by name."""
        if self.bits == 8:
            return {"weight": ((outputs, inputs), torch.int8), "scales": ((outputs,), self.scale_dtype)}
        groups = (outputs, inputs // self.group_size)
        found = {"weight": ((outputs, inputs // 2), torch.uint8), "scales": (groups, self.scale_dtype)}
        return found if self.symmetric else {**found, "zero_points": (groups, torch.uint8)}
