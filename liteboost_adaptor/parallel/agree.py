"""Calls that ranks make together: they compare what they are given, draw the same numbers, or part.

A script that gives every process something else, or calls a model in one of them only, is right without this
package. So where ranks of a model that was divided by default differ, each goes on with the whole model.
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
from ..program.state import RECORDABLE
from . import alike, groups, replicas, undivided
from .circle import Apart, Circle
from .groups import Group, circle_of, gathered
from .mesh import Mesh

_TEXT = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_SAME = (
    "All work on the same text: call it on every rank with the same. With LITEBOOST_DP=N and all rows on "
    "every rank, N replicas share the rows; with LITEBOOST_TP=1 each process has a model of its own."
)


def watch(model: nn.Module, mesh: Mesh) -> None:
    """Let ranks meet before they call ``model``, and draw what rank 0 draws.

    Inputs of a forward are compared within a replica: replicas have rows of their own.
    """
    own = vars(model)
    if mesh.replica.size > 1:
        hook = functools.partial(before_forward, mesh.replica)
        setattr(hook, RECORDABLE, True)  # it does nothing before one more token
        model.register_forward_pre_hook(hook, with_kwargs=True)
        own[AROUND] = functools.partial(_forward, model, mesh)
    if hasattr(model, "generate"):
        own["generate"] = functools.partial(_generate, model, mesh)


@contextlib.contextmanager
def together(model: nn.Module, group: Group, facts: dict[str, Any]) -> Iterator[None]:
    """A call of ``model`` that all ranks of ``group`` make, if they are of one mind.

    Raises:
        Apart: They are not, and ``model`` is whole on this rank now. Before anything was done.
        ParallelError: They are not, and that cannot be; or one leaves the call.
    """
    circle = circle_of(group)
    if groups.ways.reason:
        undivided.restore(model, groups.ways.reason)
        raise Apart(groups.ways.reason)
    may_part = undivided.is_possible(model)
    facts = {**facts, "random": _random_state() if circle.presence.rank == circle.members[0] else None}
    facts["changes"] = alike.changes(model) if may_part else {}
    try:
        found = circle.meet(facts, _why_apart)
    except Apart as apart:
        if not may_part:
            raise ParallelError(f"{apart}. {_SAME}") from apart
        groups.ways.reason = str(apart)
        undivided.restore(model, str(apart))
        raise
    _draw_from(found[circle.members[0]]["random"])
    with circle.inside():
        yield


def _why_apart(found: dict[int, dict[str, Any]]) -> str:
    """Why ranks that have come with these facts do not make one call, or an empty string."""
    first, *others = found
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
        if changed := alike.different(own.get("changes", {}), theirs.get("changes", {})):
            return (
                f"the model was changed since it was loaded, on rank {first} otherwise than on rank {rank}: "
                f"{', '.join(changed[:3])}"
            )
    other = [rank for rank in others if found[rank]["inputs"] != own["inputs"]]
    if other:
        return (
            f"the ranks have been given different inputs (rank {first} others than rank "
            f"{', '.join(map(str, other))}), and {len(found)} processes share the model"
        )
    return ""


def _generate(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of a divided model: under the same settings on every rank."""
    whole = functools.partial(type(model).generate, model)
    if (
        replicas.is_inside() or groups.world().presence.depth
    ):  # of the rows of one replica, or a part of a call
        return whole(*args, **kwargs)
    settings = kwargs.get("generation_config") or model.generation_config
    facts = {
        "call": f"generate of {type(model).__name__}",
        "settings": plain({**settings.to_dict(), **kwargs}),
        "inputs": digest([args, sorted(kwargs.items())]),
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(together(model, mesh.world, facts))
        except Apart:
            return model.generate(*args, **kwargs)
        if mesh.data.size == 1:
            return _noted(whole(*args, **kwargs))
        result = replicas.generate(whole, model, mesh, args, kwargs)
        _draw_from(gathered(mesh.world, _random_state())[0])
        return result


def _forward(model: nn.Module, mesh: Mesh, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``call``, which is the forward of a divided model, or of one that was divided."""
    group = mesh.replica
    circle = circle_of(group)
    if circle.presence.depth or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return call(*args, **kwargs)
    if not (is_prompt(args, kwargs) or circle.must_meet or groups.ways.reason):
        with circle.inside(is_said=False):
            return _noted(call(*args, **kwargs))
    facts = {
        "call": f"a forward of {type(model).__name__}",
        "settings": plain(kwargs),
        "inputs": digest([args, sorted(kwargs.items())]),
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(together(model, group, facts))
        except Apart:
            return model(*args, **kwargs)
        return _noted(call(*args, **kwargs))


def _noted(result: Any) -> Any:
    """``result``, whose cache holds what one rank has computed."""
    cache = getattr(result, "past_key_values", None)
    if cache is not None:
        undivided.note_cache(cache)
    return result


def before_forward(group: Group, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare the inputs of a prompt within a call, or of one that nobody has met for (of a copied model).

    Raises:
        ParallelError: They differ.
    """
    if torch.compiler.is_compiling() or not is_prompt(args, kwargs):
        return
    circle: Circle = circle_of(group)
    found = gathered(group, digest([args, sorted(kwargs.items())]))
    other = [rank for rank, value in enumerate(found) if value != found[0]]
    if other:
        raise ParallelError(
            f"the ranks have been given different inputs (rank 0 others than rank "
            f"{', '.join(map(str, other))}). {group.size} processes share the model. {_SAME}"
        )
    if not circle.presence.depth:
        _draw_from(gathered(group, _random_state())[0])


def is_prompt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether more than one token comes in; later tokens follow from the first."""
    tensors = [kwargs.get(name) for name in _TEXT] + list(args[:1])
    return any(isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > 1 for value in tensors)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return type(value) in (bool, int, float, str, type(None))


def plain(settings: dict[str, Any]) -> dict[str, str]:
    """What can be compared over the ranks among ``settings``, as text."""
    return {name: repr(value) for name, value in settings.items() if _is_plain(value)}


def digest(value: Any) -> str:
    """Of all tensors in ``value``, and of how long the caches are."""
    found = hashlib.blake2b(digest_size=8)
    _digest(value, found)
    return found.hexdigest()


def _digest(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{tuple(value.shape)}{value.dtype}".encode())
        if not value.is_meta:
            found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        _digest(sorted(value.items(), key=lambda item: str(item[0])), found)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _digest(each, found)
    elif hasattr(value, "get_seq_length"):
        found.update(f"cache {int(value.get_seq_length())}".encode())


def _random_state() -> list[Tensor]:
    """Of the generators of this rank: of the CPU and of its device."""
    npu = getattr(torch, "npu", None)
    states = [torch.random.get_rng_state()]
    return [*states, npu.get_rng_state()] if npu is not None and npu.is_available() else states


def _draw_from(states: list[Tensor]) -> None:
    """Let this rank draw the numbers that one with these ``states`` would."""
    torch.random.set_rng_state(states[0])
    if len(states) > 1:
        torch.npu.set_rng_state(states[1])


def save(model: Any, mesh: Mesh, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """``write``, which is ``save_pretrained`` of a divided model, on every rank."""
    facts = {"call": f"save_pretrained of {type(model).__name__}", "settings": {}, "inputs": ""}
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(together(model, mesh.world, facts))
        except Apart:
            return model.save_pretrained(*args, **kwargs)
        return write(*args, **kwargs)
