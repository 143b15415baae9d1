"""Checkpoints that other libraries have quantized: GPTQ, AWQ and compressed-tensors.

A further format, of a method that transformers knows, is a module with a `CheckpointFormat` (which layers,
and what of its configuration is read) and a `CheckpointLayer` (integers, scales and zero points, unsigned,
``[out, in]``; `awq` is the shortest), named in `FORMATS`. Registration, repacking and errors follow from
that.
"""

from __future__ import annotations

from . import config_values
from .awq import AwqFormat
from .base import CheckpointFormat
from .compressed_tensors import CompressedTensorsFormat
from .config_values import Config
from .gptq import GptqFormat

FORMATS: tuple[type[CheckpointFormat], ...] = (GptqFormat, AwqFormat, CompressedTensorsFormat)


def reader_of(config: Config) -> tuple[CheckpointFormat | None, str]:
    """What reads a checkpoint with this ``quantization_config``, or None, and why it is not read.

    Raises `QuantizationError` where the format is one of these, and a value is none that it allows.
    """
    method = config.get("quant_method")
    method = getattr(method, "value", method)
    version = next(
        filter(None, (config_values.name(config, key) for key in ("checkpoint_format", "version", "format"))),
        "",
    )
    for each in FORMATS:
        if each.method == method:
            reason = each.why_unsupported(config, version)
            return (None, reason) if reason else (each(config), "")
    return None, f"the method {method}"
