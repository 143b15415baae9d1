"""Checkpoints in MX formats on an NPU are dequantized, and the status names the format and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import stored_weights, tiny_models
from transformers import AutoModelForCausalLM, Mxfp4Config

import liteboost_adaptor
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization.identifiers import CHECKPOINTS
from liteboost_adaptor.report import REFUSED, Row, report

pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def test_mxfp4_is_dequantized_and_told(tmp_path: Path) -> None:
    stored_weights.write_mxfp4(tmp_path)
    liteboost_adaptor.apply(level=1)
    asked = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Mxfp4Config(dequantize=True))
    assert not _rows()  # it is what the reason says to ask for
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (row,) = _rows()
    assert "MXFP4 has no operator" in row.reason and "Mxfp4Config(dequantize=True)" in row.reason
    weight, expected = (each.model.layers[0].mlp.experts.down_proj for each in (model, asked))
    assert weight.is_floating_point() and torch.equal(weight, expected)


def test_a_model_is_not_quantized_to_mxfp4(tmp_path: Path) -> None:
    tiny_models.build("gpt_oss").save_pretrained(tmp_path)
    liteboost_adaptor.apply(level=1)
    with pytest.raises(QuantizationError, match=r"MXFP4 on an NPU.*LITEBOOST_QUANT=w4a16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Mxfp4Config())


def _rows() -> list[Row]:
    return [row for row in report.rows((), "") if row.id == CHECKPOINTS and row.state == REFUSED]
