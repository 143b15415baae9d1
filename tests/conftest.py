"""Fixtures of every test: seeds, a clean environment, and one run of an op test an instruction set."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch


def pytest_configure() -> None:
    # A developer's own variables are dropped before anything reads them, so that a run depends on the tree
    # alone; tests that want one set it themselves.
    for name in [name for name in os.environ if name.startswith("LITEBOOST_")]:
        del os.environ[name]
    # Tensors of tests are tiny, and on a busy machine threads mostly wait for each other; tests about
    # threads set their number themselves.
    torch.set_num_threads(1)
    native_status()  # Test modules look their ops up when they are imported.


@functools.cache
def native_status():
    """What became of the native library. Imported here, after the environment has been cleared."""
    from liteboost_adaptor import native

    return native.load()


def isas() -> list[str]:
    # On the reference ops there is nothing to choose, and the same tests run once.
    return list(torch.ops.liteboost._isas()) if native_status().loaded else ["reference"]


def pytest_report_header() -> str:
    if native_status().loaded:
        return f"liteboost_adaptor: native kernels, instruction sets {', '.join(isas())}"
    return f"liteboost_adaptor: NO native kernels ({native_status().reason}); the reference ops are tested"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", isas(), indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once an instruction set compiled in and supported here, the kernels limited to it."""
    if not native_status().loaded:
        yield request.param
        return
    torch.ops.liteboost._limit_isa(request.param)
    try:
        yield request.param
    finally:
        torch.ops.liteboost._limit_isa("")


@pytest.fixture
def native_only() -> None:
    """Skip where there are no native kernels, with the reason."""
    if not native_status().loaded:
        pytest.skip(f"needs the native kernels: {native_status().reason}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``torch.empty`` and its kin return NaN, so that reading what was never written shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoning(getattr(torch.Tensor, name)))


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    return poisoned
