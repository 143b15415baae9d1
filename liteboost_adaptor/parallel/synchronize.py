"""Calls that ranks make together: they compare inputs and settings, share the random state, or diverge.

A script that gives every process something else, or calls a model in one of them only, is correct without
this package. So where ranks of a model that was sharded by default differ, each goes on with the whole model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParallelError
from ..huggingface.runtime import AROUND
from ..kv_cache.names import KV_CACHES
from ..program import arguments, caches
from ..program.state import RECORDABLE
from ..quantization.identifiers import PLAN
from .data import model_edits, replicas, unsharded
from .runtime import groups
from .runtime.call_group import CallGroup, RanksDiverged
from .runtime.groups import Group, all_gather_object, call_group_of
from .runtime.mesh import Mesh

_TEXT = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_SAME = (
    "All work on the same text: call it on every rank with the same. With LITEBOOST_DP=N and all rows on "
    "every rank, N replicas share the rows; with LITEBOOST_TP=1 each process has a model of its own."
)


def synchronize_calls(model: nn.Module, mesh: Mesh) -> None:
    """Synchronize the ranks before they call ``model``, or a model in it; they get rank 0's random state.

    Inputs of a forward are compared within a replica: replicas have rows of their own.
    """
    own = vars(model)
    if mesh.replica.size > 1:
        hook = functools.partial(check_inputs, mesh.replica)
        setattr(hook, RECORDABLE, True)  # it does nothing in a decode step
        model.register_forward_pre_hook(hook, with_kwargs=True)
        for part in unsharded.models_in(model):
            vars(part)[AROUND] = functools.partial(_forward, model, part, mesh)
    if hasattr(model, "generate"):
        own["generate"] = functools.partial(_generate, model, mesh)


@contextlib.contextmanager
def synchronized_call(
    model: nn.Module, group: Group, facts: dict[str, Any], draws: bool = False
) -> Iterator[None]:
    """A call of ``model`` that all ranks of ``group`` make, if they agree on it: from rank 0's random state.

    Args:
        draws: Whether numbers are drawn in the call, or may be by what it gives. Then ranks with different
            random states are to have different results, where each can have a model of its own; where not,
            all go on from the state of rank 0. A call that draws nothing leaves each the state it had.

    Raises:
        RanksDiverged: They do not, and ``model`` is unsharded on this rank now. Nothing is done yet.
        ParallelError: They do not, and it cannot be unsharded; or one leaves the call.
    """
    call_group = call_group_of(group)
    if groups.divergence.reason:
        unsharded.unshard(model, groups.divergence.reason)
        raise RanksDiverged(groups.divergence.reason)
    may_part = unsharded.can_unshard(model)
    own = _random_state()
    facts = {
        **facts,
        "random": own if call_group.heartbeat.rank == call_group.members[0] else None,
        "drawn from": digest(own) if may_part and draws else "",
        "edits": model_edits.edits(model),
    }
    try:
        found = call_group.synchronize(facts, _why_diverged)
    except RanksDiverged as apart:
        if not may_part:
            raise ParallelError(f"{apart}. {_SAME}") from apart
        groups.divergence.reason = str(apart)
        unsharded.unshard(model, str(apart))
        raise
    common = found[call_group.members[0]]["random"]
    _set_random_state(common)
    with call_group.inside():
        yield
    if not draws and _is_same_state(_random_state(), common):
        _set_random_state(own)


def _why_diverged(found: dict[int, dict[str, Any]]) -> str:
    """Why ranks with these facts do not make the same call, or an empty string."""
    first, *others = sorted(found)  # the same reason, whichever rank asks first
    own = found[first]
    for rank in others:
        theirs = found[rank]
        if theirs["call"] != own["call"]:
            return (
                f"the ranks call different things (rank {first} {own['call']}, rank {rank} {theirs['call']})"
            )
        names = sorted(
            name
            for name in {*own["settings"], *theirs["settings"]}
            if own["settings"].get(name) != theirs["settings"].get(name)
        )
        if names:
            said = ", ".join(
                f"{name}={own['settings'].get(name)} and {theirs['settings'].get(name)}" for name in names
            )
            return (
                f"{own['call']} was called with different settings on rank {first} and on rank {rank}: {said}"
            )
        if changed := model_edits.differences(own.get("edits", {}), theirs.get("edits", {})):
            return (
                f"the model was changed since it was loaded, on rank {first} otherwise than on rank {rank}: "
                f"{', '.join(changed[:3])}"
            )
        if own.get("drawn from") != theirs.get("drawn from"):
            return (
                f"the random state of rank {first} is another than that of rank {rank} (torch.manual_seed "
                "with different seeds, or one of them has drawn more)"
            )
    other = [rank for rank in others if found[rank]["inputs"] != own["inputs"]]
    if other:
        return (
            f"the ranks have been given different inputs (rank {first} others than rank "
            f"{', '.join(map(str, other))}), and {len(found)} processes share the model"
        )
    return ""


def _generate(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of a sharded model: under the same settings on every rank."""
    whole = functools.partial(type(model).generate, model)
    if (
        replicas.is_inside() or groups.world().heartbeat.depth
    ):  # of the rows of one replica, or a part of a call
        return whole(*args, **kwargs)
    settings = kwargs.get("generation_config") or model.generation_config
    asked = {**settings.to_dict(), **kwargs}
    if asked.get("output_attentions") and asked.get("return_dict_in_generate") and _is_sharded(model):
        return _whole_for_attentions(model).generate(*args, **kwargs)
    facts = {
        "call": f"generate of {type(model).__name__}",
        "settings": _settings(mesh, asked),
        "inputs": digest([args, sorted(kwargs.items())]),
    }
    with contextlib.ExitStack() as stack:
        try:
            draws = bool(kwargs.get("do_sample", settings.do_sample))
            stack.enter_context(synchronized_call(model, mesh.world, facts, draws))
        except RanksDiverged:
            return model.generate(*args, **kwargs)
        if mesh.data.size == 1:
            return _with_cache_recorded(whole(*args, **kwargs))
        result = replicas.generate(whole, model, mesh, args, kwargs)
        _set_random_state(all_gather_object(mesh.world, _random_state())[0])
        return result


def _settings(mesh: Mesh, given: dict[str, Any]) -> dict[str, str]:
    """What of the arguments ``given`` to ``generate`` has to be the same on all ranks.

    A streamer hears the text and does not change it: one rank may have one, and others none.
    """
    streamer = given.pop("streamer", None)
    found = plain(given)
    if streamer is not None and mesh.data.size > 1:
        found["streamer"] = "given"  # then a batch is not shared out, by no replica
    return found


def _forward(
    model: nn.Module, part: nn.Module, mesh: Mesh, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """``call``, which is the forward of ``part``: of a sharded ``model``, or of a model in it."""
    group = mesh.replica
    call_group = call_group_of(group)
    if call_group.heartbeat.depth or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return call(*args, **kwargs)
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(part.config, "output_attentions", False)
    if asked and _is_sharded(model):
        _whole_for_attentions(model)
        return part(*args, **kwargs)
    if not (is_compared(args, kwargs) or call_group.needs_sync or groups.divergence.reason):
        with call_group.inside(publishes_end=False):
            return _with_cache_recorded(call(*args, **kwargs))
    facts = {
        "call": f"a forward of {type(part).__name__}",
        "settings": plain(kwargs),
        "inputs": digest([args, sorted(kwargs.items())]),
    }
    with contextlib.ExitStack() as stack:
        try:
            # What comes next may be drawn from the logits.
            stack.enter_context(synchronized_call(model, group, facts, draws=True))
        except RanksDiverged:
            return part(*args, **kwargs)
        return _with_cache_recorded(call(*args, **kwargs))


def _is_sharded(model: nn.Module) -> bool:
    plan = vars(model).get(PLAN)
    return plan is not None and bool(plan.shardings)


def _whole_for_attentions(model: Any) -> Any:
    """``model``, unsharded: a rank has the attention weights of its own heads only.

    Raises:
        ParallelError: It cannot be.
    """
    if unsharded.can_unshard(model):
        return unsharded.unshard_for(model, "output_attentions")
    raise ParallelError(
        f"output_attentions is not available: this {type(model).__name__} is sharded over processes, and "
        "each has the weights of its own heads. Start the script with LITEBOOST_TP=1."
    )


def _with_cache_recorded(result: Any) -> Any:
    """``result``, whose cache is recorded as one rank's."""
    cache = next((found for name in KV_CACHES if (found := getattr(result, name, None)) is not None), None)
    if cache is not None:
        unsharded.record_cache(cache)
    return result


def check_inputs(group: Group, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare the inputs of a prompt within a call, or of one that was not synchronized (of a copied model).

    Raises:
        ParallelError: They differ.
    """
    call_group: CallGroup = call_group_of(group)
    # Within a call what it was given has been compared: here only what it makes a prompt of.
    needs_comparison = is_prompt if call_group.heartbeat.depth else is_compared
    if torch.compiler.is_compiling() or not needs_comparison(args, kwargs):
        return
    found = all_gather_object(group, digest([args, sorted(kwargs.items())]))
    other = [rank for rank, value in enumerate(found) if value != found[0]]
    if other:
        raise ParallelError(
            f"the ranks have been given different inputs (rank 0 others than rank "
            f"{', '.join(map(str, other))}). {group.size} processes share the model. {_SAME}"
        )
    if not call_group.heartbeat.depth:
        _set_random_state(all_gather_object(group, _random_state())[0])


def is_compared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the inputs of a forward are compared: all but those of one more token behind a cache.

    It follows from what was compared before, and a sharded embedding compares it by itself.
    """
    cache = kwargs.get(arguments.cache_name(kwargs))
    if cache is None or not caches.keeps_tokens(cache):
        return True
    tokens = arguments.tokens(kwargs) if arguments.tokens(kwargs) is not None else next(iter(args), None)
    return not (isinstance(tokens, Tensor) and tokens.ndim == 2 and tokens.shape[1] == 1)


def is_prompt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether text of more than one token comes in."""
    tensors = [kwargs.get(name) for name in _TEXT] + list(args[:1])
    return any(isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > 1 for value in tensors)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return type(value) in (bool, int, float, str, type(None))


def plain(settings: dict[str, Any]) -> dict[str, str]:
    """The ``settings`` that can be compared over the ranks, as text."""
    return {name: repr(value) for name, value in settings.items() if _is_plain(value)}


def digest(value: Any) -> str:
    """Hash of all tensors in ``value``, and of the lengths of caches."""
    found = hashlib.blake2b(digest_size=8)
    _digest(value, found)
    return found.hexdigest()


def _digest(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{tuple(value.shape)}{value.dtype}".encode())
        if not value.is_meta:
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        _digest(sorted(value.items(), key=lambda item: str(item[0])), found)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _digest(each, found)
    elif hasattr(value, "get_seq_length"):
        found.update(f"cache {_length(value)}".encode())


def _length(cache: Any) -> int:
    """Tokens that a cache keeps; of one without attention layers, which count none, whether it keeps any."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return int(caches.keeps_tokens(cache))


def _random_state() -> list[Tensor]:
    """The states of this rank's generators: of the CPU and of its device."""
    npu = getattr(torch, "npu", None)
    states = [torch.random.get_rng_state()]
    return [*states, npu.get_rng_state()] if npu is not None and npu.is_available() else states


def _is_same_state(state: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


def _set_random_state(states: list[Tensor]) -> None:
    """Set the states of this rank's generators."""
    torch.random.set_rng_state(states[0])
    if len(states) > 1:
        torch.npu.set_rng_state(states[1])


def save(model: Any, mesh: Mesh, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """``write``, which is ``save_pretrained`` of a sharded model, on every rank."""
    facts = {"call": f"save_pretrained of {type(model).__name__}", "settings": {}, "inputs": ""}
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(synchronized_call(model, mesh.world, facts))
        except RanksDiverged:
            return model.save_pretrained(*args, **kwargs)
        return write(*args, **kwargs)
