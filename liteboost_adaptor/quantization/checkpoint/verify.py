"""Whether a model was loaded with all of a quantized checkpoint: nothing missing, nothing unread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...checkpoint.files import File
from ...errors import CheckpointError, QuantizationError
from ..layers import QuantizedLayer
from .parameter_names import ParameterNames

#: Buffers of our layers, by which a checkpoint of ours is known.
_BUFFERS = ("scales", "zero_points", "columns")
#: What a layer of another format has in place of its weight.
_PACKED = ("qweight", "weight_packed")
_SCALES = ("scales", "weight_scale")


def check_names(model: torch.nn.Module, info: Any, files: Iterable[str]) -> None:
    """Compare what the loader says with a quantized checkpoint.

    Args:
        info: What transformers' loader found missing and left over, by the names of the model.
        files: Of the checkpoint.

    Raises:
        CheckpointError: Parameters are in no file.
        QuantizationError: Integers are in a file that the model has no place for.
    """
    where = _first_of(files)
    modules = dict(model.named_modules())
    unread = []
    for name in sorted(info.unexpected_keys):
        owner, _, buffer = name.rpartition(".")
        if isinstance(modules.get(owner), QuantizedLayer) or (owner in modules and buffer in _BUFFERS):
            unread.append(name)
    if unread:
        raise QuantizationError(
            f"{where} has {_few(unread)}, and by quantization_config the model has no such part: config.json "
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


def check_layers(model: torch.nn.Module, pending: Iterable[str], where: str) -> None:
    """Raise `QuantizationError` unless every quantized layer holds what its scheme says.

    Args:
        pending: Weights that should have been quantized by now.
        where: The files.
    """
    faults = [f"{name} is missing" for name in pending]
    for name, layer in model.named_modules():
        # What was loaded may have the dimensions of a prepacked weight by mistake.
        if isinstance(layer, QuantizedLayer) and (_is_loaded(layer.weight) or not layer.is_packed):
            faults += [f"{name}.{fault}" for fault in _faults(layer)]
    if faults:
        remedy = f"\nRead from {where}; copy it and config.json again, or quantize the model again"
        raise QuantizationError(
            "the checkpoint does not hold what its quantization_config says:\n  "
            + "\n  ".join(faults[:20])
            + (remedy if where else "")
        )


def _is_loaded(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)


def _faults(layer: QuantizedLayer) -> Iterator[str]:
    specs = layer.scheme.buffer_specs(layer.out_features, layer.in_features)
    for name, (shape, dtype) in specs.items():
        tensor = getattr(layer, name)
        if tensor.device.type == "meta":
            continue  # it lies on the disk
        if not _is_loaded(tensor):
            yield f"{name} is missing"
        elif tensor.shape != shape or tensor.dtype != dtype:
            yield f"{name} must be {list(shape)} of {dtype}, found {list(tensor.shape)} of {tensor.dtype}"
        else:
            fault = _fault_of_values(layer, name, tensor)
            if fault:
                yield f"{name} {fault}"


def _fault_of_values(layer: QuantizedLayer, name: str, tensor: torch.Tensor) -> str:
    """What no integer of the scheme, or no scale that it rounds to, can be; or an empty string."""
    if not tensor.numel():
        return ""
    if name == "scales":
        return _fault_of_scales(layer, tensor)
    least, most = (int(each) for each in tensor.aminmax())
    if name == "zero_points" and most > 15:
        return f"has values up to {most}, and 4 bits end at 15"
    if name == "columns" and not 0 <= least <= most < layer.in_features:
        return f"names columns from {least} to {most}, and the input has {layer.in_features}"
    return ""


def _fault_of_scales(layer: QuantizedLayer, scales: torch.Tensor) -> str:
    if not torch.isfinite(scales).all():
        return "has values that are infinite or not a number"
    if layer.scheme.scale_dtype_name:
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
    names = ParameterNames(model, weight_mapping)
    state = names.state
    for name, tensor in tensors.items():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            continue
        target = state.get(name if name in state else names.target_of(name)[0])
        if target is not None and target.is_floating_point():
            file = getattr(tensor, "file", None)
            raise QuantizationError(
                f"{name} in {file.path if file else 'the checkpoint'} is {tensor.dtype}, and the model has a "
                f"parameter of {target.dtype} there: by quantization_config that layer is not quantized. "
                "Copy config.json again"
            )


def check_unread(model: torch.nn.Module, info: Any, files: Iterable[str]) -> None:
    """Raise `QuantizationError` where integers lie in the files and no quantizer was there to read them."""
    modules, missing = dict(model.named_modules()), set(info.missing_keys)
    split = [(name, *name.rpartition(".")[::2]) for name in sorted(info.unexpected_keys)]
    packed = [
        name
        for name, owner, suffix in split
        if owner in modules and suffix in _PACKED and f"{owner}.weight" in missing
    ]
    scaled = [f"{owner}.weight" for _, owner, suffix in split if owner in modules and suffix in _SCALES]
    if not packed and not (scaled and _have_integers(scaled, files)):
        return
    config = getattr(model.config, "quantization_config", None)
    raise QuantizationError(
        f"{_first_of(files)} has integers for a layer ({(packed or scaled)[0]}), and quantization_config in "
        f"config.json is {repr(config) if config else 'missing'}, by which nothing reads them: "
        f"{type(model).__name__} would be made up at random. Copy config.json again"
    )


def _have_integers(names: Iterable[str], files: Iterable[str]) -> bool:
    dtypes = {name: entry.dtype for path in files for name, entry in File(path).entries.items()}
    return any(dtypes.get(name) in (torch.int8, torch.uint8) for name in names)


def _few(names: list[str]) -> str:
    rest = len(names) - 5
    return ", ".join(names[:5]) + (f" and {rest} more" if rest > 0 else "")


def _first_of(files: Iterable[str]) -> str:
    paths = [str(path) for path in files or ()]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else "the checkpoint"
