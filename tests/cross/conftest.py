"""The instruction-set objects and their test programs, for this machine and, cross-compiled, for aarch64."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import kernel_build

COMPILER = "aarch64-linux-gnu-g++"


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


@pytest.fixture(scope="session")
def aarch64_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is configured for aarch64, where tests build what they need."""
    compiler = kernel_build.find(COMPILER, why="Debian has it as g++-aarch64-linux-gnu")
    return kernel_build.configure(
        tmp_path_factory.mktemp("aarch64"),
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DLITEBOOST_UNITY=OFF",  # each file by itself, as nowhere else
        "-DCMAKE_EXE_LINKER_FLAGS=-static",  # the emulator needs no aarch64 libraries then
    )
