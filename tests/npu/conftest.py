"""Tests on an NPU or on the CANN simulator (``python -m cann_sim run -m pytest tests/npu``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _synchronized() -> Iterator[None]:
    """An error of a launch that waits in the task queue fails the test that made it."""
    yield
    if hasattr(torch, "npu") and torch.npu.is_initialized():
        torch.npu.synchronize()
