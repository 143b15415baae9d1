"""Apply a plan to a model: keep a rank's shards of its parameters, and let its layers communicate."""

from __future__ import annotations

import torch
from torch import nn

from ... import native
from ...errors import ParallelError, PlanError
from ...ops import collectives
from ..runtime.groups import Group
from . import layers, quantized
from .layout_builder import is_linear, is_transposed
from .local_config import LocalConfig
from .norm import norm_rounding
from .plan import EXPERTS, NORM, ROWWISE, ShardingPlan
from .shard_spec import ShardSpec


@torch.no_grad()
def shard_parameters(model: nn.Module, plan: ShardingPlan, group: Group) -> None:
    """Keep this rank's shards of the parameters and quantized weights, which may be on the meta device."""
    quantized.shard_weights(model, plan, group.rank)
    sharded: dict[int, nn.Parameter] = {}
    tied: list[nn.Parameter] = []  # kept alive, so that no address is used twice while `sharded` is read
    for prefix, module in model.named_modules():
        for local, parameter in list(module._parameters.items()):
            name = f"{prefix}.{local}" if prefix else local
            if parameter is None or name not in plan.shardings:
                continue
            if id(parameter) not in sharded:
                shard = plan.spec(name).local(parameter.data, group.rank)
                sharded[id(parameter)] = nn.Parameter(shard, requires_grad=False)
                if _is_tied(model, parameter):
                    tied.append(parameter)
            module._parameters[local] = sharded[id(parameter)]
            if not any(parameter is each for each in tied):
                del sharded[id(parameter)]


def _is_tied(model: nn.Module, parameter: nn.Parameter) -> bool:
    return sum(each is parameter for _, each in model.named_parameters(remove_duplicate=False)) > 1


def parallelize(model: nn.Module, plan: ShardingPlan, group: Group, roundings: dict[str, str]) -> None:
    """Let the modules of ``model``, whose parameters are sharded, communicate.

    Args:
        roundings: As `norm_roundings` returned them for the unsharded model.
    """
    native.load()
    collectives.register()
    modules = dict(model.named_modules())
    _leave_to_rank_0(modules, plan, group)
    _resize(modules, plan)
    _mark(model, plan)
    for name, role in plan.roles.items():
        of_weight = plan.shardings.get(f"{name}.{'down_proj' if role == EXPERTS else 'weight'}")
        layers.parallelize_module(modules[name], role, of_weight, group.rank, group.size, group.name)
        if role == NORM:
            modules[name].rounding = roundings[name]
    for later, earlier in plan.deferred.items():
        layers.defer_all_reduce(model, later, earlier, group.name, adds_bias=group.rank == 0)
    for name, role in plan.roles.items():
        if role == ROWWISE and name not in plan.deferred and f"{name}.bias" not in plan.rank0_only:
            layers.allow_fused_all_reduce(modules[name])
    for name, attributes in plan.attributes.items():
        _set_attributes(modules[name], attributes)


def sharded_specs(model: nn.Module, plan: ShardingPlan, rank: int) -> dict[str, ShardSpec]:
    """The specs of parameters that are shards still: a script may have replaced a module by a whole one.

    Raises:
        ParallelError: A parameter of a module that computes with shards is no shard of ``rank`` any more.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name in plan.shardings:
        owner, _, local = name.rpartition(".")
        module = modules.get(owner)
        if module is None or local not in vars(module).get(layers.SHARDS, ()):
            continue
        found[name] = spec = plan.spec(name)
        parameter = module._parameters.get(local)
        shape = None if parameter is None else tuple(parameter.shape)
        if shape is not None and shape != spec.local_shape(shape, rank):
            raise ParallelError(
                f"{name} of this {plan.model} was replaced by a tensor of {list(shape)}, and this process "
                f"has to hold a shard of {list(spec.local_shape(shape, rank))}. Replace the module, not its "
                "parameter, or start the script with LITEBOOST_TP=1."
            )
    return found


def _mark(model: nn.Module, plan: ShardingPlan) -> None:
    """Let modules know which of their parameters are shards."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in plan.shardings:
        owner, _, local = name.rpartition(".")
        if owner in modules:
            own = vars(modules[owner])
            own[layers.SHARDS] = own.get(layers.SHARDS, frozenset()) | {local}


def norm_roundings(model: nn.Module, plan: ShardingPlan) -> dict[str, str]:
    """How the norms over all heads of ``model``, which is still unsharded, round.

    Raises:
        PlanError: The rounding of one is unknown.
    """
    names = [name for name, role in plan.roles.items() if role == NORM]
    roundings = {name: norm_rounding(model.get_submodule(name)) for name in names}
    unknown = [name for name, rounding in roundings.items() if not rounding]
    if unknown:
        raise PlanError(
            f"{plan.model} cannot be sharded: its norm {unknown[0]} spans all heads and rounds in a way that "
            "is not known. Without shard every process runs the whole model."
        )
    return roundings


def _set_attributes(module: nn.Module, attributes: dict[str, int]) -> None:
    prefix = "config."
    local = {
        name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)
    }
    if local:
        module.config = LocalConfig(module.config, local)
    vars(module).update((name, value) for name, value in attributes.items() if not name.startswith(prefix))


def _leave_to_rank_0(modules: dict[str, nn.Module], plan: ShardingPlan, group: Group) -> None:
    """Let rank 0 alone add biases that are added once."""
    for name in plan.rank0_only if group.rank else ():
        owner, _, local = name.rpartition(".")
        parameters = modules[owner]._parameters
        parameter = parameters[local]
        if parameter is None:
            continue
        if parameter.ndim == 1:
            parameters[local] = None
        else:  # experts need a bias, and get one of zeros
            parameters[local] = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)


def _resize(modules: dict[str, nn.Module], plan: ShardingPlan) -> None:
    """Set the sizes of linear layers to those of their shards."""
    for name in {name.rpartition(".")[0] for name in plan.shardings}:
        module = modules.get(name)
        if is_transposed(module):
            module.nx, module.nf = module.weight.shape
        elif is_linear(module):
            module.out_features, module.in_features = module.weight.shape
