"""The portable path on aarch64: everything compiles against torch's headers, the loops run in an emulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import kernel_build

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


@pytest.fixture(scope="module")
def aarch64_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = kernel_build.find(COMPILER, why="Debian has it as g++-aarch64-linux-gnu")
    return kernel_build.configure(
        tmp_path_factory.mktemp("aarch64"),
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DLITEBOOST_UNITY=OFF",  # each file by itself, as nowhere else
        "-DCMAKE_EXE_LINKER_FLAGS=-static",  # the emulator needs no aarch64 libraries then
    )


@pytest.mark.full  # minutes, nearly all of them in torch's headers; what loops are made of is compiled below
def test_all_sources_compile(aarch64_build: Path) -> None:
    kernel_build.build(aarch64_build, "lb_ops", "lb_cpu_features", "lb_isa_baseline")
    objects = list(aarch64_build.glob("CMakeFiles/lb_*.dir/**/*.o"))
    sources = list((kernel_build.ROOT / "kernels").rglob("*.cpp"))
    # What is built against torch_npu is a library of its own, and one file is for wheels.
    sources = [path for path in sources if not path.stem.endswith("_npu") and path.parent.name != "npu"]
    sources.remove(kernel_build.ROOT / "kernels" / "common" / "manylinux_2_28.cpp")
    assert len(objects) == len(sources)
    for path in objects:
        assert int.from_bytes(path.read_bytes()[18:20], "little") == 183, "e_machine is not EM_AARCH64"


@pytest.mark.parametrize(
    "program",
    # The first is of what all loops are made of; to compile the loops takes four minutes of a core.
    ["vec_test", pytest.param("loops_test", marks=pytest.mark.full)],
)
def test_loops_run(aarch64_build: Path, program: str) -> None:
    emulator = kernel_build.find(*EMULATORS, why="Debian has it as qemu-user")
    kernel_build.build(aarch64_build, f"{program}_baseline")
    output = kernel_build.run([emulator, str(aarch64_build / "csrc" / f"{program}_baseline")])
    assert ", 0 failures" in output
