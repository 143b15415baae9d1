"""Divide a loaded model over the ranks, in place."""

from __future__ import annotations

import functools

import torch
from torch import nn

from .. import __version__, native
from ..errors import ParallelError, PlanError
from ..huggingface.runtime import runtime
from ..ops import collectives
from . import agree, groups, layers, layout, plan
from .groups import Group
from .parts import is_transposed

#: Attribute of a divided model: its plan.
PLAN = "_liteboost_plan"


def divide(model: nn.Module, how: plan.Plan, group: Group) -> None:
    """Keep what this rank holds of ``model`` and let its layers exchange; whole parameters are freed in turn.

    The model is for inference afterwards: its parameters want no gradients, for collectives have no backward.

    Args:
        how: Made for this very model and ``group.size`` ranks.
    """
    native.load()
    collectives.register()
    was_bound = model in runtime.models()
    runtime.unbind(model)  # rules are bound to what is here now
    forms = _norm_forms(model, how)
    with torch.no_grad():
        _cut(model, how, group)
    modules = dict(model.named_modules())
    _resize(modules, how)
    for name, role in how.roles.items():
        cut = how.cuts.get(f"{name}.weight")
        layers.become(modules[name], role, cut, group.rank, group.size, group.name)
        if role == plan.NORM:
            modules[name].form = forms[name]
    for name, attributes in how.attributes.items():
        _set(modules[name], attributes)
    model.requires_grad_(False)
    vars(model)[PLAN] = how
    vars(model)["save_pretrained"] = functools.partial(_refuse_to_save, how.model, group.size)
    agree.watch(model, group)
    if was_bound:
        runtime.prepare(model)


def _refuse_to_save(model: str, size: int, *args: object, **kwargs: object) -> None:
    raise ParallelError(
        f"this {model} is divided over {size} processes; each would save its part as if it were the whole. "
        "Save the model before it is divided."
    )


def _set(module: nn.Module, attributes: dict[str, int]) -> None:
    prefix = "config."
    local = {
        name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)
    }
    if local:
        module.config = layers.LocalConfig(module.config, local)
    vars(module).update((name, value) for name, value in attributes.items() if not name.startswith(prefix))


def _norm_forms(model: nn.Module, how: plan.Plan) -> dict[str, str]:
    names = [name for name, role in how.roles.items() if role == plan.NORM]
    forms = {name: layers.form_of(model.get_submodule(name)) for name in names}
    unknown = [name for name, form in forms.items() if not form]
    if unknown:
        raise PlanError(
            f"{how.model} cannot be divided: its norm {unknown[0]} spans all heads and rounds in a way that "
            "is not known. Without shard every process runs the whole model."
        )
    return forms


def _cut(model: nn.Module, how: plan.Plan, group: Group) -> None:
    once = set(how.once) if group.rank else set()
    made: dict[int, nn.Parameter | None] = {}
    kept: list[nn.Parameter] = []  # so that no address is used twice while `made` is read
    for prefix, module in model.named_modules():
        for local, parameter in list(module._parameters.items()):
            name = f"{prefix}.{local}" if prefix else local
            if parameter is None or not (name in how.cuts or name in once):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _part(name, parameter, how, group, name in once)
                if _is_shared(model, parameter):
                    kept.append(parameter)
            module._parameters[local] = made[id(parameter)]
            if not any(parameter is each for each in kept):
                del made[id(parameter)]


def _is_shared(model: nn.Module, parameter: nn.Parameter) -> bool:
    return sum(each is parameter for _, each in model.named_parameters(remove_duplicate=False)) > 1


def _part(
    name: str, parameter: nn.Parameter, how: plan.Plan, group: Group, is_elsewhere: bool
) -> nn.Parameter | None:
    if is_elsewhere:
        # The bias of a linear layer is left out; experts want one, and add nothing.
        return None if parameter.ndim == 1 else nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
    return nn.Parameter(held(parameter.data, how.cuts[name], group), requires_grad=False)


def held(tensor: torch.Tensor, cut: plan.Cut, group: Group) -> torch.Tensor:
    """The part of ``tensor`` that this rank holds, in memory of its own."""
    ranges = cut.ranges(group.rank, group.size)
    parts = [tensor.narrow(cut.dim, first, last - first) for first, last in ranges]
    return (
        torch.cat(parts, dim=cut.dim)
        if len(parts) > 1
        else parts[0].clone(memory_format=torch.contiguous_format)
    )


def _resize(modules: dict[str, nn.Module], how: plan.Plan) -> None:
    """Let linear layers say what they hold."""
    for name in {name.rpartition(".")[0] for name in how.cuts}:
        module = modules.get(name)
        if type(module) is nn.Linear:
            module.out_features, module.in_features = module.weight.shape
        elif is_transposed(module):
            module.nx, module.nf = module.weight.shape


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
    group = groups.join()
    how = layout.of(model).plan(group.size)
    groups.agree(group, model=how.model, plan=how.digest(), version=__version__)
    divide(model, how, group)
    return how
