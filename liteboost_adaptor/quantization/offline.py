"""A folder with a checkpoint, quantized into another folder, file by file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import File
from ..checkpoint.folders import INDEX, SINGLE, config_of, copy_others, on_meta, write_json
from ..checkpoint.writing import Writer
from ..errors import CheckpointError, QuantizationError
from .calibration.calibrate import Calibration, Progress, blocks_of, calibrate
from .checkpoint.checksums import metadata, of_tensors, tensors_of
from .checkpoint.parameter_names import sources_of
from .config import LiteBoostConfig
from .schemes import QuantizedTensor
from .schemes.rounding import CHUNK
from .selection import targets_of, untie

#: What was done, in the folder that is written: begun before its first file, complete with its last.
RECORD = "quantization.json"


@dataclass(frozen=True)
class LayerError:
    """How far a layer's weight is from what it was: the norm of the difference over the norm."""

    name: str
    scheme: str
    error: float


@dataclass(frozen=True)
class OfflineResult:
    """What `quantize_folder` has written.

    Attributes:
        errors: Of every quantized layer, the worst first.
        refused: (layer or norm, what is otherwise than asked for and why).
        bytes_before, bytes_after: Of all tensors.
    """

    errors: list[LayerError]
    refused: list[tuple[str, str]]
    bytes_before: int
    bytes_after: int


def quantize_folder(
    source: Path,
    target: Path,
    config: LiteBoostConfig,
    progress: Progress = lambda *_: None,
    trust_remote_code: bool = False,
) -> OfflineResult:
    """Quantize the model in ``source`` into ``target``; again after an interruption, it goes on where it was.

    The tensors are those that `from_pretrained` with the same configuration and `save_pretrained` would
    write, in files as ``source`` has them. A file appears when it is whole, ``config.json`` last.

    Args:
        trust_remote_code: Whether Python code in ``source`` may run.

    Raises:
        QuantizationError: ``source`` has no safetensors, is quantized, or names its tensors otherwise than
            its model does; or ``target`` holds something else.
    """
    return _FolderQuantizer(source, target, config, progress, trust_remote_code).run()


class _FolderQuantizer:
    """Quantizes the files of ``source``, one after the other."""

    def __init__(
        self, source: Path, target: Path, config: LiteBoostConfig, progress: Progress, trust_remote_code: bool
    ) -> None:
        self.source, self.target, self.config, self.progress = source, target, config, progress
        self.files = _files(source)
        if getattr(config_of(source, trust_remote_code), "quantization_config", None) is not None:
            raise QuantizationError(f"{source} is quantized already; quantize the checkpoint it was made of")
        self.model = on_meta(source, trust_remote_code)
        self.targets = list(targets_of(self.model, config))
        self.calibration = self._calibrate(trust_remote_code) if config.calibrate else Calibration()
        self.tensors = tensors_of([str(source / file) for file in self.files])
        self.parameters = sources_of(self.model, self.tensors)
        #: What is quantized, by the names of the model's parameters, and of those that they are tied to.
        self.chosen = {target.parameter: target for target in self.targets if target.scheme is not None}
        self.heads = {target.tied: target for target in self.chosen.values() if target.tied}
        if config.scheme:
            self._check_names()

    def run(self) -> OfflineResult:
        """Write what is not written yet."""
        record = self._begin()
        entries = record["files"]
        total, at = sum(len(names) for names in self.files.values()), 0
        for file, names in self.files.items():
            path = self.target / file
            if not (file in entries and path.is_file() and _digest(path) == entries[file]["sha256"]):
                tensors, entry = self._quantize(names, (at, total))
                _write(path, tensors, self.config)
                entries[file] = {**entry, "sha256": _digest(path), "tensors": sorted(tensors)}
                write_json(self.target / RECORD, record)
            at += len(names)
            self.progress(file, at, total)
        errors = [LayerError(**error) for entry in entries.values() for error in entry["errors"]]
        written = (File(self.target / file) for file in entries)
        size = sum(tensor.nbytes for file in written for tensor in file.entries.values())
        self._finish(entries, size)
        return OfflineResult(
            sorted(errors, key=lambda each: -each.error),
            [(each.name, f"stays as it is: {each.reason}") for each in self.targets if each.reason]
            + self.calibration.refused,
            sum(entry["bytes_before"] for entry in entries.values()),
            size,
        )

    def _calibrate(self, trust_remote_code: bool) -> Calibration:
        whole = (
            type(self.model)
            .from_pretrained(self.source, dtype="auto", trust_remote_code=trust_remote_code)
            .eval()
        )
        blocks = blocks_of(whole, self.config.calibrate, trust_remote_code)
        targets = list(targets_of(whole, self.config))
        return calibrate(whole, blocks, self.config.method, targets, self.progress)

    def _check_names(self) -> None:
        names = [target.tied or name for name, target in self.chosen.items()]
        missing = [name for name in names if name not in self.parameters]
        if missing or not names:
            what = f"has no tensor {missing[0]}" if missing else "has no layer for this scheme"
            raise QuantizationError(
                f"the checkpoint in {self.source} {what}: its names are not those of the model. Load it with "
                "from_pretrained(..., quantization_config=...), which renames, and save_pretrained it"
            )

    def _begin(self) -> dict[str, Any]:
        """The record of what is done already, or a new one."""
        sizes = {file: (self.source / file).stat().st_size for file in self.files}
        begun = {"source": sizes, "config": self.config.to_dict()}
        if self.config.calibrate:
            text = _digest(Path(self.config.calibrate))
            begun["calibration"] = {"method": self.config.method, "text": text}
        path = self.target / RECORD
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            if {key: record.get(key) for key in begun} != begun:
                raise QuantizationError(
                    f"{self.target} was begun with another checkpoint or configuration; name another folder"
                )
            return record
        if self.target.exists() and any(self.target.iterdir()):
            raise QuantizationError(
                f"{self.target} is not empty, and nothing says what it holds; name another folder"
            )
        self.target.mkdir(parents=True, exist_ok=True)
        record = {**begun, "files": {}}
        write_json(path, record)
        return record

    def _quantize(self, names: list[str], done: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of one file as they are written, and what the record says of them.

        What is made of several tensors is written in the file of the first.
        """
        written: dict[str, Tensor] = {}
        errors, before = [], 0
        tied = {target.parameter for target in self.heads.values()}
        becomes = {name: each for each, source in self.parameters.items() for name, _ in source.tensors}
        for count, name in enumerate(sorted(names)):
            self.progress(name, done[0] + count, done[1])
            before += self.tensors[name].file.entries[name].nbytes
            parameter = becomes[name]
            if parameter in tied:  # also in the file under its own name; its source is what counts
                continue
            if parameter not in self.chosen:
                written[name] = self.calibration.parameters.get(parameter, self.tensors[name][...])
            targets = [each[parameter] for each in (self.chosen, self.heads) if parameter in each]
            if not targets or name != self.parameters[parameter].first:
                continue
            weight = self._read(name, parameter)
            for target in targets:
                quantized = self.calibration.quantize(target, weight)
                written |= {f"{target.name}.{part}": each for part, each in quantized.tensors().items()}
                exact = target.matrix(self.calibration.scaled(target.name, weight))
                error = _relative_error(exact, quantized)
                errors.append({"name": target.name, "scheme": target.scheme.name, "error": error})
        return written, {"errors": errors, "bytes_before": before}

    def _read(self, name: str, parameter: str) -> Tensor:
        """The parameter in floating point, whose first tensor is ``name``."""
        weight = self.parameters[parameter].read(self.tensors, self.model)
        wanted = self.model.get_parameter(parameter).shape
        if weight.shape != wanted:
            raise QuantizationError(
                f"{name} in {self.tensors[name].file.path} makes a weight {list(weight.shape)}, and the "
                f"model of config.json has {list(wanted)}; copy the checkpoint again"
            )
        return weight

    def _finish(self, entries: dict[str, Any], size: int) -> None:
        """Write what belongs to the tensors: the index and, last, ``config.json``."""
        copy_others(self.source, self.target, ["config.json"])
        if list(entries) != [SINGLE]:
            files = {name: file for file, entry in entries.items() for name in entry["tensors"]}
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
            write_json(self.target / INDEX, index)
        for target in self.chosen.values():
            untie(self.model, target)
        written = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
        written["quantization_config"] = self.config.to_dict()
        if self.heads:
            for part in (written, written.get("text_config", {})):
                if part.get("tie_word_embeddings") or part is written:
                    part["tie_word_embeddings"] = False
        write_json(self.target / "config.json", written)


def _files(source: Path) -> dict[str, list[str]]:
    """The tensors in each file of a checkpoint."""
    index = source / INDEX
    if index.is_file():
        found: dict[str, list[str]] = {}
        for name, file in _weight_map(index).items():
            found.setdefault(file, []).append(name)
        missing = [file for file in found if not (source / file).is_file()]
        if missing:
            raise QuantizationError(f"{index} names {missing[0]}, which is not there; complete it")
        return found
    if not (source / SINGLE).is_file():
        raise QuantizationError(f"{source} has neither {SINGLE} nor {INDEX}; save it as safetensors first")
    return {SINGLE: sorted(File(source / SINGLE).entries)}


def _weight_map(index: Path) -> dict[str, str]:
    """In which file each tensor is."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(file, str) for file in found.values()):
            return found
        reason = "it names files that are no names"
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        reason = f"{type(fault).__name__}: {fault}"
    raise CheckpointError(f"{index} cannot be read ({reason}); copy it again")


def _relative_error(weight: Tensor, quantized: QuantizedTensor) -> float:
    """Over parts of the rows: of all experts in fp32 there would be little room."""
    step = max(1, CHUNK // max(1, weight.shape[1]))
    norm = error = 0.0
    for first in range(0, len(weight), step):
        exact = weight[first : first + step].float()
        norm += exact.square().sum(dtype=torch.float64).item()
        exact -= quantized.rows(first, first + step).dequantize()
        error += exact.square().sum(dtype=torch.float64).item()
    return (error / norm) ** 0.5 if norm else 0.0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], config: LiteBoostConfig) -> None:
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = Writer(path, entries, {"format": "pt", **metadata(of_tensors(tensors), config.to_dict())})
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.close()
