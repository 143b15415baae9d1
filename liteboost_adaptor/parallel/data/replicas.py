"""Data parallelism: replicas share the rows of a batch that ``generate`` is given."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...kv_cache.names import KV_CACHES
from ...report import report
from ..runtime.groups import all_gather_object, fail_together
from ..runtime.mesh import Mesh

#: Arguments with a row for each row of the batch.
_PER_ROW = (
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "input_features",
    "input_values",
    "decoder_input_ids",
    "decoder_attention_mask",
)
#: Arguments and settings that depend on all rows, or that cannot be split by rows.
_NOT_PER_ROW = (
    "streamer",
    "logits_processor",
    "stopping_criteria",
    "assistant_model",
    "custom_generate",
    *KV_CACHES,
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "stop_strings",
    "max_time",
    "output_attentions",
    "output_hidden_states",
)
#: Results that are numbered by rows times beams.
_OF_BEAMS = "beam_indices"

_inside: list[None] = []


def is_inside() -> bool:
    """Whether this rank is generating for the rows of its replica."""
    return bool(_inside)


@contextlib.contextmanager
def _generating_rows() -> Iterator[None]:
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()


def generate(
    whole: Callable[..., Any], model: Any, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``whole(*args, **kwargs)``, each replica for its rows; the same result on every rank.

    A batch that cannot be split is computed by every replica, and a note says why. Rows keep their order.
    Where a replica's texts all end early they are padded, and its scores behind the end are zeros.

    Args:
        whole: ``generate`` of the model, which ranks of one replica call together.
        args, kwargs: The same on every rank.

    Raises:
        ParallelError: Another rank has failed.
    """
    settings = kwargs.get("generation_config") or model.generation_config
    if args and isinstance(args[0], Tensor):
        args, kwargs = args[1:], {**kwargs, "inputs": args[0]}
    rows = _rows(kwargs)
    reason = "positional arguments" if args else _why_unsharded(rows, settings, kwargs)
    if reason:
        report.note(
            f"A batch that was generated for was not shared by the replicas, each did all of it: {reason}."
        )
        with _generating_rows():
            return whole(*args, **kwargs)
    first, last = (rows * (mesh.data.rank + more) // mesh.data.size for more in (0, 1))
    result = None
    with fail_together(mesh.world), _generating_rows():
        _seed_replica(mesh.data.rank)
        if first < last:
            result = whole(**{name: _part(name, value, first, last, rows) for name, value in kwargs.items()})
    return _joined(all_gather_object(mesh.data, _portable(result)), model, settings, kwargs)


def _rows(kwargs: dict[str, Any]) -> int:
    """How many rows the batch has; 0 where no argument says so."""
    tensors = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    tensors = (*tensors, *(kwargs.get(name) for name in ("input_features", "input_values")))
    return next((value.shape[0] for value in tensors if isinstance(value, Tensor)), 0)


def _why_unsharded(rows: int, settings: Any, kwargs: dict[str, Any]) -> str:
    """Why a batch cannot be split by rows, or an empty string."""
    if not rows:
        return "no argument is known to hold the rows"
    for name in _NOT_PER_ROW:
        found = kwargs.get(name)
        found = getattr(settings, name, None) if found is None else found
        if found is not None and found is not False and found != []:
            return f"{name} is given"
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.ndim:
            if name not in _PER_ROW:
                return f"{name} is not known to have a row for each of the batch"
            if value.shape[0] not in (1, rows):
                return f"{name} has {value.shape[0]} rows, the batch {rows}"
    return ""


def _part(name: str, value: Any, first: int, last: int, rows: int) -> Any:
    is_of_rows = name in _PER_ROW and isinstance(value, Tensor) and value.shape[0] == rows
    return value[first:last] if is_of_rows else value


def _seed_replica(replica: int) -> None:
    """Give replicas, whose generators have the same state, different seeds."""
    if not replica:
        return
    state = torch.random.get_rng_state().numpy().tobytes() + replica.to_bytes(4, "big")
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "big")
    torch.manual_seed(seed)


def _portable(result: Any) -> Any:
    """``result`` with its tensors on the CPU and without the cache, which stays with its replica."""
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, dict):
        made = {name: _portable(value) for name, value in result.items() if name not in KV_CACHES}
        return type(result)(**made)
    return tuple(_portable(each) for each in result) if isinstance(result, tuple) else result


def _joined(results: list[Any], model: Any, settings: Any, kwargs: dict[str, Any]) -> Any:
    """The results of all replicas as one, on the model's device."""
    results = [each for each in results if each is not None]
    fill = kwargs.get("pad_token_id", settings.pad_token_id)
    if fill is None:
        fill = kwargs.get("eos_token_id", settings.eos_token_id)
        fill = fill[0] if isinstance(fill, list) else fill
    if isinstance(results[0], Tensor):
        return _stacked(results, fill or 0).to(model.device)
    made = {}
    for name in results[0]:
        values = [each[name] for each in results]
        if name == _OF_BEAMS:
            values = _renumbered(values, [each["sequences"].shape[0] for each in results], settings, kwargs)
            made[name] = _stacked(values, -1).to(model.device)
        elif isinstance(values[0], tuple):
            made[name] = tuple(step.to(model.device) for step in _stacked_steps(values))
        else:
            made[name] = _stacked(values, fill or 0).to(model.device)
    return type(results[0])(**made)


def _stacked(parts: list[Tensor], fill: int) -> Tensor:
    """``[rows, length]`` of all replicas one below the other, filled up to the longest; also ``[rows]``."""
    if parts[0].ndim < 2:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    return torch.cat(
        [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=fill) for part in parts]
    )


def _stacked_steps(parts: list[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    """``[rows, vocabulary]`` of each step; zeros for a replica that has ended before."""
    for step in range(max(map(len, parts))):
        yield torch.cat([part[step] if step < len(part) else torch.zeros_like(part[0]) for part in parts])


def _renumbered(parts: list[Tensor], rows: list[int], settings: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Numbers of beams counted on from one replica to the next; -1 stays."""
    beams = kwargs.get("num_beams", settings.num_beams) or 1
    returned = kwargs.get("num_return_sequences", settings.num_return_sequences) or 1
    made, before = [], 0
    for part, count in zip(parts, rows, strict=True):
        made.append(torch.where(part >= 0, part + before, part))
        before += count // returned * beams
    return made
