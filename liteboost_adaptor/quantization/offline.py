"""A folder with a checkpoint, quantised into another folder, file by file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import File, Slice
from ..checkpoint.folders import INDEX, SINGLE, config_of, copy_others, on_meta, write_json
from ..checkpoint.writing import Writer
from ..errors import CheckpointError, QuantizationError
from . import digests
from .calibration import Calibration, blocks_of, calibrate
from .choices import Choice, choices, untie
from .config import LiteBoostConfig
from .origins import Origin, origins_of
from .reading import tensors_of
from .rounding import CHUNK, Quantized

#: What was done, in the folder that is written: begun before its first file, complete with its last.
RECORD = "quantization.json"

#: (what is at work, tensors done, of so many)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LayerError:
    """How far a layer's weight is from what it was: the norm of the difference over the norm."""

    name: str
    scheme: str
    error: float


@dataclass(frozen=True)
class Done:
    """What `quantize_folder` has written.

    Attributes:
        errors: Of every quantised layer, the worst first.
        kept: (layer or norm, what is otherwise than asked for and why).
        bytes_before, bytes_after: Of all tensors.
    """

    errors: list[LayerError]
    kept: list[tuple[str, str]]
    bytes_before: int
    bytes_after: int


def quantize_folder(
    source: Path,
    target: Path,
    config: LiteBoostConfig,
    progress: Progress = lambda *_: None,
    trust_remote_code: bool = False,
) -> Done:
    """Quantise the model in ``source`` into ``target``; again after an interruption, it goes on where it was.

    The tensors are those that `from_pretrained` with the same configuration and `save_pretrained` would
    write, in files as ``source`` has them. A file appears when it is whole, ``config.json`` last.

    Args:
        trust_remote_code: Whether Python code in ``source`` may run.

    Raises:
        QuantizationError: ``source`` has no safetensors, is quantised, or names its tensors otherwise than
            its model does; or ``target`` holds something else.
    """
    files = _files(source)
    model = _unquantized_on_meta(source, trust_remote_code)
    made = list(choices(model, config))
    calibration = _calibrated(source, config, progress, trust_remote_code)
    wanted = {choice.parameter: choice for choice in made if choice.scheme is not None}
    heads = {choice.tied: choice for choice in wanted.values() if choice.tied}
    tensors = tensors_of([str(source / file) for file in files])
    origins = origins_of(model, tensors)
    if config.scheme:
        _check_names(origins, wanted, source)
    rounding = _Rounding(model, tensors, origins, wanted, heads, calibration, progress)
    record = _begin(source, target, config, files)
    total, at = sum(len(names) for names in files.values()), 0
    for file, names in files.items():
        if not _is_done(target, record, file):
            made_here, entry = rounding.file(names, (at, total))
            _write(target / file, made_here, config)
            record["files"][file] = {**entry, "sha256": _digest(target / file), "tensors": sorted(made_here)}
            write_json(target / RECORD, record)
        at += len(names)
        progress(file, at, total)
    return _finish(source, target, config, model, made, calibration, record)


def _calibrated(
    source: Path, config: LiteBoostConfig, progress: Progress, trust_remote_code: bool
) -> Calibration:
    """What the whole model has found in the text, if there is one."""
    if not config.calibrate:
        return Calibration()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", trust_remote_code=trust_remote_code
    ).eval()
    blocks = blocks_of(model, config.calibrate, trust_remote_code)
    return calibrate(model, blocks, config.method, list(choices(model, config)), progress)


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


def _unquantized_on_meta(source: Path, trust_remote_code: bool) -> torch.nn.Module:
    if getattr(config_of(source, trust_remote_code), "quantization_config", None) is not None:
        raise QuantizationError(f"{source} is quantised already; quantise the checkpoint it was made of")
    return on_meta(source, trust_remote_code)


def _check_names(origins: dict[str, Origin], wanted: dict[str, Choice], source: Path) -> None:
    missing = [choice.tied or name for name, choice in wanted.items() if (choice.tied or name) not in origins]
    if missing or not wanted:
        what = f"has no tensor {missing[0]}" if missing else "has no layer for this scheme"
        raise QuantizationError(
            f"the checkpoint in {source} {what}: its names are not those of the model. Load it with "
            "from_pretrained(..., quantization_config=...), which renames, and save_pretrained it"
        )


def _begin(
    source: Path, target: Path, config: LiteBoostConfig, files: dict[str, list[str]]
) -> dict[str, Any]:
    """The record of what is done already, or a new one."""
    sizes = {file: (source / file).stat().st_size for file in files}
    begun = {"source": sizes, "config": config.to_dict()}
    if config.calibrate:
        begun["calibration"] = {"method": config.method, "text": _digest(Path(config.calibrate))}
    path = target / RECORD
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        if {key: record.get(key) for key in begun} != begun:
            raise QuantizationError(
                f"{target} was begun with another checkpoint or configuration; name another folder"
            )
        return record
    if target.exists() and any(target.iterdir()):
        raise QuantizationError(f"{target} is not empty, and nothing says what it holds; name another folder")
    target.mkdir(parents=True, exist_ok=True)
    record = {**begun, "files": {}}
    write_json(path, record)
    return record


def _is_done(target: Path, record: dict[str, Any], file: str) -> bool:
    entry = record["files"].get(file)
    return entry is not None and (target / file).is_file() and _digest(target / file) == entry["sha256"]


@dataclass(frozen=True)
class _Rounding:
    """Rounds what files hold; ``wanted`` and ``heads`` are choices by the names of the model's parameters."""

    model: torch.nn.Module
    tensors: Mapping[str, Slice]
    origins: dict[str, Origin]
    wanted: dict[str, Choice]
    heads: dict[str, Choice]
    calibration: Calibration
    progress: Progress

    def file(self, names: list[str], done: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of one file as they are written, and what the record says of them.

        What is made of several tensors is written in the file of the first.
        """
        made: dict[str, Tensor] = {}
        errors, before = [], 0
        tied = {choice.parameter for choice in self.heads.values()}
        target_of = {name: target for target, origin in self.origins.items() for name, _ in origin.tensors}
        for count, name in enumerate(sorted(names)):
            self.progress(name, done[0] + count, done[1])
            before += self.tensors[name].file.entries[name].nbytes
            target = target_of[name]
            if target in tied:  # also stored under its own name; its source is what counts
                continue
            here = [choice for choice in (self.wanted.get(target), self.heads.get(target)) if choice]
            if target not in self.wanted:
                made[name] = self.calibration.parameters.get(target, self.tensors[name][...])
            if not here or name != self.origins[target].first:
                continue
            weight = self.origins[target].read(self.tensors, self.model)
            wanted = self.model.get_parameter(target).shape
            if weight.shape != wanted:
                raise QuantizationError(
                    f"{name} in {self.tensors[name].file.path} makes a weight {list(weight.shape)}, and the "
                    f"model of config.json has {list(wanted)}; copy the checkpoint again"
                )
            for choice in here:
                assert choice.scheme is not None
                rounded = self.calibration.quantize(choice, weight)
                made |= {f"{choice.name}.{part}": value for part, value in rounded.tensors().items()}
                exact = choice.matrix(self.calibration.scaled(choice.name, weight))
                errors.append(
                    {"name": choice.name, "scheme": choice.scheme.name, "error": _error(exact, rounded)}
                )
        return made, {"errors": errors, "bytes_before": before}


def _error(weight: Tensor, rounded: Quantized) -> float:
    """Over parts of the rows: of all experts in fp32 there would be little room."""
    step = max(1, CHUNK // max(1, weight.shape[1]))
    norm = error = 0.0
    for first in range(0, len(weight), step):
        exact = weight[first : first + step].float()
        norm += exact.square().sum(dtype=torch.float64).item()
        exact -= rounded.rows(first, first + step).dequantized()
        error += exact.square().sum(dtype=torch.float64).item()
    return (error / norm) ** 0.5 if norm else 0.0


def _finish(
    source: Path,
    target: Path,
    config: LiteBoostConfig,
    model: torch.nn.Module,
    made: list[Choice],
    calibration: Calibration,
    record: dict[str, Any],
) -> Done:
    entries = record["files"]
    copy_others(source, target, ["config.json"])
    if list(entries) != [SINGLE]:
        where = {name: file for file, entry in entries.items() for name in entry["tensors"]}
        size = {"total_size": _tensor_bytes(target, entries)}
        write_json(target / INDEX, {"metadata": size, "weight_map": dict(sorted(where.items()))})
    for choice in made:
        if choice.scheme is not None and choice.tied:
            untie(model, choice)
    written = json.loads((source / "config.json").read_text(encoding="utf-8"))
    written["quantization_config"] = config.to_dict()
    if not model.config.get_text_config().tie_word_embeddings:
        for part in (written, written.get("text_config", {})):
            if part.get("tie_word_embeddings") or part is written:
                part["tie_word_embeddings"] = False
    write_json(target / "config.json", written)
    errors = [LayerError(**error) for entry in entries.values() for error in entry["errors"]]
    return Done(
        sorted(errors, key=lambda each: -each.error),
        [(choice.name, f"stays as it is: {choice.reason}") for choice in made if choice.reason]
        + calibration.kept,
        sum(entry["bytes_before"] for entry in entries.values()),
        _tensor_bytes(target, entries),
    )


def _tensor_bytes(target: Path, files: dict[str, Any]) -> int:
    total = 0
    for name in files:
        with (target / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        total += max(ends, default=0)
    return total


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], config: LiteBoostConfig) -> None:
    metadata = {"format": "pt", **digests.metadata(digests.of_tensors(tensors), config.to_dict())}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    writer = Writer(path, entries, metadata)
    for name, tensor in tensors.items():
        writer.put(name, tensor)
    writer.close()
