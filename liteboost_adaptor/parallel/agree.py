"""What ranks of one model must have in common at every prompt: the inputs, and the numbers sampling draws."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ParallelError
from ..program.state import RECORDABLE
from . import replicas
from .groups import Group, gathered, process_group, talking
from .mesh import Mesh

_TEXT = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
_SAME = (
    "All work on the same text: call it on every rank with the same. With LITEBOOST_DP=N and all rows on "
    "every rank, N replicas share the rows; with LITEBOOST_TP=1 each process has a model of its own."
)


def watch(model: nn.Module, mesh: Mesh) -> None:
    """Compare inputs and settings of ``model`` at every prompt, and let all ranks draw what rank 0 draws.

    Inputs are compared within a replica: replicas have rows of their own.
    """
    if mesh.replica.size > 1:
        hook = functools.partial(_before_forward, mesh.replica)
        setattr(hook, RECORDABLE, True)  # it does nothing before one more token
        model.register_forward_pre_hook(hook, with_kwargs=True)
    if hasattr(model, "generate"):
        vars(model)["generate"] = functools.partial(_generate, model, mesh)


def _generate(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """``generate`` of a divided model: under the same settings on every rank."""
    whole = functools.partial(type(model).generate, model)
    if replicas.is_inside():  # of the rows of one replica; the others may have none
        return whole(*args, **kwargs)
    settings = kwargs.get("generation_config") or model.generation_config
    compare_settings(mesh.world, {**settings.to_dict(), **kwargs})
    if mesh.data.size == 1:
        return whole(*args, **kwargs)
    compare_inputs(mesh.world, [*args, *(value for _, value in sorted(kwargs.items()))])
    share_random_state(mesh.world)
    result = replicas.generate(whole, model, mesh, args, kwargs)
    share_random_state(mesh.world)
    return result


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(each) for each in value)
    return type(value) in (bool, int, float, str, type(None))


def compare_settings(group: Group, settings: dict[str, Any]) -> None:
    """Compare what is plain among ``settings`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ.
    """
    plain = {name: repr(value) for name, value in settings.items() if _is_plain(value)}
    found = gathered(group, plain)
    for rank, theirs in enumerate(found):
        names = sorted(name for name in {*found[0], *theirs} if found[0].get(name) != theirs.get(name))
        if names:
            said = ", ".join(f"{name}={found[0].get(name)} and {theirs.get(name)}" for name in names)
            raise ParallelError(
                f"generate was called with different settings on rank 0 and on rank {rank}: {said}. {_SAME}"
            )


def _before_forward(group: Group, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or not _is_prompt(args, kwargs):
        return
    compare_inputs(group, [*args, *(value for _, value in sorted(kwargs.items()))])
    share_random_state(group)


def _is_prompt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether more than one token comes in; later tokens follow from the first."""
    tensors = [kwargs.get(name) for name in _TEXT] + list(args[:1])
    return any(isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > 1 for value in tensors)


def compare_inputs(group: Group, values: list[Any]) -> None:
    """Compare the tensors among ``values`` over the ranks.

    Raises:
        ParallelError: On every rank, where they differ.
    """
    digest = torch.tensor([_digest(values)], dtype=torch.int64)
    found = [torch.empty_like(digest) for _ in range(group.size)]
    with talking(group):
        dist.all_gather(found, digest, group=process_group(group))
    other = [rank for rank, value in enumerate(found) if value.item() != found[0].item()]
    if other:
        raise ParallelError(
            f"the ranks have been given different inputs (rank 0 others than rank "
            f"{', '.join(map(str, other))}). {group.size} processes share the model. {_SAME}"
        )


def _digest(values: list[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big", signed=True)


def share_random_state(group: Group) -> None:
    """Let every rank draw the numbers that rank 0 would draw, on the CPU and on its device."""
    state = torch.random.get_rng_state()
    with talking(group):
        dist.broadcast(state, group_src=0, group=process_group(group))
    torch.random.set_rng_state(state)
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        state = npu.get_rng_state()
        dist.broadcast(state, group_src=0, group=process_group(group))
        npu.set_rng_state(state)
