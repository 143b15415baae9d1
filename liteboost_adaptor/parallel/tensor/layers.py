"""Layers that run on a rank's shard of their parameters, and communicate.

A row-parallel layer is not an ``nn.Linear``: code that looks for that type to wrap or replace it (adapters,
quantizers) would lose the all-reduce, and compute something else without an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...eligibility import autocast, unserved
from ...program.state import RECORDABLE
from ...quantization.layers import QuantizedLinear
from . import matmul_all_reduce
from .layout_builder import is_transposed
from .norm import ParallelRMSNorm, norm_eps
from .plan import ALL_REDUCE_OUTPUT, EMBEDDING, EXPERTS, HEAD, NORM, ROWWISE, Role
from .shard_spec import DimSharding
from .source_checks import ROUTED

collectives = torch.ops.liteboost_parallel
ops = torch.ops.liteboost


class _ParallelLinear(nn.Module):
    """``nn.Linear`` or ``Conv1D`` on a shard of its weight.

    No constructor: `parallelize_module` sets the class and the attributes of a layer that is there.

    Attributes:
        weight: This rank's ``[out, in]``; ``[in, out]`` where ``is_transposed``.
        group: Name of the process group.
    """

    weight: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    group: str
    is_transposed: bool
    #: Whether this rank adds the bias: of outputs that are all-reduced, only rank 0, whoever has set one.
    adds_bias: bool

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight^T + bias``."""
        parameters = self._parameters
        weight, bias = parameters["weight"], parameters["bias"] if self.adds_bias else None
        if self.is_transposed:
            return F.linear(x, weight.t(), bias)
        if weight.dtype != x.dtype or unserved(x, weight, bias) or autocast(x):
            return F.linear(x, weight, bias)
        return ops.linear(x, weight, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group!r}"


def _all_reduce(tensor: Tensor, group: str) -> Tensor:
    """All-reduce of a tensor that nobody else uses: in place, where the process group would copy it."""
    # Not on a CPU: there is no copy, and a recorded step may not decide by a value behind a write.
    return collectives.all_reduce(tensor, group) if tensor.is_cpu else collectives.all_reduce_(tensor, group)


class RowParallelLinear(_ParallelLinear):
    """A linear layer sharded by its inputs; the outputs are all-reduced, and rank 0 adds the bias.

    ``[..., own in_features]`` -> ``[..., out_features]``, the same on every rank.

    Attributes:
        deferred: Empty, or the product of a `DeferredReduceLinear`, which is reduced together with this one.
        is_fusible: Whether nothing, a bias included, is added before the all-reduce.
    """

    deferred: list[Tensor]
    is_fusible: bool

    def forward(self, x: Tensor) -> Tensor:
        deferred = self.__dict__["deferred"]
        if not x.is_cpu and self.__dict__["is_fusible"] and not deferred and self._parameters["bias"] is None:
            summed = matmul_all_reduce.matmul_all_reduce(x, self._parameters["weight"], self.group)
            if summed is not None:
                return summed
        product = self.product(x)
        return _all_reduce(product + deferred.pop() if deferred else product, self.group)


class DeferredReduceLinear(_ParallelLinear):
    """As `RowParallelLinear`; its output is only ever added to that of a later layer, which reduces both.

    Attributes:
        branches: (parent, name, module) of all modules around the two layers, below what adds their outputs.
            Where one has hooks or a forward of its own, or was replaced, nothing is deferred: outputs are
            what they would be without us.
    """

    deferred: list[Tensor]
    branches: tuple[tuple[nn.Module, str, nn.Module], ...]

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(x)
        deferred = self.__dict__["deferred"]
        if any(map(_is_observed, self.__dict__["branches"])):
            deferred.clear()
            return _all_reduce(product, self.group)
        deferred[:] = [product]
        return torch.zeros_like(product)


def _is_observed(branch: tuple[nn.Module, str, nn.Module]) -> bool:
    parent, name, module = branch
    own = module.__dict__
    return bool(
        parent._modules.get(name) is not module
        or own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or "forward" in own
    )


class ColumnParallelHead(_ParallelLinear):
    """A linear layer sharded by its outputs; the outputs of all ranks are all-gathered.

    ``[..., in_features]`` -> ``[..., out_features of all ranks]``.
    """

    sizes: list[int]

    def forward(self, x: Tensor) -> Tensor:
        return collectives.all_gather(self.product(x), self.sizes, self.group)


def _quantized_product(self: Any, x: Tensor) -> Tensor:
    return self.product_of(x, self.bias if self.adds_bias else None)


class QuantizedRowParallelLinear(RowParallelLinear, QuantizedLinear):
    """`RowParallelLinear` with a quantized weight."""

    product = _quantized_product


class QuantizedDeferredReduceLinear(DeferredReduceLinear, QuantizedLinear):
    """`DeferredReduceLinear` with a quantized weight."""

    product = _quantized_product


class QuantizedColumnParallelHead(ColumnParallelHead, QuantizedLinear):
    """`ColumnParallelHead` with a quantized weight."""

    product = _quantized_product


_QUANTIZED = {
    RowParallelLinear: QuantizedRowParallelLinear,
    DeferredReduceLinear: QuantizedDeferredReduceLinear,
    ColumnParallelHead: QuantizedColumnParallelHead,
}


class VocabParallelEmbedding(nn.Module):
    """Holds rows ``first`` to ``first + num_embeddings`` of an embedding; the outputs are all-reduced.

    ids ``[...]`` -> ``[..., embedding_dim]``.
    """

    first: int
    num_embeddings: int
    group: str

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        is_remote = (local < 0) | (local >= self.num_embeddings)
        rows = super().forward(local.masked_fill(is_remote, 0))  # type: ignore[misc]
        mine = rows.masked_fill(is_remote.unsqueeze(-1), 0)
        # Ranks that have sampled different tokens would go on with a text that none of them has.
        return (
            collectives.all_reduce_of(mine, ids, self.group) if mine.is_cpu else _all_reduce(mine, self.group)
        )


@functools.cache
def _vocab_parallel_class(cls: type) -> type:
    """`VocabParallelEmbedding` before ``cls``, whose own forward then looks the local rows up."""
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__reduce_ex__": _reduce_embedding,
    }
    return type(cls.__name__, (VocabParallelEmbedding, cls), names)


def _reduce_embedding(self: Any, protocol: Any) -> Any:
    # Made at run time: a pickle cannot find it by its name. A recorded step may watch it by a subclass.
    bases = type(self).__mro__
    return _restored, (bases[bases.index(VocabParallelEmbedding) + 1], self.__dict__.copy())


def _restored(cls: type, state: dict[str, Any]) -> Any:
    made = _vocab_parallel_class(cls)
    module = made.__new__(made)
    module.__dict__.update(state)
    return module


def _all_reduce_output(group: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return collectives.all_reduce(output, group)


def _local_experts(first: int, module: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Arguments for the experts from ``first`` on: those of other ranks get no index, and weight 0."""
    given = dict(zip(ROUTED, args, strict=False)) | kwargs
    index = given["top_k_index"] - first
    is_remote = (index < 0) | (index >= module.num_experts)
    given["top_k_index"] = index.masked_fill(is_remote, module.num_experts)
    given["top_k_weights"] = given["top_k_weights"].masked_fill(is_remote, 0)
    return tuple(given[name] for name in ROUTED), {}


def defer_all_reduce(model: nn.Module, later: str, earlier: str, group: str, adds_bias: bool) -> None:
    """Let `RowParallelLinear` ``later`` reduce the output of the linear layer ``earlier`` with its own."""
    layer = model.get_submodule(earlier)
    _parallelize_linear(layer, DeferredReduceLinear, group, adds_bias)
    own = vars(layer)
    own["deferred"] = vars(model.get_submodule(later))["deferred"]
    own["branches"] = tuple(_branch(model, name) for name in _branches(later, earlier))


def _branches(one: str, other: str) -> list[str]:
    """Names of ``one`` and ``other``, and of the modules around each below what has both."""
    paths = [name.split(".") for name in (one, other)]
    common = next(at for at, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1)
    return [".".join(path[:end]) for path in paths for end in range(common + 1, len(path) + 1)]


def _branch(model: nn.Module, name: str) -> tuple[nn.Module, str, nn.Module]:
    parent, _, local = name.rpartition(".")
    return model.get_submodule(parent), local, model.get_submodule(name)


def allow_fused_all_reduce(module: nn.Module) -> None:
    """Let `RowParallelLinear` ``module``, unless it adds a bias, use the fused operator."""
    is_plain = not isinstance(module, QuantizedLinear) and not module.is_transposed
    vars(module)["is_fusible"] = is_plain and module._parameters["bias"] is None


def _parallelize_linear(module: nn.Module, cls: type, group: str, adds_bias: bool) -> None:
    own = vars(module)
    own["group"], own["deferred"], own["is_fusible"], own["adds_bias"] = group, [], False, adds_bias
    if isinstance(module, QuantizedLinear):
        module.__class__ = _QUANTIZED[cls]
        return
    own["is_transposed"] = is_transposed(module)
    module.__class__ = cls
    shape = module.weight.shape
    own["in_features"], own["out_features"] = shape if own["is_transposed"] else reversed(shape)


def parallelize_module(
    module: nn.Module, role: Role, sharding: DimSharding | None, rank: int, world_size: int, group: str
) -> None:
    """Give ``module``, whose parameters are sharded, its role."""
    if role == EXPERTS:
        (first, last), *_ = sharding.ranges(rank, world_size)
        module.num_experts = last - first
        choose = functools.partial(_local_experts, first)
        setattr(choose, RECORDABLE, True)
        module.register_forward_pre_hook(choose, with_kwargs=True)
    if role in (ALL_REDUCE_OUTPUT, EXPERTS):
        hook = functools.partial(_all_reduce_output, group)
        setattr(hook, RECORDABLE, True)
        module.register_forward_hook(hook)
        return
    own = vars(module)
    own["group"] = group
    if role == ROWWISE:
        _parallelize_linear(module, RowParallelLinear, group, adds_bias=rank == 0)
    if role == HEAD:
        _parallelize_linear(module, ColumnParallelHead, group, adds_bias=True)
        own["sizes"] = [sharding.length(each, world_size) for each in range(world_size)]
    if role == EMBEDDING:
        own["first"] = sharding.ranges(rank, world_size)[0][0]
        own["num_embeddings"] = module.weight.shape[0]
        own["padding_idx"] = None  # matters for gradients only
        module.__class__ = _vocab_parallel_class(type(module))
    if role == NORM:
        own["eps"] = norm_eps(module)
        # With fewer heads than ranks each head is added as often as it is held.
        own["width"] = sum(sharding.length(each, world_size) for each in range(world_size))
        module.__class__ = ParallelRMSNorm


#: Attribute of a module: names of its parameters that are shards.
SHARDS = "shards"
#: Attributes, beside parameters, that sharding sets on a module.
OWN_ATTRIBUTES = (
    SHARDS,
    *("group", "deferred", "is_fusible", "is_transposed", "sizes", "first", "num_embeddings", "padding_idx"),
    *(
        "eps",
        "width",
        "rounding",
        "in_features",
        "out_features",
        "nx",
        "nf",
        "num_experts",
        "specs",
        "branches",
        "adds_bias",
    ),
)
