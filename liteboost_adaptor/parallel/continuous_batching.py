"""Continuous batching of a sharded model: rank 0 schedules, and every rank runs the same batches.

transformers has the protocol for models that it has sharded itself (its `DistributedHelper`): the ranks of a
group agree before every batch on new requests, on those that were cancelled, and on the end. A model that
this package has sharded takes part once the manager knows the group, and how many KV heads a rank has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ParallelError
from ..quantization.identifiers import PLAN
from .data import unsharded
from .runtime import groups
from .runtime.call_group import CallGroup, RanksDiverged
from .runtime.mesh import Mesh
from .synchronize import plain, synchronized_call
from .tensor.plan import ShardingPlan

#: Where transformers looks for what says that KV heads are sharded, among the rules of its own plan.
_KV_RULES = ("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj")


def attach(model: nn.Module, mesh: Mesh) -> None:
    """Let the ranks of ``mesh`` run the batches of ``model`` together."""
    if hasattr(model, "init_continuous_batching"):
        vars(model).update(
            generate_batch=functools.partial(_generate_batch, model, mesh),
            init_continuous_batching=functools.partial(_init, model, mesh),
        )


def _generate_batch(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """``generate_batch`` of a sharded model: of the same prompts, under the same settings on every rank."""
    whole = functools.partial(type(model).generate_batch, model)
    if groups.world().heartbeat.depth:
        return whole(*args, **kwargs)
    facts, draws = _facts(model, "generate_batch", args, kwargs)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(synchronized_call(model, mesh.world, facts, draws))
        except RanksDiverged:
            return model.generate_batch(*args, **kwargs)
        return whole(*args, **kwargs)


def _init(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """``init_continuous_batching`` of a sharded model: a manager whose requests are rank 0's.

    By itself a manager has requests that nobody knows in advance, so where ranks may diverge, they do: each
    may have been meant to have its own.
    """
    if not groups.world().heartbeat.depth:
        if unsharded.can_unshard(model):
            reason = (
                groups.divergence.reason
                or "init_continuous_batching may be given other requests on each rank"
            )
            groups.divergence.reason = reason
            unsharded.unshard(model, reason)
            return model.init_continuous_batching(*args, **kwargs)
        facts, _ = _facts(model, "init_continuous_batching", args, kwargs)
        with synchronized_call(model, mesh.world, facts):
            return _init(model, mesh, *args, **kwargs)
    if mesh.sequence.size > 1:
        raise ParallelError(
            "continuous batching packs the tokens of many prompts, which LITEBOOST_SP and LITEBOOST_CP do "
            "not share. Start it with LITEBOOST_TP alone."
        )
    begin = functools.partial(type(model).init_continuous_batching, model, *args, **kwargs)
    if mesh.tensor.size == 1:
        return begin()
    # Before there is a manager, which changes the model's attention.
    has_own_heads = _shards_kv_heads(
        model, vars(model)[PLAN], model.config.get_text_config(), mesh.tensor.size
    )
    manager = begin()
    if not manager.is_running():
        _share(manager, mesh, has_own_heads)
    return manager


def _facts(
    model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """What ranks compare before they call ``method`` with these arguments, and whether numbers are drawn."""
    given = inspect.signature(getattr(type(model), method)).bind(model, *args, **kwargs).arguments
    settings = given.get("generation_config") or model.generation_config
    given |= given.pop("kwargs", {})
    # Prompts may be arrays, which are not printed whole.
    prompts = [list(map(int, prompt)) for prompt in given.pop("inputs", ())]
    others = {name: value for name, value in given.items() if name not in ("self", "generation_config")}
    others["continuous_batching_config"] = repr(others.get("continuous_batching_config"))
    facts = {
        "call": f"{method} of {type(model).__name__}",
        "settings": plain({**settings.to_dict(), **others}),
        "inputs": hashlib.blake2b(repr(prompts).encode(), digest_size=8).hexdigest(),
    }
    return facts, bool(settings.do_sample)


def _share(manager: Any, mesh: Mesh, has_own_heads: bool) -> None:
    """Let ``manager`` run its batches with those of the other ranks that hold shards of its model.

    Args:
        has_own_heads: Whether a rank keeps a part of the KV heads.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device = "npu" if manager.model.device.type == "npu" else "cpu"
    call_group = groups.call_group_of(mesh.tensor)
    manager.distributed_helper = _helper_class()(
        device_mesh=DeviceMesh.from_group(groups.process_group(mesh.tensor), device, mesh_dim_names=("tp",)),
        cpu_group_timeout=manager.continuous_batching_config.cpu_group_timeout,
        tp_plan=dict.fromkeys(_KV_RULES, "colwise") if has_own_heads else {},
    )
    manager.distributed_helper.call_group = call_group
    manager.is_tp_driver = manager.distributed_helper.is_tp_driver
    vars(manager)["_run_generation_loop"] = functools.partial(
        _run_together, call_group, manager, manager._run_generation_loop
    )


@functools.cache
def _helper_class() -> type:
    """transformers' protocol, which says why a rank does not come, and not that gloo's connection closed."""
    try:
        from transformers.generation.continuous_batching.distributed import DistributedHelper
    except ImportError:
        raise ParallelError(
            "continuous batching of this transformers knows no several processes. Upgrade it (5.23 does), or "
            "start the script with LITEBOOST_TP=1."
        ) from None

    class Helper(DistributedHelper):  # type: ignore[misc]
        call_group: CallGroup

        def tp_all_reduce_state(self, *args: Any, **kwargs: Any) -> tuple[int, int, int]:
            try:
                found: tuple[int, int, int] = super().tp_all_reduce_state(*args, **kwargs)
            except RuntimeError as fault:
                raise self.call_group.ended(fault) from fault
            return found

    return Helper


def _run_together(
    call_group: CallGroup, manager: Any, loop: Callable[..., None], /, *args: Any, **kwargs: Any
) -> None:
    """``loop``, the thread of ``manager``, as a call that the ranks make together.

    What transformers starts it with, as its inference mode since 5.24, is its own.
    """
    with contextlib.suppress(_LoopEnded), call_group.inside():
        loop(*args, **kwargs)
        fault = manager.background_thread_status.fatal_error
        if fault is not None:
            raise _LoopEnded(str(fault)) from fault  # so that the others know at once


class _LoopEnded(Exception):
    """The loop has ended by a fault, which it has given to all requests."""


def _caches_heads(module: nn.Module, config: Any) -> bool:
    """Whether ``module`` is an attention whose keys and values are cached, and no layer around one."""
    number = vars(module).get("layer_idx")
    if number is None or any("layer_idx" in vars(inner) for inner in module.modules() if inner is not module):
        return False
    kind = (getattr(config, "layer_types", None) or {number: "attention"})[number]
    return bool(kind.endswith("attention") and not kind.startswith("linear"))


def _shards_kv_heads(model: nn.Module, plan: ShardingPlan, config: Any, size: int) -> bool:
    """Whether a rank keeps a part of the KV heads of every layer.

    Raises:
        ParallelError: It keeps what transformers' cache cannot be made for.
    """
    from transformers.generation.continuous_batching.cache import find_num_key_value_heads

    heads = find_num_key_value_heads(config)
    found = {
        any(key.startswith(f"{name}.") for key in plan.shardings)
        for name, module in model.named_modules()
        if _caches_heads(module, config)
    }
    if found == {False} or (found == {True} and heads == 1):
        return False
    if found == {True} and heads % size == 0:
        return True
    what = f"{heads} KV heads" if found == {True} else "layers of which only some are sharded"
    raise ParallelError(
        f"continuous batching has one cache for all layers, and {what} over {size} processes would need "
        f"several. Start a number of processes that divides the {heads} KV heads, or set LITEBOOST_TP=1."
    )
