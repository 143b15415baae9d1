"""The torch-free loops by themselves: all lengths and alignments, at every instruction set of this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import kernel_build

PROGRAMS = ("vec_test", "loops_test")


@pytest.mark.parametrize("program", PROGRAMS)
def test_loops(native_only: None, host_build: Path, isa: str, program: str) -> None:
    output = kernel_build.run([str(host_build / "csrc" / f"{program}_{isa}")])
    assert ", 0 failures" in output
