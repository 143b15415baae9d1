"""What the ``quantization_config`` of another format says, checked before a tensor is read.

A configuration is somebody else's JSON: every value that is used is compared with what the format allows,
and what it says of a layer with what the layer's tensors are (`formats`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import QuantizationError

#: How compressed-tensors name an order of columns that a list of groups goes with.
_SCATTERED = ("group", "dynamic")
_ORDERS = (*_SCATTERED, "weight", "static")
_STRATEGIES = ("tensor", "channel", "group")
#: How it is said that there are no groups.
_NO_GROUPS = (None, -1, 0)
_MOST_COLUMNS = 1 << 30


@dataclass(frozen=True)
class Stated:
    """What a configuration says of one layer; None where it says nothing.

    Attributes:
        bits: Of an integer.
        group_size: Columns that share a scale; 0: all of them.
        symmetric: Whether the middle of the range stands for zero.
        is_listed: Whether there is a list with the group of each column.
        per_tensor: Whether one scale is that of the whole weight; None: as it may be, without groups.
        may_be_negative: Whether what wrote it writes negative scales.
    """

    bits: int
    group_size: int
    symmetric: bool | None = None
    is_listed: bool | None = None
    per_tensor: bool | None = False
    may_be_negative: bool = False

    def groups_of(self, inputs: int) -> int:
        """Groups of a row of so many columns."""
        return -(-inputs // self.group_size) if self.group_size else 1


def fault(key: str, value: Any, wanted: str) -> QuantizationError:
    """An error about one value."""
    return QuantizationError(
        f"quantization_config in config.json says {key} = {value!r}, and {wanted}: correct it, or copy "
        "config.json again"
    )


def integer(values: Mapping[str, Any], key: str, default: int, allowed: Collection[int] | None = None) -> int:
    """An integer, one of those ``allowed``."""
    value = values.get(key, default)
    if type(value) is not int or (allowed is not None and value not in allowed):
        wanted = "an integer" if allowed is None else f"one of {', '.join(map(str, allowed))}"
        raise fault(key, value, f"it must be {wanted}")
    return value


def flag(values: Mapping[str, Any], key: str, default: bool | None) -> bool | None:
    """True or false, or the default where it is missing or null."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise fault(key, value, "it must be true or false")
    return value


def word(values: Mapping[str, Any], key: str) -> str:
    """A word in small letters; empty where it is missing or null."""
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise fault(key, value, "it must be a name")
    return (value or "").lower()


def group_size(values: Mapping[str, Any], default: int = 128) -> int:
    """Columns of a group; 0: all of them."""
    size = integer(values, "group_size", default)
    if size != -1 and not 0 < size <= _MOST_COLUMNS:
        raise fault("group_size", size, "it must be more than 0, or -1 for one group")
    return max(size, 0)


def mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty where it is missing or null."""
    value = values.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise fault(key, value, "it must be an object")
    return value or {}


def method_of(values: Mapping[str, Any]) -> Any:
    """``quant_method``, as a string where it is one of transformers' own."""
    method = values.get("quant_method")
    return getattr(method, "value", method)


def writes_negative_scales(values: Mapping[str, Any]) -> bool:
    """Whether AutoRound wrote the checkpoint, whatever format it says.

    GPTQ's, AWQ's and compressed-tensors' own rounding divide a range, which is positive, by the number of
    integers. AutoRound's symmetric one lets the largest weight lie at the end that reaches further, and
    gives the scale its sign.
    """
    provider = values.get("provider")
    by = mapping(values, "meta").get("quantizer")
    said = [provider, *(by if isinstance(by, list) else [by])]
    return "autoround_version" in values or any(
        re.search("auto[-_]?round", each.lower()) for each in said if isinstance(each, str)
    )


@dataclass(frozen=True)
class GptqStated:
    """What a GPTQ configuration says, with exceptions by layer (GPTQModel's ``dynamic``).

    Attributes:
        has_true_zeros: Whether zero points are stored as they are, not minus one.
        layers: Of a layer without an exception.
        exceptions: (pattern, what it says instead) in order.
    """

    has_true_zeros: bool
    layers: Stated
    exceptions: tuple[tuple[str, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GptqStated:
        """Raises `QuantizationError` where a value is not of the format."""
        said = word(values, "checkpoint_format") or word(values, "format")
        exceptions = []
        for pattern, changes in mapping(values, "dynamic").items():
            if pattern.startswith("-:"):
                continue  # layers that are left as they are
            if not isinstance(changes, Mapping):
                raise fault(f"dynamic[{pattern!r}]", changes, "it must be an object")
            _check_pattern("dynamic", pattern.removeprefix("+:"))
            exceptions.append((pattern.removeprefix("+:"), changes))
        layers = _gptq(values, Stated(4, 128, may_be_negative=writes_negative_scales(values)))
        return cls(said == "gptq_v2", layers, tuple(exceptions))

    def of_layer(self, name: str) -> Stated:
        """The first exception that fits, as GPTQModel looks them up."""
        for pattern, changes in self.exceptions:
            if re.match(pattern, name):
                return _gptq(changes, self.layers)
        return self.layers


def _gptq(values: Mapping[str, Any], default: Stated) -> Stated:
    return replace(
        default,
        bits=integer(values, "bits", default.bits, (2, 3, 4, 8)),
        group_size=group_size(values, default.group_size or -1),
        symmetric=flag(values, "sym", default.symmetric),
        is_listed=flag(values, "desc_act", default.is_listed),
    )


def awq(values: Mapping[str, Any]) -> Stated:
    """What an AWQ configuration says of its layers."""
    size = {"group_size": values.get("group_size", values.get("q_group_size", 128))}
    has_zeros = flag(values, "zero_point", True)
    return Stated(4, group_size(size), not has_zeros, may_be_negative=writes_negative_scales(values))


@dataclass(frozen=True)
class Group:
    """A group of compressed-tensors' configuration: which layers, and how."""

    targets: tuple[str, ...]
    stated: Stated

    def names(self, layer: str) -> bool:
        """Whether it names this layer, or fits its name."""
        return any(
            re.match(target.removeprefix("re:"), layer) if target.startswith("re:") else target == layer
            for target in self.targets
        )


def compressed(values: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups with quantised weights.

    Raises:
        QuantizationError: A value is not of the format.
    """
    may_be_negative = writes_negative_scales(values)
    found = []
    for name, group in mapping(values, "config_groups").items():
        key = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise fault(key, group, "it must be an object")
        if mapping(group, "weights"):
            stated = replace(_compressed(group["weights"], key), may_be_negative=may_be_negative)
            found.append(Group(_targets(group.get("targets"), key), stated))
    return tuple(found)


def _targets(values: Any, key: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        raise fault(f"{key}.targets", values, "it must be a list of names")
    for each in values:
        if each.startswith("re:"):
            _check_pattern(f"{key}.targets", each.removeprefix("re:"))
    return tuple(values)


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise fault(key, pattern, f"that is no regular expression ({error})") from error


def _compressed(weights: Mapping[str, Any], key: str) -> Stated:
    strategy = word(weights, "strategy")
    if strategy and strategy not in _STRATEGIES:
        raise fault(f"{key}.weights.strategy", strategy, f"it must be one of {', '.join(_STRATEGIES)}")
    size = weights.get("group_size")
    if strategy == "group" or (not strategy and size not in _NO_GROUPS):
        strategy, size = "group", group_size({"group_size": size})
    elif size in _NO_GROUPS:
        size = 0
    else:
        raise fault(f"{key}.weights.group_size", size, f"the strategy {strategy} has none")
    return Stated(
        integer(weights, "num_bits", 8, range(2, 9)),
        size,
        flag(weights, "symmetric", True),
        _is_listed(weights, key),
        {"tensor": True, "channel": False}.get(strategy),
    )


def _is_listed(weights: Mapping[str, Any], key: str) -> bool | None:
    """Whether groups of columns are scattered; True and false are older words for "group" and null."""
    order = weights.get("actorder")
    if order is None or isinstance(order, bool):
        return order or (False if "actorder" in weights else None)
    order = word(weights, "actorder")
    if order not in _ORDERS:
        raise fault(f"{key}.weights.actorder", order, f"it must be one of {', '.join(_ORDERS)}")
    return True if order in _SCATTERED else None


def of_layer(groups: Iterable[Group], names: Iterable[str]) -> Stated | None:
    """What ``groups`` say of a layer with these ``names``, or None."""
    groups, names = tuple(groups), tuple(names)
    # A name comes before a class, as compressed-tensors look targets up.
    fitting = [group for group in groups if any(group.names(name) for name in names)]
    fitting += [group for group in groups if "Linear" in group.targets]
    fitting += groups if len(groups) == 1 else ()
    return fitting[0].stated if fitting else None
