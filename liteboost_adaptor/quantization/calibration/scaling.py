"""Scales moved from a norm to the linear layers behind it: SmoothQuant, and activation-aware scaling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..schemes import QuantScheme, quantize

#: How much of the range goes from activations to weights: SmoothQuant's alpha.
SMOOTHING = 0.5
#: What activation-aware scaling tries for the exponent of activations.
EXPONENTS = tuple(step / 10 for step in range(11))


@dataclass
class ActivationStatistics:
    """Of the inputs of a linear layer, channel by channel.

    Attributes:
        largest: ``[in]``, largest magnitude.
        total: ``[in]``, sum of magnitudes.
        gram: ``[in, in]``, sum of outer products.
        rows: How many.
    """

    largest: Tensor
    total: Tensor
    gram: Tensor
    rows: int = 0

    @classmethod
    def of(cls, width: int) -> ActivationStatistics:
        """Of no rows yet."""
        return cls(torch.zeros(width), torch.zeros(width), torch.zeros(width, width))

    def add(self, x: Tensor) -> None:
        """Take the rows of ``x`` ``[..., in]`` in."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not len(rows):
            return
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.total += rows.abs().sum(0)
        self.gram.addmm_(rows.t(), rows)
        self.rows += len(rows)

    @property
    def mean(self) -> Tensor:
        """``[in]``, mean magnitude."""
        return self.total / max(1, self.rows)


@dataclass(frozen=True)
class ScaledNorm:
    """A norm's parameters with a scale taken out of them.

    Attributes:
        parameters: New values by name, in their dtypes.
        scales: ``[channels]``, fp32: what the output was divided by, with the weight as it is rounded.
    """

    parameters: dict[str, Tensor]
    scales: Tensor


def smooth(weights: list[Tensor], statistics: ActivationStatistics) -> Tensor:
    """SmoothQuant: what to divide activations and multiply columns of ``weights`` by before both are rounded.

    Source: Xiao et al. 2022, arXiv:2211.10438.
    """
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    return _usable(statistics.largest**SMOOTHING / largest ** (1 - SMOOTHING))


def search(weights: list[Tensor], schemes: list[QuantScheme], statistics: ActivationStatistics) -> Tensor:
    """AWQ: what to multiply the columns of ``weights`` by so that rounding changes the layers' outputs least.

    Source: Lin et al. 2023, arXiv:2306.00978; the error is that of all rows seen, by their Gram matrix.
    """
    best, least = torch.ones_like(statistics.largest), torch.inf
    for scales in _candidates(weights, statistics):
        error = 0.0
        for weight, scheme in zip(weights, schemes, strict=True):
            exact = weight.float()
            rounded = quantize(exact * scales, scheme).dequantize() / scales
            error += output_error(rounded - exact, statistics.gram)
        if error < least:
            best, least = scales, error
    return best


def output_error(difference: Tensor, gram: Tensor) -> float:
    """The squared norm of what ``difference`` ``[out, in]`` of a weight changes in the outputs."""
    return ((difference @ gram) * difference).sum().item()


def _candidates(weights: list[Tensor], statistics: ActivationStatistics) -> Iterator[Tensor]:
    magnitude = torch.cat([weight.float().abs() for weight in weights]).mean(0)
    yield torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        yield _usable(statistics.mean**exponent / magnitude ** (1 - exponent))


def _usable(scales: Tensor) -> Tensor:
    """With 1 where a channel is never anything but zero, around 1 as a whole."""
    fine = torch.isfinite(scales) & (scales > 0)
    scales = torch.where(fine, scales, 1.0)
    return torch.where(fine, scales / scales[fine].log().mean().exp() if fine.any() else scales, 1.0)


def divide_scales(norm: torch.nn.Module, scales: Tensor) -> ScaledNorm | None:
    """``norm`` with ``scales`` divided out of its output, or None where its weight is not a factor of that.

    The forms ``weight * x`` and ``(1 + weight) * x`` are told apart by calling a copy in fp64.
    """
    for offset in (0.0, 1.0):
        scaled = _scaled(norm, scales, offset)
        if scaled is not None and _is_exact(norm, scaled):
            return scaled
    return None


def _scaled(norm: torch.nn.Module, scales: Tensor, offset: float) -> ScaledNorm | None:
    weight = norm.weight.detach()
    if weight.numel() != scales.numel():
        return None
    factor = weight.float() + offset
    rescaled = (factor / scales - offset).to(weight.dtype)
    left = rescaled.float() + offset
    usable = torch.isfinite(left) & (left != 0) & (factor != 0)
    exact = torch.where(usable, factor / torch.where(usable, left, 1.0), 1.0)
    parameters = {"weight": torch.where(usable, rescaled, weight)}
    bias = getattr(norm, "bias", None)
    if isinstance(bias, Tensor):
        parameters["bias"] = (bias.detach().float() / exact).to(bias.dtype)
    return ScaledNorm(parameters, exact)


def _is_exact(norm: torch.nn.Module, scaled: ScaledNorm) -> bool:
    before, after = (copy.deepcopy(norm).double() for _ in range(2))
    x = torch.randn(4, scaled.scales.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            for name, value in scaled.parameters.items():
                getattr(after, name).copy_(value)
            expected, found = before(x), after(x) * scaled.scales
    except Exception:  # noqa: BLE001 - a norm that takes more than x is refused by the caller, with a reason
        return False
    # A bias is rounded to its dtype; nothing else is.
    bias = scaled.parameters.get("bias")
    slack = 0.0 if bias is None else 2 * torch.finfo(bias.dtype).eps * bias.double().abs() * scaled.scales
    return bool(((found - expected).abs() <= 1e-5 * expected.abs() + slack + 1e-9).all())
