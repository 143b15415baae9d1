"""Families in bf16 on an NPU: every norm, rotation, attention and gate is one of our aclnn calls."""

from __future__ import annotations

from typing import Any

import pytest
from support import npu_families

import liteboost_adaptor

#: Of the first tier; `WHOLE` is the rest.
SAMPLE = ("llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "mixtral", "olmo2", "starcoder2")
WHOLE: tuple[str, ...] = ()


def _marked(family: str) -> Any:
    return pytest.param(family, marks=[] if family in SAMPLE else [pytest.mark.full])


@pytest.fixture(autouse=True)
def undone(no_grad: None) -> Any:
    liteboost_adaptor.undo()
    yield
    liteboost_adaptor.undo()


@pytest.mark.parametrize("family", [_marked(family) for family in sorted({*SAMPLE, *WHOLE})])
def test_nothing_but_aclnn_calls_and_as_near_as_the_original(family: str) -> None:
    outcome = npu_families.examine(family)
    assert outcome.is_whole, outcome.unserved
    assert outcome.launches["attention"] > 0
    assert outcome.is_near, outcome
