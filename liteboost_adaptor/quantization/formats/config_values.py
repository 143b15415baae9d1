"""Values of the ``quantization_config`` of another format, checked before a tensor is read.

A configuration is somebody else's JSON: every value that is used is compared with what the format allows,
and what it says of a layer with what the layer's tensors are (`base.CheckpointLayer`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import QuantizationError

Config = Mapping[str, Any]
_MAX_GROUP_SIZE = 1 << 30


@dataclass(frozen=True)
class LayerConfig:
    """What a configuration says of one layer; None where it says nothing.

    Attributes:
        bits: Of an integer.
        group_size: Columns that share a scale; 0: all of them.
        symmetric: Whether the middle of the range stands for zero.
        has_group_index: Whether there is a list with the group of each column.
        per_tensor: Whether one scale is that of the whole weight; None: either, without groups.
        may_be_negative: Whether what wrote it writes negative scales.
        quantizes_activations: Whether inputs are rounded to integers of 8 bits as they come.
    """

    bits: int
    group_size: int
    symmetric: bool | None = None
    has_group_index: bool | None = None
    per_tensor: bool | None = False
    may_be_negative: bool = False
    quantizes_activations: bool = False

    def num_groups(self, in_features: int) -> int:
        """Groups of a row of so many columns."""
        return -(-in_features // self.group_size) if self.group_size else 1


def invalid(key: str, value: Any, wanted: str) -> QuantizationError:
    """An error about one value."""
    return QuantizationError(
        f"quantization_config in config.json says {key} = {value!r}, and {wanted}: correct it, or copy "
        "config.json again"
    )


def integer(config: Config, key: str, default: int, allowed: Collection[int] | None = None) -> int:
    """An integer, one of those ``allowed``."""
    value = config.get(key, default)
    if type(value) is not int or (allowed is not None and value not in allowed):
        wanted = "an integer" if allowed is None else f"one of {', '.join(map(str, allowed))}"
        raise invalid(key, value, f"it must be {wanted}")
    return value


def flag(config: Config, key: str, default: bool | None) -> bool | None:
    """True or false, or the default where it is missing or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(key, value, "it must be true or false")
    return value


def name(config: Config, key: str) -> str:
    """A string in lower case; empty where it is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(key, value, "it must be a name")
    return (value or "").lower()


def group_size(config: Config, default: int = 128) -> int:
    """Columns of a group; 0: all of them."""
    size = integer(config, "group_size", default)
    if size != -1 and not 0 < size <= _MAX_GROUP_SIZE:
        raise invalid("group_size", size, "it must be more than 0, or -1 for one group")
    return max(size, 0)


def mapping(config: Config, key: str) -> Config:
    """An object; empty where it is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise invalid(key, value, "it must be an object")
    return value or {}


def check_pattern(key: str, pattern: str) -> None:
    """Raise `QuantizationError` where ``pattern`` is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise invalid(key, pattern, f"that is no regular expression ({error})") from error


def writes_negative_scales(config: Config) -> bool:
    """Whether AutoRound wrote the checkpoint, whatever format it says.

    GPTQ's, AWQ's and compressed-tensors' own rounding divide a range, which is positive, by the number of
    integers. AutoRound's symmetric one lets the largest weight lie at the end that reaches further, and
    gives the scale its sign.
    """
    quantizer = mapping(config, "meta").get("quantizer")
    writers = [config.get("provider"), *(quantizer if isinstance(quantizer, list) else [quantizer])]
    return "autoround_version" in config or any(
        re.search("auto[-_]?round", each.lower()) for each in writers if isinstance(each, str)
    )
