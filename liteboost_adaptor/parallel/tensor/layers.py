"""What divided layers do: compute on what the rank holds, and exchange.

A layer whose output is added over the ranks is no ``nn.Linear`` any more. Whoever looks for that type, to
wrap or to exchange it (adapters, quantizers), would lose the exchange and compute something else without an
error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...program.state import RECORDABLE
from ...quantization.layers import QuantizedLinear
from ...replacements.guards import autocast, unserved
from . import matmul_all_reduce, plan
from .layout_builder import is_transposed
from .source_checks import ROUTED

collectives = torch.ops.liteboost_parallel
ops = torch.ops.liteboost


class _Linear(nn.Module):
    """``nn.Linear`` or ``Conv1D`` on a part of its weight."""

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    group: str
    is_transposed: bool

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight^T + bias``."""
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if self.is_transposed:
            return F.linear(x, weight.t(), bias)
        if weight.dtype != x.dtype or unserved(x, weight, bias) or autocast(x):
            return F.linear(x, weight, bias)
        return ops.linear(x, weight, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group!r}"


def _summed(mine: Tensor, group: str) -> Tensor:
    """The sum over the ranks of what nobody else has: in its place, where a process group would copy it."""
    # Not on a CPU: there is no copy, and a recorded step may not decide by a value behind a write.
    return collectives.all_reduce(mine, group) if mine.is_cpu else collectives.all_reduce_(mine, group)


class SumLinear(_Linear):
    """Holds a part of the input features; the products are added over the ranks, the bias by rank 0.

    Attributes:
        other: Empty, or the product that a `DeferredLinear` has left, which is added with this one.
        is_fusible: Whether no rank adds a bias, or anything else, before the sum.
    """

    other: list[Tensor]
    is_fusible: bool

    def forward(self, x: Tensor) -> Tensor:
        other = self.__dict__["other"]
        if not x.is_cpu and self.__dict__["is_fusible"] and not other:
            summed = matmul_all_reduce.product(x, self._parameters["weight"], self.group)
            if summed is not None:
                return summed
        product = self.product(x)
        return _summed(product + other.pop() if other else product, self.group)


class DeferredLinear(_Linear):
    """As `SumLinear`, but its output is only ever added to that of a later one, which exchanges for both."""

    other: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(x)
        self.__dict__["other"][:] = [product]
        return torch.zeros_like(product)


class HeadLinear(_Linear):
    """Holds a part of the output features; the outputs of all ranks are put together."""

    sizes: list[int]

    def forward(self, x: Tensor) -> Tensor:
        return collectives.all_gather(self.product(x), self.sizes, self.group)


class QuantizedSum(SumLinear, QuantizedLinear):
    """`SumLinear` on groups of columns of integers."""

    product = QuantizedLinear.forward


class QuantizedDeferred(DeferredLinear, QuantizedLinear):
    """`DeferredLinear` on groups of columns of integers."""

    product = QuantizedLinear.forward


class QuantizedHead(HeadLinear, QuantizedLinear):
    """`HeadLinear` on rows of integers."""

    product = QuantizedLinear.forward


_QUANTIZED = {SumLinear: QuantizedSum, DeferredLinear: QuantizedDeferred, HeadLinear: QuantizedHead}


class VocabularyEmbedding(nn.Module):
    """Holds rows ``first`` to ``first + num_embeddings`` of an embedding; other tokens are another rank's."""

    first: int
    num_embeddings: int
    group: str

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        rows = super().forward(local.masked_fill(elsewhere, 0))  # type: ignore[misc]
        mine = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        # Ranks on which something has chosen other tokens would go on with a text that none of them has.
        return collectives.all_reduce_of(mine, ids, self.group) if mine.is_cpu else _summed(mine, self.group)


@functools.cache
def _vocabulary_class(cls: type) -> type:
    """`VocabularyEmbedding` before ``cls``, whose own forward then looks the local rows up."""
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": _reduce_embedding,
    }
    return type(cls.__name__, (VocabularyEmbedding, cls), names)


def _reduce_embedding(self: Any, protocol: Any) -> Any:
    # Made at run time: a pickle cannot find it by its name.
    return _restored, (type(self).__mro__[2], self.__dict__.copy())


def _restored(cls: type, state: dict[str, Any]) -> Any:
    made = _vocabulary_class(cls)
    module = made.__new__(made)
    module.__dict__.update(state)
    return module


class SpanningNorm(nn.Module):
    """A root mean square norm over all heads, of which a rank holds some.

    Attributes:
        width: Of what all ranks hold together.
        form: When the result is rounded: ``"before"`` it is multiplied with the weight, or ``"after"``.
    """

    weight: Tensor
    eps: float
    width: int
    form: str
    group: str

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        squares = collectives.all_reduce(wide.pow(2).sum(-1, keepdim=True), self.group)
        return _scaled(wide, squares / self.width, self.weight, self.eps, x.dtype, self.form)


def _scaled(wide: Tensor, mean: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, form: str) -> Tensor:
    normed = wide * torch.rsqrt(mean + eps)
    return weight * normed.to(dtype) if form == "before" else (weight * normed).to(dtype)


def form_of(norm: nn.Module) -> str:
    """How ``norm`` rounds, found out by calling it; empty where it computes something else."""
    weight = norm.weight
    generator = torch.Generator().manual_seed(0)
    eps = norm_eps(norm)
    for form in ("before", "after"):
        agrees = True
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(5, weight.numel(), generator=generator) * 3).to(dtype)
            probe = torch.randn(weight.numel(), generator=generator).to(dtype)
            with torch.no_grad():
                found = torch.func.functional_call(norm, {"weight": probe}, (x,))
            wide = x.to(torch.float32)
            agrees &= torch.equal(
                found, _scaled(wide, wide.pow(2).mean(-1, keepdim=True), probe, eps, dtype, form)
            )
        if agrees:
            return form
    return ""


def norm_eps(norm: nn.Module) -> float:
    """What the norm adds to the mean of squares."""
    return next(
        float(getattr(norm, name)) for name in ("variance_epsilon", "eps", "epsilon") if hasattr(norm, name)
    )


def _sum_output(group: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return collectives.all_reduce(output, group)


def _own_experts(first: int, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """What experts from ``first`` on are given: others have the number of none, and no weight."""
    given = dict(zip(ROUTED, args, strict=False)) | kwargs
    index = given["top_k_index"] - first
    elsewhere = (index < 0) | (index >= module.num_experts)
    given["top_k_index"] = index.masked_fill(elsewhere, module.num_experts)
    given["top_k_weights"] = given["top_k_weights"].masked_fill(elsewhere, 0)
    return tuple(given[name] for name in ROUTED), {}


def become_pair(later: nn.Module, earlier: nn.Module, group: str) -> None:
    """Let `SumLinear` ``later`` exchange for the linear layer ``earlier``."""
    _become_linear(earlier, DeferredLinear, group)
    vars(earlier)["other"] = vars(later)["other"]


def let_fuse(module: nn.Module) -> None:
    """Let `SumLinear` ``module``, whose products no rank adds anything to, use an operator that sums them."""
    is_plain = not isinstance(module, QuantizedLinear) and not module.is_transposed
    vars(module)["is_fusible"] = is_plain and module._parameters["bias"] is None


def _become_linear(module: nn.Module, cls: type, group: str) -> None:
    own = vars(module)
    own["group"], own["other"], own["is_fusible"] = group, [], False
    if isinstance(module, QuantizedLinear):
        module.__class__ = _QUANTIZED[cls]
        return
    own["is_transposed"] = is_transposed(module)
    module.__class__ = cls
    shape = module.weight.shape
    own["in_features"], own["out_features"] = shape if own["is_transposed"] else reversed(shape)


def become(
    module: nn.Module, role: str, cut: plan.Cut | None, rank: int, world_size: int, group: str
) -> None:
    """Give ``module``, whose parameters have been divided, its role."""
    if role == plan.EXPERTS:
        (first, last), *_ = cut.ranges(rank, world_size)
        module.num_experts = last - first
        choose = functools.partial(_own_experts, first)
        setattr(choose, RECORDABLE, True)
        module.register_forward_pre_hook(choose, with_kwargs=True)
    if role in (plan.SUM_OUTPUT, plan.EXPERTS):
        hook = functools.partial(_sum_output, group)
        setattr(hook, RECORDABLE, True)
        module.register_forward_hook(hook)
        return
    own = vars(module)
    own["group"] = group
    if role in (plan.SUM, plan.HEAD):
        _become_linear(module, SumLinear if role == plan.SUM else HeadLinear, group)
    if role == plan.HEAD:
        own["sizes"] = [cut.length(each, world_size) for each in range(world_size)]
    if role == plan.EMBEDDING:
        own["first"] = cut.ranges(rank, world_size)[0][0]
        own["num_embeddings"] = module.weight.shape[0]
        own["padding_idx"] = None  # matters for gradients only
        module.__class__ = _vocabulary_class(type(module))
    if role == plan.NORM:
        own["eps"] = norm_eps(module)
        # With fewer heads than ranks each head is added as often as it is held.
        own["width"] = sum(cut.length(each, world_size) for each in range(world_size))
        module.__class__ = SpanningNorm


#: What `become`, and what resizes modules, leaves on one, beside its parameters.
OWN_ATTRIBUTES = (
    *("group", "other", "is_fusible", "is_transposed", "sizes", "first", "num_embeddings", "padding_idx"),
    *("eps", "width", "form", "in_features", "out_features", "nx", "nf", "num_experts", "shares"),
)


def whole_config(config: Any) -> Any:
    """The configuration that ``config`` has the numbers of a rank of, if so."""
    return config._config if isinstance(config, LocalConfig) else config


class LocalConfig:
    """A configuration with the numbers of this rank in some places, for one module."""

    def __init__(self, config: Any, local: dict[str, int]) -> None:
        self._config, self._local = config, local

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_config", "_local"):
            raise AttributeError(name)
        return self._local[name] if name in self._local else getattr(self._config, name)
