"""From a model to a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, native
from ..checkpoint.folders import malformed, why_unreadable
from ..errors import ExportError, LiteBoostError
from ..huggingface.steps import generates
from . import generation, lengths, manifest
from .constants import Constants
from .recorded import Recorded, State
from .recording import record

#: Files of a model's folder that are copied: the tokenizer's, and what says what the model is.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("config.json", "generation_config.json"),
)
#: Tokens that a cache holds where nobody says how many, if the model goes so far.
LONGEST = 4096
#: Bytes of a file that are in memory while it is read.
_PIECE = 1 << 20
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        programs: (for prompts, for steps).
        longest: Tokens that a cache of it holds.
        bytes: Of all files.
    """

    programs: tuple[int, int]
    longest: int
    bytes: int


def export_folder(
    source: Path,
    target: Path,
    quant: str | None = None,
    longest: int | None = None,
    dtype: str = "auto",
    progress: Progress = lambda _: None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the model in the folder ``source`` to the folder ``target``, which must be new or empty.

    Args:
        quant: What its weights and cache are quantized to as it is loaded, as in ``LITEBOOST_QUANT``.
        longest: Tokens that a cache holds: the prompt's and those behind it.
        dtype: Of its weights, as `from_pretrained` takes it.
        trust_remote_code: Whether Python code in ``source`` may run.

    Raises:
        ExportError: The model cannot be exported; says why.
        QuantizationError: It cannot be quantized so.
    """
    import transformers
    from safetensors import SafetensorError

    from ..quantization.config import LiteBoostConfig

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} is not empty; name a new folder, or empty it")
    options: dict[str, Any] = {"quantization_config": LiteBoostConfig(quant)} if quant else {}
    progress("loading the model")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    except (*malformed(), SafetensorError) as fault:
        if isinstance(fault, LiteBoostError):
            raise
        raise ExportError(why_unreadable(source, fault, trust_remote_code)) from fault
    return export_model(model, source, target, longest, progress)


def export_model(
    model: torch.nn.Module,
    source: Path | None,
    target: Path,
    longest: int | None = None,
    progress: Progress = lambda _: None,
) -> Exported:
    """The same for a ``model`` in memory; tokenizer and configuration are those in ``source``."""
    try:
        longest = _longest(model, longest)
        _check(model)
        made = _recorded(model, longest, progress)
    except ExportError as fault:
        raise ExportError(f"{type(model).__name__} cannot be exported: {fault}") from fault
    progress("writing the folder")
    target.mkdir(parents=True, exist_ok=True)
    made.constants.write(target / manifest.WEIGHTS)
    for name, lines in {**made.programs, manifest.FILE: manifest.as_text(made.manifest)}.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(lines, encoding="utf-8")
    for name in _COPIED if source is not None else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    size = _write_checksums(target)
    return Exported((len(made.tables.prompts.programs), len(made.tables.steps.programs)), longest, size)


@dataclass(frozen=True)
class _Made:
    """All that is written."""

    tables: lengths.Tables
    constants: Constants
    manifest: dict[str, Any]
    programs: dict[str, str]


def _recorded(model: Any, longest: int, progress: Progress) -> _Made:
    settings = generation.settings(model.generation_config)

    def recorded(seen: int, count: int) -> tuple[Recorded, State]:
        progress(f"recording one token behind {seen}" if seen else f"recording a prompt of {count}")
        return record(model, seen, count)

    made = lengths.tables(recorded, longest)
    constants = Constants(model)
    names = {
        id(program): [constants.name(tensor) for tensor in program.constants]
        for program in (*made.prompts.programs, *made.steps.programs)
    }
    about = {
        "made_by": f"liteboost_adaptor {__version__}",
        "torch": torch.__version__,
        "schemas": native.load().build_info.get("schemas", ""),
        "model": type(model).__name__,
        "vocabulary": model.config.get_text_config(decoder=True).vocab_size,
    }
    return _Made(made, constants, *manifest.manifest(made, names, constants.orders, about, settings))


def _check(model: Any) -> None:
    """See that forward can be recorded at all."""
    from ..huggingface.runtime import runtime

    if not generates(type(model)):
        raise ExportError("it has no `generate`")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ExportError("it has an encoder, and a folder takes the tokens of a decoder alone")
    if next(model.parameters()).device.type != "cpu":
        raise ExportError(f"it lies on {next(model.parameters()).device}; move it to the CPU")
    runtime.prepare(model)
    status = native.load()
    if not status.loaded:
        raise ExportError(f"there are no kernels: {status.reason}; {native.BUILD_COMMAND}")
    settings = runtime.settings_of(model)
    if settings is None or settings.level < 2:
        raise ExportError(
            "it is not served at level 2, at which steps are recorded; leave LITEBOOST_LEVEL out"
        )


def _longest(model: Any, asked: int | None) -> int:
    """How many tokens a cache holds."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or LONGEST
    if asked is None:
        return min(most, LONGEST)
    if not 2 <= asked <= most:
        raise ExportError(f"--max-tokens must be from 2 to {most}, the positions of the model, got {asked}")
    return asked


def _write_checksums(folder: Path) -> int:
    """`sha256sum -c` reads it, and so does a runner; it is written last. Gives the bytes of all files."""
    lines, size = [], 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        size += path.stat().st_size
        lines.append(f"{digest.hexdigest()}  {path.relative_to(folder).as_posix()}\n")
    part = folder / f".{manifest.CHECKSUMS}.part"
    part.write_text("".join(lines), encoding="utf-8")
    os.replace(part, folder / manifest.CHECKSUMS)
    return size
