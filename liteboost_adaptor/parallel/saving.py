"""``save_pretrained`` of a divided model: rank 0 puts the whole checkpoint together, tensor by tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.writing import Writer
from ..errors import ParallelError
from . import groups, offline, quantized
from .groups import Group
from .mesh import Mesh
from .plan import Cut, Plan

_REFUSED = ("state_dict", "push_to_hub", "distributed_checkpoint")


def save(model: Any, plan: Plan, mesh: Mesh, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """What ``save_pretrained`` of the undivided model would write. Every rank calls it; rank 0 writes.

    Ranks whose parts the first ones have as well only wait.

    The files get their names when all of them are written. One tensor, or those that are one in the
    checkpoint, is in memory at a time.

    Raises:
        ParallelError: An argument that needs the whole model in one process; a rank that fails.
    """
    if quantized.layers_of(model):
        raise ParallelError(
            f"this {plan.model} is divided over {mesh.tensor.size}, and its weights are integers that were "
            "read from a checkpoint: copy that, or load it with LITEBOOST_TP=1 and save it."
        )
    refused = [name for name in _REFUSED if kwargs.get(name)]
    if refused:
        raise ParallelError(
            f"{refused[0]} of save_pretrained needs the whole model in one process, and this {plan.model} is "
            f"divided over {mesh.tensor.size}. Save it to a folder, and go on from there."
        )
    with groups.together(mesh.world):
        if mesh.is_first:
            _save(model, plan, mesh.tensor, save_directory, kwargs)


def save_whole(model: Any, mesh: Mesh, *args: Any, **kwargs: Any) -> None:
    """``save_pretrained`` of a model that every rank holds whole. Every rank calls it; rank 0 writes.

    Raises:
        ParallelError: On the others, where rank 0 has failed.
    """
    with groups.together(mesh.world):
        if mesh.is_first:
            type(model).save_pretrained(model, *args, **kwargs)


def _save(
    model: Any, plan: Plan, group: Group, save_directory: str | os.PathLike[str], kwargs: dict[str, Any]
) -> None:
    steps = _agreed(_steps(model, plan) if group.rank == 0 else [], group)
    if group.rank:
        return _send(model, plan, group, steps)
    try:
        _write(model, plan, group, steps, Path(save_directory), kwargs)
    except BaseException as fault:
        groups.gathered(group, f"{type(fault).__name__}: {fault}")
        raise
    groups.gathered(group, "")
    return None


def _send(model: Any, plan: Plan, group: Group, steps: list[list[str]]) -> None:
    """Send rank 0 the parts of this rank. Before each step, and at the end, it says whether it goes on."""
    local = model.state_dict()
    for names in [*steps, []]:
        failed = groups.gathered(group, "")[0]
        if failed:
            raise ParallelError(f"rank 0 could not save the model, and the others end with it. {failed}")
        for name in names:
            if name in plan.cuts:
                dist.send(_bytes(local[name]), 0, group=groups.process_group(group))


def _agreed(steps: list[list[str]], group: Group) -> list[list[str]]:
    """What rank 0 does, on every rank."""
    said = groups.gathered(group, ("save_pretrained", steps))
    if any(type(each) is not tuple or each[0] != "save_pretrained" for each in said):
        raise ParallelError(
            "save_pretrained of a divided model is called on every rank, and a rank did something else"
        )
    return said[0][1]


def _steps(model: Any, plan: Plan) -> list[list[str]]:
    """The parameters by what becomes of them in the checkpoint: those that are put together are together."""
    from transformers.core_model_loading import WeightConverter, apply_converters
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: value for name, value in model.state_dict().items() if name not in ignored}
    reverse = [each.reverse_transform() for each in reversed(_conversions(model))]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    found: dict[str, list[str]] = {}
    for name in remove_tied_weights_from_state_dict(state, model):
        found.setdefault(apply_converters(name, converters)[0], []).append(name)
    return list(found.values())


def _conversions(model: Any) -> list[Any]:
    """What transformers did to the tensors of the checkpoint, as `revert_weight_conversion` finds it."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        found = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in found if not isinstance(each, PrefixChange)]
    return found


def _write(
    model: Any, plan: Plan, group: Group, steps: list[list[str]], target: Path, kwargs: dict[str, Any]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # Configuration, generation settings and the code of a remote model are transformers' to write.
        type(model).save_pretrained(model, folder, **{**kwargs, "state_dict": {}})
        variant = kwargs.get("variant")
        name = f"model.{variant}.safetensors" if variant else "model.safetensors"
        _write_weights(model, plan, group, steps, folder / name, kwargs)
        _put_in_place(folder, target, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path, weights: str) -> None:
    if not target.exists():
        folder.chmod(0o777 & ~_umask())
        os.rename(folder, target)
        return
    new = sorted(folder.iterdir(), key=lambda file: file.name.endswith(".index.json"))
    for file in new:
        os.replace(file, target / file.name)
    stem = weights.removesuffix(".safetensors")
    stale = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    for file in list(target.iterdir()):
        if stale.fullmatch(file.name) and file.name not in {each.name for each in new}:
            file.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_weights(
    model: Any, plan: Plan, group: Group, steps: list[list[str]], path: Path, kwargs: dict[str, Any]
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    local = model.state_dict()
    meta = {name: _on_meta(local[name], plan.cuts.get(name)) for names in steps for name in names}
    result = _reverted(model, meta, kwargs)
    pattern = path.name.replace(".safetensors", "{suffix}.safetensors")
    size = kwargs.get("max_shard_size", "50GB")
    division = split_torch_state_dict_into_shards(result, filename_pattern=pattern, max_shard_size=size)
    files = {
        file: Writer(
            path.with_name(file),
            {name: (result[name].dtype, tuple(result[name].shape)) for name in names},
            {"format": "pt"},
        )
        for file, names in division.filename_to_tensors.items()
    }
    file_of = {name: file for file, names in division.filename_to_tensors.items() for name in names}
    for names in steps:
        groups.gathered(group, "")
        whole = {name: _whole(local[name], plan.cuts.get(name), group) for name in names}
        for name, tensor in _reverted(model, whole, kwargs).items():
            files[file_of[name]].put(name, tensor)
        del whole
    for file in files.values():
        file.close()
    if division.is_sharded:
        named = dict(model.named_parameters(remove_duplicate=False))
        count = sum(value.numel() for name, value in meta.items() if name in named)
        index = {
            "metadata": {"total_parameters": count, **division.metadata},
            "weight_map": division.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        path.with_name(f"{path.name}.index.json").write_text(text, encoding="utf-8")


def _reverted(model: Any, state: dict[str, Tensor], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors as the checkpoint has them."""
    if not kwargs.get("save_original_format", True):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def _on_meta(tensor: Tensor, cut: Cut | None) -> Tensor:
    return torch.empty(_whole_shape(tensor, cut), dtype=tensor.dtype, device="meta")


def _whole_shape(tensor: Tensor, cut: Cut | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape if cut is None else (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _whole(local: Tensor, cut: Cut | None, group: Group) -> Tensor:
    """A parameter from the parts of all ranks, on rank 0."""
    if cut is None:
        return local.detach().cpu()
    result = torch.empty(_whole_shape(local, cut), dtype=local.dtype)
    for rank in range(group.size):
        part = local.detach().cpu()
        if rank:
            shape = (*local.shape[: cut.dim], cut.length(rank, group.size), *local.shape[cut.dim + 1 :])
            part = torch.empty(shape, dtype=local.dtype)
            dist.recv(_bytes(part), rank, group=groups.process_group(group))
        offline.put(result, part, cut.dim, cut.ranges(rank, group.size))
    return result
