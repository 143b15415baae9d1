"""The instruction-set objects and their test programs, for this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import kernel_build


@pytest.fixture(scope="session")
def host_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build folder, of `make setup` or ours: ``csrc``, and objects in ``CMakeFiles/lb_isa_<isa>.dir``."""
    if compiled := kernel_build.compiled():
        return compiled
    kernel_build.find("c++", "g++", "clang++", why="compiles the kernels for this test")
    folder = kernel_build.configure(tmp_path_factory.mktemp("kernels"))
    isas = kernel_build.built_isas(folder)
    programs = [f"{program}_{isa}" for isa in isas for program in ("vec_test", "loops_test")]
    kernel_build.build(folder, *programs)
    return folder
