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


def config_of(folder: Path) -> Any:
    """The configuration of the model in ``folder``.

    Raises:
        CheckpointError: It cannot be read.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{folder} cannot be read: {str(fault).splitlines()[0]}") from fault


def on_meta(folder: Path) -> Any:
    """The model that the configuration in ``folder`` names, on the meta device.

    Raises:
        CheckpointError: The configuration cannot be read.
    """
    import transformers

    config = config_of(folder)
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        model = cls(config) if cls else transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model
