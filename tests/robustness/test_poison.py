"""Memory that was never written is not mistaken for a result: what the fixtures of all tests rely on."""

from __future__ import annotations

import pytest
import torch

EMPTY = {
    "empty": lambda dtype: torch.empty(7, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.ones(7, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((7,), (1,), dtype=dtype),
    "new_empty": lambda dtype: torch.ones(1, dtype=dtype).new_empty(7),
    "resize": lambda dtype: torch.ones(0, dtype=dtype).resize_(7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", EMPTY)
def test_tensors_that_python_allocates(way: str, dtype: torch.dtype) -> None:
    assert EMPTY[way](dtype).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_that_the_kernels_allocate(native_only: None, dtype: torch.dtype) -> None:
    # As a kernel gets it that forgot to write its result.
    assert torch.ops.liteboost._empty([3, 5], dtype).isnan().all()


def test_scratch_bytes_are_no_number_either(native_only: None) -> None:
    scratch = torch.ops.liteboost._empty([64], torch.uint8)
    assert scratch.view(torch.float32).isnan().all()
