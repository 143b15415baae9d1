"""Checkpoints that were sharded offline: each rank reads a file of its own, and nothing else.

A folder has ``rank_0.safetensors`` to ``rank_N.safetensors`` with shards of the tensors under the
checkpoint's own names, `INDEX` with their ranges and checksums, and the plan as `STRATEGY`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import config
from ...checkpoint.files import File, Slice
from ...checkpoint.folders import write_json
from ...errors import CheckpointError
from ..tensor.plan import ShardingPlan
from ..tensor.shard_spec import copy_shard
from .read_plan import ReadPlan

if TYPE_CHECKING:
    from ...engine.undo_stack import UndoStack
    from ...huggingface.runtime import Runtime

INDEX = "liteboost_shards.json"
STRATEGY = "liteboost_strategy.json"
_MODELING = "transformers.modeling_utils"
_FORMAT = 1


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank_{rank}.safetensors"


def register(runtime: Runtime) -> None:
    """Find the files of sharded checkpoints while ``runtime`` prepares models."""
    runtime.extend(_extend)


def _extend(stack: UndoStack, settings: config.Settings) -> None:
    if hasattr(sys.modules[_MODELING], "_get_resolved_checkpoint_files"):
        stack.set_attribute(
            _MODELING, "_get_resolved_checkpoint_files", functools.partial(_resolving, settings=settings)
        )


def _resolving(original: Callable[..., Any], settings: config.Settings) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_resolved_checkpoint_files(*args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
        if name is None or not (Path(name) / INDEX).is_file():
            return original(*args, **kwargs)
        index = read_index(Path(name))
        _check_world_size(Path(name), index["world_size"], settings)
        return [str(Path(name) / rank_file(config.launched()[0] % index["world_size"]))], None

    return _get_resolved_checkpoint_files


def _check_world_size(folder: Path, size: int, settings: config.Settings) -> None:
    started = config.launched()[1] if config.launched() else 1
    copies = settings.dp * settings.sp * settings.cp  # ranks of a mesh that hold the same, see mesh.py
    if started != size * copies:
        parts = max(started // copies, 1)
        again = f"`python -m liteboost_adaptor shard WHOLE ANOTHER --tp {parts}`"
        raise CheckpointError(
            f"{folder} is sharded for {size} processes, and {started} {'has' if started == 1 else 'have'} "
            f"been started. Start it with `torchrun --nproc-per-node={size * copies}`, or put it together "
            f"again with `{_merge(folder)}`" + (f" and shard that: {again}." if parts > 1 else ".")
        )
    if settings.level < 2 or settings.tp not in (0, size):
        raise CheckpointError(
            f"{folder} is sharded for {size} processes, and LITEBOOST_LEVEL={settings.level} with "
            f"LITEBOOST_TP={settings.tp or 'auto'} does not shard models so. Unset them, or put it together "
            f"again with `{_merge(folder)}`."
        )


def _merge(folder: Path) -> str:
    return f"python -m liteboost_adaptor shard --merge {folder} WHOLE"


def is_sharded(files: list[str] | None) -> bool:
    """Whether ``files`` are those of a sharded checkpoint."""
    return bool(files) and (Path(files[0]).parent / INDEX).is_file()


def refuse_unsharded(files: list[str] | None, reason: str) -> None:
    """Raise `CheckpointError` where ``files`` are sharded, and the model is to be loaded unsharded."""
    if is_sharded(files):
        raise CheckpointError(
            f"{Path(files[0]).parent} is sharded, and the model would be loaded whole by every process: "
            f"{reason}"
        )


def read_index(folder: Path) -> dict[str, Any]:
    """What `write_index` wrote.

    Raises:
        CheckpointError: It cannot be read, or is of another version.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] == _FORMAT:
            return index
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(f"{folder / INDEX} cannot be read ({fault}); shard the model again") from fault
    raise CheckpointError(
        f"{folder / INDEX} is of format {index['format']}, wanted {_FORMAT}; shard the model again"
    )


def write_index(
    folder: Path, plan: ShardingPlan, tensors: dict[str, Any], files: dict[str, Any], checkpoint_index: str
) -> None:
    """Write the index and the strategy.

    Args:
        tensors: Name -> shape, file it came from, dim, ranges and SHA-256 by rank.
        files: File of the checkpoint -> its metadata.
        checkpoint_index: Text of its own index, if it has several files.
    """
    index = {
        "format": _FORMAT,
        "world_size": plan.world_size,
        "model": plan.model,
        "plan": plan.digest(),
        "files": files,
        "checkpoint_index": checkpoint_index,
        "headers": [header_digest(File(folder / rank_file(rank))) for rank in range(plan.world_size)],
        "tensors": tensors,
    }
    write_json(folder / STRATEGY, json.loads(plan.to_json()))
    write_json(folder / INDEX, index)


def header_digest(file: File) -> str:
    """SHA-256 of a file's header."""
    return hashlib.sha256(file.header).hexdigest()


def open_rank(folder: Path, rank: int, index: Mapping[str, Any]) -> dict[str, Slice]:
    """The shards of a rank; each is compared with its checksum when it is read.

    Raises:
        CheckpointError: The file is missing, cut short, or not the one that was written.
    """
    path = folder / rank_file(rank)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy it again, or shard the model again")
    file = File(path)
    if header_digest(file) != index["headers"][rank]:
        raise CheckpointError(
            f"{path} is not the file that was written; copy it again, or shard the model again"
        )
    return {name: Slice(file, name, digest=entry["sha256"][rank]) for name, entry in index["tensors"].items()}


def tensors_of(
    file: str, plan: ShardingPlan, rank: int, find: Callable[[dict[str, tuple[int, ...]]], ReadPlan]
) -> tuple[dict[str, Slice], list[Any]] | None:
    """What this rank reads of a sharded checkpoint, and the converters whose results are sharded.

    None where the checkpoint is not sharded.

    Args:
        find: What would be read of tensors of these shapes for the model that is being loaded.

    Raises:
        CheckpointError: It was sharded for another model, or otherwise than this version shards it.
    """
    folder = Path(file).parent
    if Path(file).name != rank_file(rank) or not (folder / INDEX).is_file():
        return None
    index = read_index(folder)
    found = find({name: tuple(entry["shape"]) for name, entry in index["tensors"].items()})
    parts = {name: ranges_of(found, name, plan.world_size) for name in index["tensors"]}
    stored = {name: (entry["dim"], entry["ranges"]) for name, entry in index["tensors"].items()}
    if index["plan"] != plan.digest() or parts != stored:
        raise CheckpointError(
            f"{folder} was sharded for {index['model']} by another version or with another plan than that of "
            f"{plan.model} now. Put it together again with `{_merge(folder)}` and shard that."
        )
    return open_rank(folder, rank, index), found.late


def ranges_of(found: ReadPlan, name: str, world_size: int) -> tuple[int, list[list[list[int]]] | None]:
    """(dim, ranges by rank) of a tensor of the checkpoint; None for ranges: all of it on every rank."""
    part = found.reads.get(name)
    if part is None:
        return 0, None
    ranges = [[list(each) for each in part.ranges(rank, world_size)] for rank in range(world_size)]
    return part.dim, ranges


def join_shards(
    parts: list[torch.Tensor], shape: list[int], dim: int, ranges: list[list[list[int]]]
) -> torch.Tensor:
    """A tensor from the shards of all ranks."""
    whole = torch.empty(shape, dtype=parts[0].dtype)
    for part, spans in zip(parts, ranges, strict=True):
        copy_shard(whole, part, dim, spans)
    return whole
