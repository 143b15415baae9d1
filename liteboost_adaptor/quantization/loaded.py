"""What a model has been loaded from: nothing missing, nothing left over, no integers where numbers belong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..checkpoint.files import File
from ..errors import CheckpointError, QuantizationError
from .stored import Stored
from .weights import QuantizedWeight

#: Buffers of our layers, by which a checkpoint of ours is known.
_OURS = ("scales", "zero_points", "columns")
#: What a layer of another format has in place of its weight.
_PACKED = ("qweight", "weight_packed")


def check(model: torch.nn.Module, info: Any, files: Iterable[str]) -> None:
    """Compare what the loader says with a quantised checkpoint.

    Args:
        info: What transformers' loader found missing and left over, by the names of the model.
        files: Of the checkpoint.

    Raises:
        CheckpointError: Parameters are in no file.
        QuantizationError: Integers are in a file that the model has no place for.
    """
    where = _named(files)
    modules = dict(model.named_modules())
    left = []
    for name in sorted(info.unexpected_keys):
        owner, _, part = name.rpartition(".")
        if isinstance(modules.get(owner), QuantizedWeight) or (owner in modules and part in _OURS):
            left.append(name)
    if left:
        raise QuantizationError(
            f"{where} has {_few(left)}, and by quantization_config the model has no such part: config.json "
            "is of another checkpoint, or has been changed. Copy it again"
        )
    missing = _missing(model, info.missing_keys)
    if missing:
        raise CheckpointError(
            f"{where} has no {_few(missing)}, which {type(model).__name__} would make up at random: the "
            "checkpoint is not whole. Copy it again"
        )


def _missing(model: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Parameters that the checkpoint should have had."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    absent = set(names)
    # Of a class for another task, the checkpoint has the base only.
    is_whole = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    base = f"{model.base_model_prefix}."
    found = []
    for name in sorted(absent):
        is_tied = (name in ties and ties[name] not in absent) or any(
            source == name and target not in absent for target, source in ties.items()
        )
        is_expected = is_whole or name.startswith(base)
        if name not in parameters or is_tied or not is_expected:
            continue
        if not any(re.search(pattern, name) for pattern in ignored):
            found.append(name)
    return found


def check_layers(model: torch.nn.Module, awaited: Iterable[str], where: str) -> None:
    """Raise `QuantizationError` unless every quantised layer holds what its scheme says.

    Args:
        awaited: Weights that should have become integers by now.
        where: The files.
    """
    faults = [f"{name} is missing" for name in awaited]
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedWeight) and not _is_done(layer):
            faults += [f"{name}.{fault}" for fault in _faults(layer)]
    if faults:
        raise QuantizationError(
            "the checkpoint does not hold what its quantization_config says:\n  "
            + "\n  ".join(faults[:20])
            + (
                f"\nRead from {where}; copy it and config.json again, or quantise the model again"
                if where
                else ""
            )
        )


def _is_done(layer: QuantizedWeight) -> bool:
    """Whether it is arranged, and not merely of the dimensions that tiles have."""
    return layer.is_arranged and not getattr(layer.weight, "_is_hf_initialized", False)


def _faults(layer: QuantizedWeight) -> Iterator[str]:
    for part, (shape, dtype) in layer.scheme.shapes(layer.out_features, layer.in_features).items():
        tensor = getattr(layer, part)
        if tensor.device.type == "meta":
            continue  # it lies on the disk
        if not getattr(tensor, "_is_hf_initialized", False):
            yield f"{part} is missing"
        elif tensor.shape != shape or tensor.dtype != dtype:
            yield f"{part} must be {list(shape)} of {dtype}, found {list(tensor.shape)} of {tensor.dtype}"
        else:
            fault = _fault_of_values(layer, part, tensor)
            if fault:
                yield f"{part} {fault}"


def _fault_of_values(layer: QuantizedWeight, part: str, tensor: torch.Tensor) -> str:
    """What no integer of the scheme, or no scale that it rounds to, can be; or an empty string."""
    if not tensor.numel():
        return ""
    if part == "scales":
        return _fault_of_scales(layer, tensor)
    least, most = (int(each) for each in tensor.aminmax())
    if part == "zero_points" and most > 15:
        return f"has values up to {most}, and 4 bits end at 15"
    if part == "columns" and not 0 <= least <= most < layer.in_features:
        return f"names columns from {least} to {most}, and the input has {layer.in_features}"
    return ""


def _fault_of_scales(layer: QuantizedWeight, scales: torch.Tensor) -> str:
    if not torch.isfinite(scales).all():
        return "has values that are infinite or not a number"
    if isinstance(layer.scheme, Stored):
        return ""  # those of another format, which may have zeros and, of AutoRound's, signs
    if not scales.all():
        return "has values that are zero, which none is rounded to"
    # A symmetric scale of 4 bits has a sign, so that the range is used whole.
    has_signs = layer.scheme.bits == 4 and layer.scheme.symmetric
    return "has negative values" if not has_signs and bool((scales < 0).any()) else ""


def check_integers(model: torch.nn.Module, tensors: Mapping[str, Any], weight_mapping: Any) -> None:
    """Raise `QuantizationError` where one of ``tensors`` has integers for a parameter of floating point.

    Args:
        tensors: Of the files, by their names there.
        weight_mapping: How transformers renames them.
    """
    from .naming import target_of

    wanted = model.state_dict()
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            continue
        target = wanted.get(target_of(model, name, weight_mapping, wanted))
        if target is not None and target.is_floating_point():
            file = getattr(tensor, "file", None)
            raise QuantizationError(
                f"{name} in {file.path if file else 'the checkpoint'} is {tensor.dtype}, and the model has a "
                f"parameter of {target.dtype} there: by quantization_config that layer is not quantised. "
                "Copy config.json again"
            )


def check_unread(model: torch.nn.Module, info: Any, files: Iterable[str]) -> None:
    """Raise `QuantizationError` where integers lie in the files and no quantizer was there to read them."""
    modules = dict(model.named_modules())
    missing, suspects = set(info.missing_keys), []
    for name in sorted(info.unexpected_keys):
        owner, _, part = name.rpartition(".")
        if owner not in modules:
            continue
        if part in _PACKED and f"{owner}.weight" in missing:
            raise _unread(model, name, files)
        if part in ("scales", "weight_scale"):
            suspects.append(owner)
    if suspects and _has_integers(suspects, files):
        raise _unread(model, f"{suspects[0]}.weight", files)


def _has_integers(owners: Iterable[str], files: Iterable[str]) -> bool:
    kinds = {}
    for path in files:
        kinds |= {name: entry.dtype for name, entry in File(path).entries.items()}
    integers = (torch.int8, torch.uint8)
    return any(kinds.get(f"{owner}.weight") in integers for owner in owners)


def _unread(model: torch.nn.Module, name: str, files: Iterable[str]) -> QuantizationError:
    said = getattr(model.config, "quantization_config", None)
    return QuantizationError(
        f"{_named(files)} has integers for a layer ({name}), and quantization_config in config.json is "
        f"{'missing' if not said else said!r}, by which nothing reads them: {type(model).__name__} would be "
        "made up at random. Copy config.json again"
    )


def _few(names: list[str]) -> str:
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")


def _named(files: Iterable[str]) -> str:
    paths = [str(path) for path in files or ()]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else "the checkpoint"
