"""Tests on an NPU or on the CANN simulator (``python -m cann_sim run -m pytest tests/npu``)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Skip the modules of this folder, with the reason, where there is no NPU."""
    if module_path.parent.name == "simulator" or not _missing():  # those start the simulator themselves
        return None
    return Skipped.from_parent(parent, path=module_path)


class Skipped(pytest.Module):
    """A module that is not imported."""

    def collect(self) -> list[Any]:
        pytest.skip(_missing())


@functools.cache
def _missing() -> str:
    """What these tests would need; empty where there is an NPU."""
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        return "needs torch_npu and CANN"
    return "" if torch.npu.is_available() else "needs an NPU"


@pytest.fixture(autouse=True, scope="session")
def _compared_in_the_process_itself() -> Iterator[None]:
    """Faults that a test plants in its process must reach the comparison; test_helper.py is about helpers."""
    from liteboost_adaptor import config

    os.environ["LITEBOOST_FIRST_USE"] = "thread"
    config.settings.cache_clear()
    yield
    del os.environ["LITEBOOST_FIRST_USE"]
    config.settings.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _formats_of_later_releases() -> Iterator[None]:
    """torch_npu 2.9.0 allows private formats, and then convolves by the graph engine: not simulated.

    Weights that a test has cast allow them for good; no module leaves tensors to the next.
    """
    if _missing():
        yield
        return
    from liteboost_adaptor.replacements import npu_format

    torch.npu.config.allow_internal_format = False  # the default behind it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu_format, "internal", npu_format.InternalFormats())
        yield


@pytest.fixture(autouse=True)
def _synchronized() -> Iterator[None]:
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
