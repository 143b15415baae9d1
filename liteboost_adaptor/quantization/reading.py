"""Where `from_pretrained` reads the files of a quantised model: tensor by tensor, none of them mapped.

transformers is handed objects that read, or make, a tensor when they are asked for it. So a weight is in
memory as it was stored only while it is converted, and a file that is cut short or changed is found out.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoint.files import File, Slice
from ..errors import CheckpointError
from . import loaded
from .config import LiteBoostConfig
from .digests import CONFIG, DIGESTS, of_config
from .quantizer import LiteBoostQuantizer

_MODELING = "transformers.modeling_utils"
_ARGUMENTS = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]


def install(hooks: Any) -> None:
    """Read the files of models that are quantised by us, whoever asks for them."""
    load = getattr(sys.modules[_MODELING].PreTrainedModel, "_load_pretrained_model", None)
    if load is not None and list(inspect.signature(load).parameters) == _ARGUMENTS:
        hooks.set_attribute(_MODELING, "PreTrainedModel._load_pretrained_model", _reading)


def _reading(original: Any) -> Any:
    load = getattr(original, "__func__", original)

    @functools.wraps(load)
    def _load_pretrained_model(
        model: torch.nn.Module,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        expected_keys: Any = None,
    ) -> Any:
        arguments = checkpoint_files, load_config, expected_keys
        quantizer = load_config.hf_quantizer
        is_read = state_dict is None and is_safetensors(checkpoint_files)
        if not is_read or not (quantizer is None or isinstance(quantizer, LiteBoostQuantizer)):
            return load(model, state_dict, *arguments)
        if quantizer is None:
            done = load(model, state_dict, *arguments)
            loaded.check_unread(model, done[0], checkpoint_files)
            return done
        tensors = quantizer.tensors(tensors_of(checkpoint_files))
        quantizer.files = [str(file) for file in checkpoint_files]
        if not quantizer.pre_quantized:
            return load(model, tensors, *arguments)
        loaded.check_integers(model, tensors, load_config.weight_mapping)
        done = load(model, tensors, *arguments)
        loaded.check(model, done[0], checkpoint_files)
        config = quantizer.quantization_config
        if quantizer.has_checksums and config.checksums and config.scheme is not None:  # it has integers
            quantizer.unverified = why_unverified(checkpoint_files, config)
        return done

    return staticmethod(_load_pretrained_model)


def is_safetensors(files: Any) -> bool:
    """Whether these are files that `tensors_of` reads."""
    return bool(files) and all(str(file).endswith(".safetensors") for file in files)


def tensors_of(files: list[str]) -> dict[str, Slice]:
    """All tensors of ``files``, unread; those we wrote are compared with their checksums when they are.

    Raises:
        CheckpointError: A file is no safetensors file, is cut short, or lacks a tensor that it was written
            with.
    """
    found: dict[str, Slice] = {}
    known: dict[str, tuple[str, File]] = {}
    for path in files:
        file = File(path)
        digests = _digests_of(file)
        known |= {name: (digest, file) for name, digest in digests.items()}
        found.update((name, Slice(file, name, digest=digests.get(name, ""))) for name in file.entries)
    # A tensor that is tied to another one has a checksum of its own, and is in no file.
    stored = {known[name][0] for name in found if name in known}
    for name, (digest, file) in known.items():
        if name not in found and digest not in stored:
            raise CheckpointError(
                f"{file.path} was written with {name}, which is in none of the files now; copy them again"
            )
    return found


def why_unverified(files: Iterable[str], config: LiteBoostConfig) -> str:
    """Why nobody knows that ``files`` of ours hold what was written with ``config``, or an empty string."""
    for path in files:
        metadata = File(path).metadata
        if DIGESTS not in metadata:
            return (
                f"{path} has no checksums ({DIGESTS} in its metadata), which every file of ours is written "
                "with: another program has written it since, and its integers may be others. Copy it again "
                "from where it was quantised, or quantise the model again; to load it all the same, write "
                '"checksums": false into quantization_config in config.json'
            )
        if metadata.get(CONFIG, said := of_config(config.to_dict())) != said:
            return (
                f"quantization_config in config.json beside {path} is not the one that its integers were "
                "written with; copy config.json again"
            )
    return ""


def _digests_of(file: File) -> Mapping[str, str]:
    text = file.metadata.get(DIGESTS, "{}")
    try:
        digests = json.loads(text)
    except ValueError as fault:
        raise CheckpointError(
            f"the checksums in {file.path} cannot be read ({fault}); copy it again"
        ) from fault
    if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
        raise CheckpointError(f"the checksums in {file.path} are none: {text[:60]!r}; copy it again")
    return digests
