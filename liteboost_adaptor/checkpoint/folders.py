"""Folders with a checkpoint: what its files are called, what else is in it, and the model it is of."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

#: A checkpoint of one file, and what says in which file a tensor is where there are several.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


def copy_others(source: Path, target: Path, but: Iterable[str] = ()) -> None:
    """Copy the files beside the weights, such as the tokenizer's; those named ``but`` are left out."""
    left = set(but)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in left:
            shutil.copyfile(path, target / path.name)


def write_json(path: Path, value: Any) -> None:
    """Write ``value``; the file appears, or changes, when it is whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def config_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """The configuration of the model in ``folder``.

    Args:
        trust_remote_code: Whether Python code of the folder may run. Nobody is asked.

    Raises:
        CheckpointError: It cannot be read, or not without code of its own.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except malformed() as fault:
        raise CheckpointError(why_unreadable(folder, fault, trust_remote_code)) from fault


def on_meta(folder: Path, trust_remote_code: bool = False) -> Any:
    """The model that the configuration in ``folder`` names, on the meta device.

    Args:
        trust_remote_code: Whether Python code of the folder may run. Nobody is asked.

    Raises:
        CheckpointError: The configuration cannot be read, or names code of the folder's own that may not run.
    """
    import transformers

    config = config_of(folder, trust_remote_code)
    named = config.architectures
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    cls = getattr(transformers, name, None) if name else None
    try:
        with torch.device("meta"):
            if cls is not None:
                model = cls(config)
            else:
                auto = transformers.AutoModelForCausalLM
                model = auto.from_config(config, trust_remote_code=trust_remote_code)
    except malformed() as fault:
        raise CheckpointError(why_unreadable(folder, fault, trust_remote_code)) from fault
    model.tie_weights()
    return model


def why_unreadable(where: object, fault: Exception, trust_remote_code: bool) -> str:
    """What to say where a configuration cannot be read."""
    if not trust_remote_code and "trust_remote_code" in str(fault):
        return (
            f"{where} has Python code of its own for this model, which is not run unasked: read it, and give "
            "--trust-remote-code"
        )
    said = str(fault).splitlines() or [type(fault).__name__]
    return f"{where} cannot be read: {said[0]}"


def malformed() -> tuple[type[Exception], ...]:
    """What transformers raises of a configuration that is none."""
    from huggingface_hub import errors

    checked = getattr(errors, "StrictDataclassError", None)
    known = (OSError, ValueError, TypeError, KeyError, AttributeError)
    return (*known, checked) if checked else known
