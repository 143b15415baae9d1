"""``save_pretrained`` of a divided model: rank 0 puts the whole checkpoint together, tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.writing import Writer
from ..errors import ParallelError
from ..quantization import digests
from ..quantization.weights import QuantizedWeight
from . import groups, quantized
from .groups import Group
from .mesh import Mesh
from .plan import Plan
from .shares import Share

#: Of integers.
_BUFFERS = ("weight", "scales", "zero_points", "columns")
_REFUSED = ("state_dict", "push_to_hub", "distributed_checkpoint")


def save(model: Any, plan: Plan, mesh: Mesh, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
    """What ``save_pretrained`` of the undivided model would write. Every rank calls it; rank 0 writes.

    Ranks whose parts the first ones have as well only wait.

    The files get their names when all of them are written. One tensor, or those that are one in the
    checkpoint, is in memory at a time.

    Raises:
        ParallelError: An argument that needs the whole model in one process; a rank that fails.
    """
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
    tensors = Tensors(model, plan, group)
    steps = _agreed(_steps(model, tensors) if group.rank == 0 else [], group)
    if group.rank:
        return _send(tensors, group, steps)
    try:
        _write(model, tensors, steps, Path(save_directory), kwargs)
    except BaseException as fault:
        groups.gathered(group, f"{type(fault).__name__}: {fault}")
        raise
    groups.gathered(group, "")
    return None


def _send(tensors: Tensors, group: Group, steps: list[list[str]]) -> None:
    """Send rank 0 the parts of this rank. Before each step, and at the end, it says whether it goes on."""
    for names in [*steps, []]:
        failed = groups.gathered(group, "")[0]
        if failed:
            raise ParallelError(f"rank 0 could not save the model, and the others end with it. {failed}")
        for name in names:
            if name in tensors.shares:
                dist.send(_bytes(tensors.local(name)), 0, group=groups.process_group(group))


def _agreed(steps: list[list[str]], group: Group) -> list[list[str]]:
    """What rank 0 does, on every rank."""
    said = groups.gathered(group, ("save_pretrained", steps))
    if any(type(each) is not tuple or each[0] != "save_pretrained" for each in said):
        raise ParallelError(
            "save_pretrained of a divided model is called on every rank, and a rank did something else"
        )
    return said[0][1]


def _steps(model: Any, tensors: Tensors) -> list[list[str]]:
    """The parameters by what becomes of them in the checkpoint: those that are put together are together."""
    from transformers.core_model_loading import WeightConverter, apply_converters
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: value for name, value in tensors.plain.items() if name not in ignored}
    reverse = [each.reverse_transform() for each in reversed(_conversions(model))]
    converters = [each for each in reverse if isinstance(each, WeightConverter)]
    found: dict[str, list[str]] = {}
    kept = remove_tied_weights_from_state_dict(dict(state), model)
    for name in tensors.names:
        if name in kept or name not in tensors.plain:
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
    model: Any, tensors: Tensors, steps: list[list[str]], target: Path, kwargs: dict[str, Any]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # Configuration, generation settings and the code of a remote model are transformers' to write.
        with _no_quantizer(model):
            type(model).save_pretrained(model, folder, **{**kwargs, "state_dict": {}})
        variant = kwargs.get("variant")
        name = f"model.{variant}.safetensors" if variant else "model.safetensors"
        _write_weights(model, tensors, steps, folder / name, kwargs)
        _put_in_place(folder, target, name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _no_quantizer(model: Any) -> Iterator[None]:
    """While it lasts, nobody puts this rank's integers among what is written."""
    quantizer = vars(model).pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer


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
    model: Any, tensors: Tensors, steps: list[list[str]], path: Path, kwargs: dict[str, Any]
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    meta = {name: tensors.on_meta(name) for names in steps for name in names}
    result = _reverted(model, meta, kwargs)
    pattern = path.name.replace(".safetensors", "{suffix}.safetensors")
    size = kwargs.get("max_shard_size", "50GB")
    division = split_torch_state_dict_into_shards(result, filename_pattern=pattern, max_shard_size=size)
    # Checksums are known when everything is written; until then as many zeros stand for each.
    own = {id(tensor) for tensor in meta.values()}
    named = [name for name, tensor in result.items() if id(tensor) in own] if tensors.has_checksums else []
    found = dict.fromkeys(sorted(named), digests.BLANK)
    files = {
        file: Writer(
            path.with_name(file),
            {name: (result[name].dtype, tuple(result[name].shape)) for name in names},
            _metadata(found),
        )
        for file, names in division.filename_to_tensors.items()
    }
    file_of = {name: file for file, names in division.filename_to_tensors.items() for name in names}
    for names in steps:
        groups.gathered(tensors.group, "")
        whole = {name: tensors.whole(name) for name in names}
        for name, tensor in _reverted(model, whole, kwargs).items():
            files[file_of[name]].put(name, tensor)
            if name in found:
                found[name] = digests.of_tensor(tensor)
        del whole
    for file in files.values():
        if found:
            file.say(_metadata(found))
        file.close()
    if division.is_sharded:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        count = sum(value.numel() for name, value in meta.items() if name in parameters)
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


def _metadata(checksums: dict[str, str]) -> dict[str, str]:
    """Of a file."""
    said = {digests.DIGESTS: json.dumps(checksums)} if checksums else {}
    return {**said, "format": "pt"}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class Tensors:
    """What is saved of a divided model, as this rank holds it and as the ranks hold it together.

    Attributes:
        names: Of all tensors, in the order of the model.
        plain: Those that are saved as they are kept; integers are laid out in turn.
        shares: How those that are divided are.
        has_checksums: Whether files say what is in them.
    """

    def __init__(self, model: Any, plan: Plan, group: Group) -> None:
        self.group = group
        self.shares = {name: Share.of(cut, plan.world_size) for name, cut in plan.cuts.items()}
        self.shares |= quantized.shares_of(model)
        self._integers: dict[str, tuple[QuantizedWeight, str]] = {}
        self.has_checksums = bool(quantized.modules_of(model))
        if not self.has_checksums:
            self.plain: dict[str, Tensor] = model.state_dict()
            self.names = list(self.plain)
            return
        self.plain, self.names = {}, []
        for name, module in model.named_modules(remove_duplicate=False):
            self._add(f"{name}." if name else "", module)

    def _add(self, prefix: str, module: Any) -> None:
        """As `state_dict` does, which would lay all integers out at once."""
        found: dict[str, Tensor] = {}
        if not isinstance(module, QuantizedWeight):
            module._save_to_state_dict(found, prefix, False)
        else:
            bias = module._parameters.get("bias")
            found.update({f"{prefix}bias": bias.detach()} if bias is not None else {})
            kept = [part for part in _BUFFERS if getattr(module, part) is not None]
            self._integers |= {f"{prefix}{part}": (module, part) for part in kept}
            self.names += [f"{prefix}{part}" for part in kept]
        self.plain |= found
        self.names += list(found)

    def local(self, name: str) -> Tensor:
        """What this rank holds."""
        if name in self.plain:
            return self.plain[name]
        module, part = self._integers[name]
        return module.columns if part == "columns" else module.saved().tensors()[part]

    def on_meta(self, name: str) -> Tensor:
        """The whole tensor, without its values."""
        if name in self.plain:
            shape, dtype = tuple(self.plain[name].shape), self.plain[name].dtype
        else:
            module, part = self._integers[name]
            shape, dtype = module.scheme.shapes(module.out_features, module.in_features)[part]
        share = self.shares.get(name)
        return torch.empty(share.whole_shape(shape) if share else shape, dtype=dtype, device="meta")

    def whole(self, name: str) -> Tensor:
        """The whole tensor, on rank 0."""
        local, share = self.local(name).detach().cpu(), self.shares.get(name)
        return local if share is None else share.joined(local, self._parts(local, share))

    def _parts(self, local: Tensor, share: Share) -> Iterator[Tensor]:
        yield local
        for rank in range(1, self.group.size):
            part = torch.empty(share.shape(tuple(local.shape), rank), dtype=local.dtype)
            dist.recv(_bytes(part), rank, group=groups.process_group(self.group))
            yield part
