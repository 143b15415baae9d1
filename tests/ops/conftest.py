"""Memory that was never written must not look right: NaN from torch's allocators, junk from malloc."""

from __future__ import annotations

import ctypes

import pytest

M_PERTURB = -6  # malloc.h


@pytest.fixture(scope="session", autouse=True)
def _perturbed_malloc():
    # Kernels allocate their outputs in C++, beyond the reach of a patched torch.empty. glibc then fills new
    # memory with the complement of this byte: 3.4e38 in fp32 and bf16, NaN in fp16.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        yield
        return
    mallopt(M_PERTURB, 0x80)
    yield
    mallopt(M_PERTURB, 0)


@pytest.fixture(autouse=True)
def _poisoned(poisoned_empty: None) -> None:
    """Every op test runs with ``torch.empty`` poisoned."""
