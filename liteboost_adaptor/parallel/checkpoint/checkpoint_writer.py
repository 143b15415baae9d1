"""Writes a checkpoint tensor by tensor to a temporary folder, which is renamed when it is complete."""

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

from torch import Tensor

from ...checkpoint.writing import Writer
from ...quantization.checkpoint import checksums


class CheckpointWriter:
    """A checkpoint as ``save_pretrained`` writes it; nothing is left behind without `close`.

    Args:
        meta: All tensors, on the meta device, by their names in the model.
        has_checksums: Whether files have checksums.
        kwargs: Of ``save_pretrained``.
    """

    def __init__(
        self, model: Any, target: Path, meta: dict[str, Tensor], has_checksums: bool, kwargs: dict[str, Any]
    ) -> None:
        self._model, self._target, self._kwargs = model, target, kwargs
        variant = kwargs.get("variant")
        self._name = f"model.{variant}.safetensors" if variant else "model.safetensors"
        self._files: dict[str, Writer] = {}
        target.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            self._begin(meta, has_checksums)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def _begin(self, meta: dict[str, Tensor], has_checksums: bool) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        # Configuration, generation settings and the code of a remote model are transformers' to write.
        with _no_quantizer(self._model):
            type(self._model).save_pretrained(self._model, self._folder, **{**self._kwargs, "state_dict": {}})
        result = self._reverted(meta)
        pattern = self._name.replace(".safetensors", "{suffix}.safetensors")
        size = self._kwargs.get("max_shard_size", "50GB")
        division = split_torch_state_dict_into_shards(result, filename_pattern=pattern, max_shard_size=size)
        # Checksums are known when everything is written; until then as many zeros stand for each.
        own = {id(tensor) for tensor in meta.values()}
        named = [name for name, tensor in result.items() if id(tensor) in own] if has_checksums else []
        self._checksums = dict.fromkeys(sorted(named), checksums.BLANK)
        for file, names in division.filename_to_tensors.items():
            entries = {name: (result[name].dtype, tuple(result[name].shape)) for name in names}
            self._files[file] = Writer(self._folder / file, entries, self._metadata())
        self._file_of = {name: file for file, names in division.filename_to_tensors.items() for name in names}
        if division.is_sharded:
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            count = sum(value.numel() for name, value in meta.items() if name in parameters)
            index = {
                "metadata": {"total_parameters": count, **division.metadata},
                "weight_map": division.tensor_to_filename,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / f"{self._name}.index.json").write_text(text, encoding="utf-8")

    def put(self, whole: dict[str, Tensor]) -> None:
        """Write tensors of the model; those that are converted to one tensor come together."""
        for name, tensor in self._reverted(whole).items():
            self._files[self._file_of[name]].put(name, tensor)
            if name in self._checksums:
                self._checksums[name] = checksums.of_tensor(tensor)

    def close(self) -> None:
        """Give the files their names."""
        for file in self._files.values():
            if self._checksums:
                file.say(self._metadata())
            file.close()
        _put_in_place(self._folder, self._target, self._name)

    def _metadata(self) -> dict[str, str]:
        """Of a file."""
        if not self._checksums:
            return {"format": "pt"}
        return {
            **checksums.metadata(self._checksums, self._model.config.quantization_config.to_dict()),
            "format": "pt",
        }

    def _discard(self) -> None:
        try:
            for file in self._files.values():
                file.discard()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _reverted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors as the checkpoint has them."""
        if not self._kwargs.get("save_original_format", True):
            return state
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, state)


@contextlib.contextmanager
def _no_quantizer(model: Any) -> Iterator[None]:
    """Within the context, transformers does not write this rank's quantized weights."""
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
