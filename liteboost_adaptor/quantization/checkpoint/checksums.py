"""Checksums of what is written, so that a byte that has changed since is noticed when it is read.

Of the tensors of safetensors files and of the ``quantization_config`` beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.files import File, Slice, memory
from ...errors import CheckpointError

#: What the metadata of a file of ours says of its tensors: JSON, name -> SHA-256.
DIGESTS = "liteboost_sha256"
#: And of its ``quantization_config``, by which its integers are read: SHA-256.
CONFIG = "liteboost_config_sha256"
#: As long as a checksum.
BLANK = "0" * 64


def metadata(tensors: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """What a file says.

    Args:
        tensors: SHA-256 by name.
        config: Its ``quantization_config``.
    """
    return {DIGESTS: json.dumps(dict(tensors)), CONFIG: of_config(config)}


def of_config(config: Mapping[str, Any]) -> str:
    """SHA-256 of a ``quantization_config``, however its keys are ordered."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor, as a file holds them."""
    return {name: of_tensor(tensor) for name, tensor in sorted(tensors.items())}


def of_model(model: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """The same for what `save_pretrained` writes of ``state``, by the names of the files.

    Left out is what it converts beyond its name, and what is not in memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    proxies = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    tensors = {id(proxy): state[name] for name, proxy in proxies.items()}
    renamed = revert_weight_conversion(model, proxies)
    written = {name: tensors[id(proxy)] for name, proxy in renamed.items() if id(proxy) in tensors}
    return of_tensors({name: tensor for name, tensor in written.items() if tensor.device.type != "meta"})


def of_tensor(tensor: Tensor) -> str:
    """SHA-256 of its bytes, in hexadecimal digits."""
    return hashlib.sha256(memory(tensor.detach().cpu().contiguous())).hexdigest()


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
    present = {known[name][0] for name in found if name in known}
    for name, (digest, file) in known.items():
        if name not in found and digest not in present:
            raise CheckpointError(
                f"{file.path} was written with {name}, which is in none of the files now; copy them again"
            )
    return found


def why_unverified(files: Iterable[str], config: Mapping[str, Any]) -> str:
    """Why nobody knows that ``files`` of ours hold what was written with ``config``, or an empty string."""
    for path in files:
        metadata = File(path).metadata
        if DIGESTS not in metadata:
            return (
                f"{path} has no checksums ({DIGESTS} in its metadata), which every file of ours is written "
                "with: another program has written it since, and its integers may be others. Copy it again "
                "from where it was quantized, or quantize the model again; to load it all the same, write "
                '"checksums": false into quantization_config in config.json'
            )
        if CONFIG in metadata and metadata[CONFIG] != of_config(config):
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
