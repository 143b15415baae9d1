"""Checkpoints in MX formats on an NPU: transformers dequantizes them as it reads, and the status says so.

CANN has operators on MX weights on a 950 only (WeightQuantBatchMatmul, QuantMatmulV5); none is called here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..environment.npu import is_npu_there
from ..errors import QuantizationError
from ..report import REFUSED, Outcome, report
from .identifiers import CHECKPOINTS

#: ``quant_method`` -> the format's name, and what asks transformers for its weights in floating point.
MX_FORMATS = {
    "mxfp4": ("MXFP4", "Mxfp4Config(dequantize=True)"),
    "mxfp8": ("MXFP8", "FineGrainedFP8Config(dequantize=True)"),
}
_FEWER_BYTES = "save_pretrained it, and load what is saved with LITEBOOST_QUANT=w4a16 or w8a16"


def quantizer_factory(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """What makes the quantizer of ``method``: ``original``, and on an NPU a row of the status.

    It raises `QuantizationError` where a model is to be quantized to the format there.
    """
    name, dequantizing = MX_FORMATS[method]

    @functools.wraps(original, updated=())
    def make(config: Any, **kwargs: Any) -> Any:
        if is_npu_there() and not getattr(config, "dequantize", False):
            if not kwargs.get("pre_quantized", True):
                raise QuantizationError(
                    f"a model was to be quantized to {name} on an NPU, which no operator reads here; load it "
                    "without that quantization_config, with LITEBOOST_QUANT=w4a16 or w8a16 for fewer bytes"
                )
            reason = (
                f"{name} has no operator on an NPU: weights are dequantized while they are read, as with "
                f"quantization_config={dequantizing}; for fewer bytes {_FEWER_BYTES}"
            )
            report.add(Outcome(CHECKPOINTS, REFUSED, name, reason))
        return original(config, **kwargs)

    return make
