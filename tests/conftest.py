"""Fixtures of every test: seeds, environment, poisoned memory, one run of an op test an instruction set."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import sys
from collections.abc import Iterator

import pytest

# Before torch: the OpenMP runtime reads it once, and a thread that a test starts takes its number from there.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


def pytest_configure() -> None:
    # A developer's own variables are dropped before anything reads them, so that a run depends on the tree
    # alone; tests that want one set it themselves.
    for name in [name for name in os.environ if name.startswith("LITEBOOST_")]:
        del os.environ[name]
    # Tensors of tests are tiny, and on a busy machine threads mostly wait for each other; tests about
    # threads set their number themselves.
    torch.set_num_threads(1)
    _poison_memory()
    native_status()  # Test modules look their ops up when they are imported.


def pytest_collection_finish() -> None:
    """Whatever exists before the first test stays: no collection of garbage need look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_other_tests_left_is_not_looked_through() -> None:
    """As above, before each file: modules of transformers that a file imports stay for all after it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _steps_are_recorded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests of a few tokens run recorded steps, too."""
    from liteboost_adaptor.program import step

    monkeypatch.setattr(step, "RECORDED_AT", 4)


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers keeps copies of remote code: one place a run, for it is imported as a package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.setattr(sys, "path", [*sys.path])
        yield


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
        # The first tier takes the least and the best of this machine; tests/csrc runs the loops of all in it.
        names = isas()
        between = [pytest.param(name, marks=pytest.mark.full) for name in names[1:-1]]
        metafunc.parametrize("isa", [*names[:1], *between, *names[1:][-1:]], indirect=True)


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
def no_grad() -> Iterator[None]:
    """Run the test without grad mode, in which nothing is served."""
    with torch.no_grad():
        yield


@pytest.fixture
def native_only() -> None:
    """Skip where there are no native kernels, with the reason."""
    if not native_status().loaded:
        pytest.skip(f"needs the native kernels: {native_status().reason}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fill memory that was never written with NaN, in every test; see `_poison_memory`."""
    _poison_memory()  # Again, for a test may have changed it.


def _poison_memory() -> None:
    """Make reading what was never written show.

    torch fills what ``torch.empty`` and its kin return, in Python and in C++ (the kernels' own results
    included), with NaN or the largest integer in its deterministic mode. What kernels take from malloc
    itself, glibc fills with the complement of a byte: 3.4e38 in fp32 and bf16, NaN in fp16.
    """
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-6, 0x80)  # M_PERTURB in malloc.h
