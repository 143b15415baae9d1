"""What a run of a program gave, in a form that two runs are compared in."""

from __future__ import annotations

import dataclasses
import enum
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

#: Attributes that are ours, or that tell objects of one run from those of another.
_SKIPPED = ("_liteboost", "_is_hf_initialized")
_DEPTH = 5
#: What is said where a tensor cannot be viewed, written to or saved because of how it lies or was made.
_REFUSED = ("view size is not compatible", "Inplace update to inference tensor", "non contiguous tensor")
_REFUSAL = "refused by the tensor"


@dataclasses.dataclass
class Trace:
    """A list of (where, what), and how often a recorded step served.

    Attributes:
        entries: In the order they were noted.
        replays: Steps that ran as programs.
        calls: Of every rule.
        reasons: Why steps were not recorded.
    """

    entries: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    replays: int = 0
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: list[str] = dataclasses.field(default_factory=list)

    def note(self, where: str, value: Any) -> None:
        """``value`` as it is now."""
        self.entries.append((where, frozen(value)))


def kind_of(fault: Exception) -> str:
    """What a fault in the user's own lines is compared by."""
    return _REFUSAL if any(words in str(fault) for words in _REFUSED) else type(fault).__name__


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """A copy that nobody changes any more, made of tensors, tuples and plain values."""
    if isinstance(value, torch.Tensor):
        # Rows of a cache of integers, subclasses: what an operator would read.
        return (
            value.detach().clone().as_subclass(torch.Tensor) if value.layout == torch.strided else str(value)
        )
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value, copy=True)) if value.dtype.kind in "fiub" else repr(value)
    if depth <= 0:
        return "..."
    if isinstance(value, dict):
        named = ("dict", type(value).__name__, *((str(k), frozen(v, depth - 1)) for k, v in value.items()))
        return (*named, *_extra(value, depth))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(frozen(each, depth - 1) for each in value))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, *sorted(map(repr, value)))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type | torch.nn.Module):
        return getattr(value, "__name__", type(value).__name__)
    if hasattr(value, "layers") and hasattr(value, "get_seq_length"):
        return "cache"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return (type(value).__name__, frozen(fields, depth - 1))
    return type(value).__name__


def _extra(value: dict[Any, Any], depth: int) -> Iterator[Any]:
    """Attributes beside items: those a user has set on an output."""
    own = getattr(value, "__dict__", {})
    for name, each in own.items():
        if name not in value:
            yield ("attribute", name, frozen(each, depth - 1))


def of_model(model: torch.nn.Module) -> dict[str, Any]:
    """Every attribute of its modules that is a tensor or a plain value."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        own = vars(module)
        for table in ("_parameters", "_buffers"):
            found.update({f"{prefix}.{name}": value for name, value in own[table].items()})
        for name, value in own.items():
            plain = isinstance(
                value, torch.Tensor | bool | int | float | str | list | tuple | dict | np.ndarray
            )
            if plain and not name.startswith("_"):
                found[f"{prefix}.{name}"] = value
    return found


def of_cache(cache: Any) -> dict[str, Any]:
    """Its rows and what else the user has set on it."""
    if cache is None:
        return {}
    found: dict[str, Any] = {"length": cache.get_seq_length()}
    for at, layer in enumerate(cache.layers):
        found[f"{at} keys"], found[f"{at} values"] = layer.keys, layer.values
    for name, value in vars(cache).items():
        if name not in ("layers", "layer_class_to_replicate") and not name.startswith("_liteboost"):
            found[name] = value
    return found


def seeds() -> tuple[int, int, int]:
    """What the random number generators have come to."""
    numpy = np.random.get_state()
    return (
        hash(random.getstate()),
        hash((numpy[1].tobytes(), numpy[2])),
        hash(torch.get_rng_state().numpy().tobytes()),
    )


def first_difference(one: Trace, other: Trace, tolerance: float = 0.0) -> str:
    """The first entry in which they differ, in words, or nothing.

    Without a tolerance, to the bit. With one, ``other`` is what transformers gives; what its tensors refuse
    to a user between two steps and ours allow (views of what is contiguous here, writes to what is no
    inference tensor) ends the comparison: such a program does not run without us.
    """
    for (where, mine), (place, theirs) in zip(one.entries, other.entries, strict=False):
        if where != place:
            if (
                tolerance
                and place.endswith(" raised")
                and not place.startswith("step")
                and theirs == ("tuple", _REFUSAL)
            ):
                return ""
            return f"{where} where the other has {place}"
        if found := _differs(mine, theirs, tolerance):
            return f"{where}: {found}"
    if len(one.entries) != len(other.entries):
        return "another number of entries"
    return ""


def _differs(one: Any, other: Any, tolerance: float) -> str:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensors_differ(one, other, tolerance)
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            names = [
                [each[0] for each in value if isinstance(each, tuple) and each] for value in (one, other)
            ]
            return f"{len(one)} parts and {len(other)}: {_short(names[0])} and {_short(names[1])}"
        pairs = zip(one, other, strict=True)
        return next((found for a, b in pairs if (found := _differs(a, b, tolerance))), "")
    if isinstance(one, float) and isinstance(other, float):
        if one == other or (one != one and other != other):
            return ""
        near = tolerance and abs(one - other) <= tolerance * max(1.0, abs(other))
        return "" if near else f"{one!r} and {other!r}"
    if type(one) is not type(other) or one != other:
        return f"{_short(one)} and {_short(other)}"
    return ""


def _tensors_differ(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if not tolerance or not one.dtype.is_floating_point:
        if (
            one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
            if _has_numpy(one)
            else torch.equal(one, other)
        ):
            return ""
        if not one.dtype.is_floating_point:
            return f"{_short(one.flatten()[:4].tolist())} and {_short(other.flatten()[:4].tolist())}"
    mine, theirs = one.double(), other.double()
    lost = mine.isnan() ^ theirs.isnan()
    if lost.any():
        return f"NaN in {int(lost.sum())} places of {one.numel()} in one only"
    wild = ~(mine.isfinite() & theirs.isfinite())
    if not torch.equal(mine[wild].nan_to_num(), theirs[wild].nan_to_num()):
        return "infinity in one only"
    mine, theirs = mine.masked_fill(wild, 0), theirs.masked_fill(wild, 0)
    if torch.equal(mine, theirs) and torch.equal(mine.signbit(), theirs.signbit()):
        return ""  # one NaN is as good as another
    error = float((mine - theirs).norm() / (theirs.norm() + 1e-3))
    return f"off by {error:.2g}" if not tolerance or error > tolerance else ""


def _has_numpy(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
