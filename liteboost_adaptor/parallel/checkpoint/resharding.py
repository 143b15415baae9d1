"""Shard a checkpoint into a file for each rank, and merge it again, one tensor at a time."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...checkpoint.files import File, Slice, memory
from ...checkpoint.folders import INDEX, copy_others, on_meta
from ...checkpoint.writing import Writer
from ...errors import CheckpointError
from ..tensor import layout
from ..tensor.plan import EXPERTS
from . import offline, read_plan
from .offline import rank_file

#: Called with the bytes that have been written since the last call.
Progress = Callable[[int], Any]


def size_of(folder: Path) -> int:
    """Bytes of the files with weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def shard_checkpoint(
    source: Path,
    target: Path,
    world_size: int,
    progress: Progress = lambda count: None,
    trust_remote_code: bool = False,
) -> None:
    """Write the checkpoint in ``source`` to ``target``, a file a rank.

    Args:
        trust_remote_code: Whether Python code in ``source`` may run.

    Raises:
        PlanError: The model cannot be sharded over so many ranks; before a file is opened.
        CheckpointError: There are no safetensors files in ``source``, or ``target`` exists.
    """
    model = on_meta(source, trust_remote_code)
    if getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{source} is quantized, and needs no file a rank: under `torchrun`, each process reads its part"
        )
    plan = layout.infer_layout(model).plan(world_size)
    if EXPERTS in plan.roles.values():
        raise CheckpointError(
            f"{plan.model} gives each of {world_size} processes whole experts, which are sharded as they are "
            "loaded: start the script under `torchrun` with the unsharded checkpoint"
        )
    files = sorted(source.glob("*.safetensors"))
    if not files or (source / offline.INDEX).exists():
        what = "is sharded already" if files else "has no safetensors files"
        raise CheckpointError(f"{source} {what}; give a folder that save_pretrained has written")
    opened = {file.name: File(file) for file in files}
    entries = {name: (file, entry) for file in opened.values() for name, entry in file.entries.items()}
    found = read_plan.plan_reads(
        model, {name: entry.shape for name, (_, entry) in entries.items()}, plan, _conversions(model)
    )
    parts = {name: offline.ranges_of(found, name, world_size) for name in entries}
    with _atomic_folder(target) as folder:
        copy_others(source, folder, (offline.INDEX, offline.STRATEGY))
        writers = []
        for rank in range(world_size):
            shapes = {
                name: (entry.dtype, _slice(file, name, parts[name], rank).shape)
                for name, (file, entry) in entries.items()
            }
            writers.append(Writer(folder / rank_file(rank), shapes, {"format": "pt"}))
        tensors = {}
        for name, (file, entry) in entries.items():
            digests = []
            for rank, writer in enumerate(writers):
                tensor = _slice(file, name, parts[name], rank)[...]
                digests.append(hashlib.sha256(memory(tensor)).hexdigest())
                writer.put(name, tensor)
                progress(tensor.nbytes)
            dim, ranges = parts[name]
            tensors[name] = {
                "shape": list(entry.shape),
                "file": file.path.name,
                "dim": dim,
                "ranges": ranges,
                "sha256": digests,
            }
        for writer in writers:
            writer.close()
        index = source / INDEX
        text = index.read_text(encoding="utf-8") if index.exists() else ""
        metadata = {name: file.metadata for name, file in opened.items()}
        offline.write_index(folder, plan, tensors, metadata, text)


def merge_checkpoint(source: Path, target: Path, progress: Progress = lambda count: None) -> None:
    """Write the checkpoint that ``source`` was sharded from, with the same files, to ``target``.

    Raises:
        CheckpointError: ``source`` is not sharded, or a file of it is missing or changed; ``target`` exists.
    """
    if not (source / offline.INDEX).exists():
        raise CheckpointError(f"{source} is not sharded: it has no {offline.INDEX}")
    index = offline.read_index(source)
    ranks = [offline.open_rank(source, rank, index) for rank in range(index["world_size"])]
    with _atomic_folder(target) as folder:
        copy_others(source, folder, (offline.INDEX, offline.STRATEGY))
        for file, metadata in index["files"].items():
            entries = {name: entry for name, entry in index["tensors"].items() if entry["file"] == file}
            dtypes = {name: ranks[0][name].file.entries[name].dtype for name in entries}
            shapes = {name: (dtypes[name], tuple(entry["shape"])) for name, entry in entries.items()}
            writer = Writer(folder / file, shapes, metadata)
            for name, entry in entries.items():
                tensor = ranks[0][name][...]
                if entry["ranges"] is not None:
                    held = [tensor, *(rank[name][...] for rank in ranks[1:])]
                    tensor = offline.join_shards(held, entry["shape"], entry["dim"], entry["ranges"])
                writer.put(name, tensor)
                progress(tensor.nbytes)
            writer.close()
        if index["checkpoint_index"]:
            (folder / INDEX).write_text(index["checkpoint_index"], encoding="utf-8")


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def _slice(file: File, name: str, part: tuple[int, Any], rank: int) -> Slice:
    dim, ranges = part
    return Slice(file, name, dim, None if ranges is None else tuple(map(tuple, ranges[rank])))


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to ``target`` when the block is left without an error."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
