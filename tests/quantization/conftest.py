"""Fixtures of every test of quantization."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import liteboost_adaptor


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    """Models are prepared, and the quantizer is registered, whatever a test before this one has undone."""
    with liteboost_adaptor.patched(level=2):
        yield
