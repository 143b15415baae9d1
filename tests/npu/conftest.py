"""Tests on an NPU or on the CANN simulator (``python -m cann_sim run -m pytest tests/npu``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def an_npu() -> None:
    """Skips the tests of this folder, with the reason, where there is no NPU."""
    pytest.importorskip("torch_npu", reason="needs torch_npu and CANN", exc_type=ImportError)
    if not torch.npu.is_available():
        pytest.skip("needs an NPU")


@pytest.fixture(autouse=True)
def _synchronized(an_npu: None) -> Iterator[None]:
    """An error of a launch that waits in the task queue fails the test that made it."""
    yield
    if hasattr(torch, "npu") and torch.npu.is_initialized():
        torch.npu.synchronize()


@pytest.fixture
def undone() -> Iterator[None]:
    """Nothing of ours is on when the test begins, and nothing is left on."""
    import liteboost_adaptor

    liteboost_adaptor.undo()
    yield
    liteboost_adaptor.undo()


@pytest.fixture(params=[0, 1, 2], ids="level {}".format)
def level(request: pytest.FixtureRequest, no_grad: None, undone: None) -> int:
    """Run the test at each level, without grad mode, in which nothing is served."""
    import liteboost_adaptor

    liteboost_adaptor.apply(level=request.param)
    return request.param
