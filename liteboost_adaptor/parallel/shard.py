"""Shard a loaded model over the ranks, in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import nn

from .. import __version__, config, native
from ..errors import ParallelError, PlanError
from ..huggingface.runtime import runtime
from ..quantization.identifiers import PLAN
from . import continuous_batching, synchronize
from .checkpoint import saving
from .data import model_edits, unsharded
from .data.unsharded import RESIZE, SAVE
from .runtime import groups
from .runtime import mesh as meshes
from .runtime.mesh import Mesh
from .sequence import hooks
from .tensor import layout, quantized
from .tensor.apply import norm_roundings, parallelize, shard_parameters
from .tensor.plan import EMBEDDING, HEAD, ShardingPlan, unsharded_plan


def _shard_in_place(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Keep this rank's shards of ``model``; unsharded parameters are freed one after the other.

    Args:
        plan: Made for this very model and ``mesh.tensor.size`` ranks.
    """
    was_bound = model in runtime.models()
    runtime.unbind(model)  # rules are bound to the unsharded modules
    roundings = norm_roundings(model, plan)
    shard_parameters(model, plan, mesh.tensor)
    shard_model(model, plan, mesh, roundings)
    if was_bound:
        runtime.prepare(model)


def shard_model(model: nn.Module, plan: ShardingPlan, mesh: Mesh, roundings: dict[str, str]) -> None:
    """Let ``model``, whose parameters are sharded, run on them, and replace the methods that cannot.

    Its parameters require no gradients: the collectives have no backward.
    """
    parallelize(model, plan, mesh.tensor, roundings)
    model.eval()
    model.requires_grad_(False)
    own = vars(model)
    own[SAVE] = functools.partial(
        synchronize.save, model, mesh, functools.partial(saving.save, model, plan, mesh)
    )
    own["train"] = functools.partial(_train, model)
    own.update((name, functools.partial(_adapt, model, name)) for name in _ADAPTER_METHODS)
    own["dequantize"] = functools.partial(_refuse_dequantize, plan.model)
    if rows := _vocabulary_rows(plan):
        for module in model.modules():  # that without the head has the method, too
            if hasattr(module, RESIZE):
                vars(module)[RESIZE] = functools.partial(_resize_token_embeddings, model, module, rows)
    for part in unsharded.models_in(model):
        if part is not model and plan.shardings:
            vars(part)[SAVE] = functools.partial(_save_part, model, part)
    share_calls(model, plan, mesh)
    model_edits.remember(
        model,
        model_edits.Compared(
            sharded=plan.shardings,
            once=plan.rank0_only,
            may_part=unsharded.can_unshard(model),
            has_replicas=mesh.data.size > 1,
        ),
    )


def share_calls(model: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Let ranks that hold ``model``, or a shard of it each, work on the same prompts."""
    vars(model)[PLAN] = plan
    if mesh.tensor.size == 1:
        vars(model)[SAVE] = functools.partial(
            synchronize.save, model, mesh, functools.partial(saving.save_replicated, model, mesh)
        )
    synchronize.synchronize_calls(model, mesh)
    continuous_batching.attach(model, mesh)
    if mesh.sequence.size > 1:
        hooks.attach(model, mesh)


_ADAPTER_METHODS = ("add_adapter", "load_adapter")


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    if mode and unsharded.can_unshard(model):
        return unsharded.unshard_for(model, "train()").train()
    if mode:
        raise ParallelError(
            f"this {type(model).__name__} is sharded over processes, and cannot be trained: collectives have "
            "no backward. Start the script with LITEBOOST_TP=1."
        )
    return type(model).train(model, mode)


def _refuse_dequantize(model: str, *args: object, **kwargs: object) -> None:
    raise ParallelError(
        f"this {model} is sharded over processes, and its layers communicate what they compute from "
        "quantized weights. Start the script with LITEBOOST_TP=1 to dequantize it."
    )


def _adapt(model: nn.Module, name: str, *args: object, **kwargs: object) -> object:
    unshard_for_adapters(model, name)
    return getattr(model, name)(*args, **kwargs)


def unshard_for_adapters(model: nn.Module, call: str) -> None:
    """Unshard ``model``, if it is sharded, before ``call`` puts adapters beside its layers.

    Raises:
        ParallelError: It cannot be unsharded.
    """
    plan = vars(model).get(PLAN)
    if plan is None or not plan.shardings:
        return
    if unsharded.can_unshard(model):
        unsharded.unshard_for(model, call)
        return
    raise ParallelError(
        f"this {type(model).__name__} is sharded over processes, and its layers take no adapters. Merge the "
        "adapter and save the model first, or start the script with LITEBOOST_TP=1."
    )


def _save_part(model: nn.Module, part: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of a model in ``model``."""
    if unsharded.can_unshard(model):
        unsharded.unshard_for(model, f"save_pretrained() of its {type(part).__name__}")
        return part.save_pretrained(*args, **kwargs)
    raise ParallelError(
        f"this {type(model).__name__} is sharded over processes, and its {type(part).__name__} would be "
        "saved as the shards of one. Save the whole model, or start the script with LITEBOOST_TP=1."
    )


def _vocabulary_rows(plan: ShardingPlan) -> int:
    """Rows of the unsharded embedding or head where ranks hold shards of them; else 0."""
    names = [name for name, role in plan.roles.items() if role in (EMBEDDING, HEAD)]
    return plan.shardings[f"{names[0]}.weight"].size if names else 0


def _resize_token_embeddings(
    model: nn.Module,
    module: Any,
    rows: int,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``resize_token_embeddings`` of a ``module`` in ``model``, of whose ``rows`` each rank holds a shard."""
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted == rows:
        return module.get_input_embeddings()
    if unsharded.can_unshard(model):
        unsharded.unshard_for(model, "resize_token_embeddings()")
        return module.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    raise ParallelError(
        f"this {type(model).__name__} is sharded over processes, and each holds a part of its {rows} rows of "
        f"the vocabulary: they cannot become {wanted}. Resize and save the model in a script started with "
        "LITEBOOST_TP=1, and load that one here."
    )


def _plan(model: nn.Module, size: int, expert_parallel: bool) -> ShardingPlan:
    weights = quantized.weights_of(model)
    with quantized.as_plain(model):
        plan = layout.infer_layout(model, quantized.granularities_of(weights)).plan(size, expert_parallel)
    reason = quantized.why_not(weights, plan)
    if reason:
        raise PlanError(
            f"{plan.model} cannot be sharded over {size} ranks: {reason}. Without shard every process runs "
            "the whole model."
        )
    return plan


def shard(model: nn.Module) -> ShardingPlan:
    """Shard ``model`` over all processes; see `liteboost_adaptor.shard`."""
    if getattr(model, PLAN, None) is not None:
        raise ParallelError(f"this {type(model).__name__} is sharded already")
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"shard takes a model of transformers, got {type(model).__name__}. Pass the loaded model."
        )
    if model.training:
        raise ParallelError(
            f"this {type(model).__name__} is in training mode, and a sharded model cannot be trained. Call "
            "model.eval() first."
        )
    native.require("shard")
    wanted = runtime.active or config.settings()
    mesh = meshes.join(wanted if meshes.is_requested(wanted) else dataclasses.replace(wanted, tp=0))
    size = mesh.tensor.size
    plan = _plan(model, size, wanted.ep) if size > 1 else unsharded_plan(type(model).__name__)
    settings = config.spelled(wanted)
    groups.agree(mesh.world, model=plan.model, plan=plan.digest(), version=__version__, settings=settings)
    if size > 1:
        _shard_in_place(model, plan, mesh)
    else:
        share_calls(model, plan, mesh)
    return plan
