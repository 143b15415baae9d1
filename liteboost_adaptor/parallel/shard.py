"""Divide a loaded model over the ranks, in place."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from .. import __version__, config, native
from ..errors import ParallelError, PlanError
from ..huggingface.runtime import runtime
from ..ops import collectives
from ..quantization.names import PLAN
from . import synchronize
from .checkpoint import saving
from .data import unsharded
from .runtime import groups
from .runtime import mesh as meshes
from .runtime.groups import Group
from .runtime.mesh import Mesh
from .sequence import hooks
from .tensor import layers, layout, plan, quantized
from .tensor.layout_builder import is_linear, is_transposed


def divide(model: nn.Module, how: plan.Plan, mesh: Mesh) -> None:
    """Keep what this rank holds of ``model`` and let its layers exchange; whole parameters are freed in turn.

    Args:
        how: Made for this very model and ``mesh.tensor.size`` ranks.
    """
    was_bound = model in runtime.models()
    runtime.unbind(model)  # rules are bound to what is here now
    forms = norm_forms(model, how)
    cut(model, how, mesh.tensor)
    become_part(model, how, mesh, forms)
    if was_bound:
        runtime.prepare(model)


def become_part(model: nn.Module, how: plan.Plan, mesh: Mesh, forms: dict[str, str]) -> None:
    """Let the layers of ``model``, whose parameters have been cut, exchange.

    The model is for inference afterwards: its parameters want no gradients, for collectives have no backward.
    """
    native.load()
    collectives.register()
    group = mesh.tensor
    modules = dict(model.named_modules())
    _leave_to_rank_0(modules, how, group)
    _resize(modules, how)
    for name, role in how.roles.items():
        of_weight = how.cuts.get(f"{name}.{'down_proj' if role == plan.EXPERTS else 'weight'}")
        layers.become(modules[name], role, of_weight, group.rank, group.size, group.name)
        if role == plan.NORM:
            modules[name].form = forms[name]
    for later, earlier in how.pairs.items():
        layers.become_pair(modules[later], modules[earlier], group.name)
    for name, role in how.roles.items():
        if role == plan.SUM and name not in how.pairs and f"{name}.bias" not in how.once:
            layers.let_fuse(modules[name])
    for name, attributes in how.attributes.items():
        _set(modules[name], attributes)
    model.eval()
    model.requires_grad_(False)
    own = vars(model)
    own["save_pretrained"] = functools.partial(
        synchronize.save, model, mesh, functools.partial(saving.save, model, how, mesh)
    )
    own["train"] = functools.partial(_train, model)
    own.update((name, functools.partial(_adapt, model, name)) for name in _ADAPTER_METHODS)
    own["dequantize"] = functools.partial(_refuse_dequantize, how.model)
    attach(model, how, mesh)


def attach(model: nn.Module, how: plan.Plan, mesh: Mesh) -> None:
    """Let ranks that hold ``model``, or a part of it each, work on the same prompts."""
    vars(model)[PLAN] = how
    if mesh.tensor.size == 1:
        vars(model)["save_pretrained"] = functools.partial(
            synchronize.save, model, mesh, functools.partial(saving.save_whole, model, mesh)
        )
    synchronize.watch(model, mesh)
    if mesh.sequence.size > 1:
        hooks.attach(model, mesh)


_ADAPTER_METHODS = ("add_adapter", "load_adapter")


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode and unsharded.is_possible(model):
        return _whole(model, "train()").train()
    if mode:
        raise ParallelError(
            f"this {type(model).__name__} is divided over processes, and cannot be trained: collectives have "
            "no backward. Start the script with LITEBOOST_TP=1."
        )
    return type(model).train(model, mode)


def _refuse_dequantize(model: str, *args: object, **kwargs: object) -> None:
    raise ParallelError(
        f"this {model} is divided over processes, whose layers exchange what they compute from integers. "
        "Start the script with LITEBOOST_TP=1 to multiply its weights out."
    )


def _whole(model: nn.Module, call: str) -> nn.Module:
    """``model``, which was divided by default, undivided: divided models cannot do ``call``."""
    groups.ways.reason = groups.ways.reason or f"{call} needs the whole model in every process"
    unsharded.restore(model, groups.ways.reason)
    return model


def _adapt(model: nn.Module, name: str, *args: object, **kwargs: object) -> object:
    if unsharded.is_possible(model):
        return getattr(_whole(model, name), name)(*args, **kwargs)
    raise ParallelError(
        f"this {type(model).__name__} is divided over processes, and its layers take no adapters. Merge the "
        "adapter and save the model first, or start the script with LITEBOOST_TP=1."
    )


def _set(module: nn.Module, attributes: dict[str, int]) -> None:
    prefix = "config."
    local = {
        name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)
    }
    if local:
        module.config = layers.LocalConfig(module.config, local)
    vars(module).update((name, value) for name, value in attributes.items() if not name.startswith(prefix))


def norm_forms(model: nn.Module, how: plan.Plan) -> dict[str, str]:
    """How the norms over all heads of ``model``, which is still whole, round.

    Raises:
        PlanError: One does it in no way that is known.
    """
    names = [name for name, role in how.roles.items() if role == plan.NORM]
    forms = {name: layers.form_of(model.get_submodule(name)) for name in names}
    unknown = [name for name, form in forms.items() if not form]
    if unknown:
        raise PlanError(
            f"{how.model} cannot be divided: its norm {unknown[0]} spans all heads and rounds in a way that "
            "is not known. Without shard every process runs the whole model."
        )
    return forms


@torch.no_grad()
def cut(model: nn.Module, how: plan.Plan, group: Group) -> None:
    """Keep what this rank holds of each parameter, and of integers, which may be on the meta device."""
    quantized.cut(model, how, group.rank)
    made: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # so that no address is used twice while `made` is read
    for prefix, module in model.named_modules():
        for local, parameter in list(module._parameters.items()):
            name = f"{prefix}.{local}" if prefix else local
            if parameter is None or name not in how.cuts:
                continue
            if id(parameter) not in made:
                held = how.cuts[name].held(parameter.data, group.rank, group.size)
                made[id(parameter)] = nn.Parameter(held, requires_grad=False)
                if _is_shared(model, parameter):
                    kept.append(parameter)
            module._parameters[local] = made[id(parameter)]
            if not any(parameter is each for each in kept):
                del made[id(parameter)]


def _is_shared(model: nn.Module, parameter: nn.Parameter) -> bool:
    return sum(each is parameter for _, each in model.named_parameters(remove_duplicate=False)) > 1


def _leave_to_rank_0(modules: dict[str, nn.Module], how: plan.Plan, group: Group) -> None:
    """Let rank 0 alone add what is added once."""
    for name in how.once if group.rank else ():
        owner, _, local = name.rpartition(".")
        parameters = modules[owner]._parameters
        parameter = parameters[local]
        if parameter is not None:
            # The bias of a linear layer is left out; experts want one, and add nothing.
            zeros = (
                None
                if parameter.ndim == 1
                else nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
            )
            parameters[local] = zeros


def _resize(modules: dict[str, nn.Module], how: plan.Plan) -> None:
    """Let linear layers say what they hold."""
    for name in {name.rpartition(".")[0] for name in how.cuts}:
        module = modules.get(name)
        if is_transposed(module):
            module.nx, module.nf = module.weight.shape
        elif is_linear(module):
            module.out_features, module.in_features = module.weight.shape


def _plan(model: nn.Module, size: int, whole_experts: bool) -> plan.Plan:
    weights = quantized.weights_of(model)
    with quantized.as_plain(model):
        how = layout.of(model, quantized.units_of(weights)).plan(size, whole_experts)
    reason = quantized.why_not(weights, how)
    if reason:
        raise PlanError(
            f"{how.model} cannot be divided over {size} ranks: {reason}. Without shard every process runs "
            "the whole model."
        )
    return how


def shard(model: nn.Module) -> plan.Plan:
    """Divide ``model`` over all processes; see `liteboost_adaptor.shard`."""
    if getattr(model, PLAN, None) is not None:
        raise ParallelError(f"this {type(model).__name__} is divided already")
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"shard takes a model of transformers, got {type(model).__name__}. Pass the loaded model."
        )
    if model.training:
        raise ParallelError(
            f"this {type(model).__name__} is in training mode, and a model that is divided cannot be "
            "trained. Call model.eval() first."
        )
    wanted = runtime.active or config.settings()
    mesh = meshes.join(wanted if meshes.is_asked(wanted) else dataclasses.replace(wanted, tp=0))
    size = mesh.tensor.size
    how = _plan(model, size, wanted.ep) if size > 1 else plan.undivided(type(model).__name__)
    settings = config.spelled(wanted)
    groups.agree(mesh.world, model=how.model, plan=how.digest(), version=__version__, settings=settings)
    if size > 1:
        divide(model, how, mesh)
    else:
        attach(model, how, mesh)
    return how
