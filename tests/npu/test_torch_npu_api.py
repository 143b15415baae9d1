"""What the library for NPUs asks of libtorch_npu.so, in whichever release it is loaded."""

from __future__ import annotations

import subprocess

import pytest

from liteboost_adaptor import native_npu


@pytest.mark.parametrize(
    "function",
    [
        "_ZN7c10_npu21GetDeterministicLevelEv",
        "_ZN6at_npu6native23ApplyDeterministicLevelElbb",
        "_Z13SetExecConfigv",
    ],
)
def test_what_some_releases_lack_does_not_keep_the_library_from_loading(function: str) -> None:
    """A weak symbol (w) is null where it is not found; any other (U) is an error of the loader.

    One that is not listed is defined by ourselves (kernels/npu/torch_npu_api.cpp).
    """
    library = native_npu.find()
    assert library is not None
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(library.path)], capture_output=True, text=True, check=True
    )
    kinds = {line.split()[-1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert kinds.get(function, "w") == "w"
