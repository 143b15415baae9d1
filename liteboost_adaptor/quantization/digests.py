"""Checksums of what is written, so that a byte that has changed since is noticed when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.files import memory

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

    places = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    of = {id(place): name for name, place in places.items()}
    renamed = revert_weight_conversion(model, places)
    kept = {name: state[of[id(place)]] for name, place in renamed.items() if id(place) in of}
    return of_tensors({name: tensor for name, tensor in kept.items() if tensor.device.type != "meta"})


def of_tensor(tensor: Tensor) -> str:
    """SHA-256 of its bytes, in hexadecimal digits."""
    return hashlib.sha256(memory(tensor.detach().cpu().contiguous())).hexdigest()
