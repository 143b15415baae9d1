"""aarch64, cross-compiled: all compiles against torch's headers, the loops run on several emulated CPUs."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from support import kernel_build

from liteboost_adaptor.config import ARM_ISAS

EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
#: Emulated CPUs and the best instruction set of each; ``max`` with SVE registers of 128, 256 and 512 bits.
CPUS = {
    "cortex-a57": "baseline",
    "neoverse-n1": "dotprod",
    "max,sve-max-vq=1": "i8mm_bf16",
    "max,sve-max-vq=2": "i8mm_bf16",
    "max,sve-max-vq=4": "i8mm_bf16",
}
#: Each instruction set on each CPU that has it.
FORCED = [(cpu, isa) for cpu, best in CPUS.items() for isa in ARM_ISAS[: ARM_ISAS.index(best) + 1]]


def emulate(program: Path, cpu: str) -> subprocess.CompletedProcess[str]:
    emulator = kernel_build.find(*EMULATORS, why="Debian has it as qemu-user")
    return subprocess.run([emulator, "-cpu", cpu, str(program)], capture_output=True, text=True, check=False)


def passes(build: Path, program: str, cpu: str, isa: str) -> None:
    kernel_build.build(build, f"{program}_{isa}")
    done = emulate(build / "csrc" / f"{program}_{isa}", cpu)
    assert done.returncode == 0 and ", 0 failures" in done.stdout, done.stdout + done.stderr


@pytest.mark.full  # minutes, nearly all of them in torch's headers; what loops are made of is compiled below
def test_all_sources_compile(aarch64_build: Path) -> None:
    isas = kernel_build.built_isas(aarch64_build)
    assert tuple(isas) == ARM_ISAS
    kernel_build.build(aarch64_build, "lb_ops", "lb_cpu_features", *(f"lb_isa_{isa}" for isa in isas))
    objects = list(aarch64_build.glob("CMakeFiles/lb_*.dir/**/*.o"))
    sources = list((kernel_build.ROOT / "kernels").rglob("*.cpp"))
    # What is built against torch_npu is a library of its own, and one file is for wheels.
    sources = [path for path in sources if "npu" not in path.stem.split("_") and path.parent.name != "npu"]
    sources.remove(kernel_build.ROOT / "kernels" / "common" / "manylinux_2_28.cpp")
    loops = [path for path in sources if path.stem.endswith("_cpu_isa")]
    sources = [path for path in sources if path.parent.name != "runner"]
    assert len(objects) == len(sources) + len(loops) * (len(isas) - 1)
    for path in objects:
        assert int.from_bytes(path.read_bytes()[18:20], "little") == 183, "e_machine is not EM_AARCH64"


@pytest.mark.parametrize(("cpu", "best"), CPUS.items())
def test_the_best_that_a_cpu_has_is_detected(aarch64_build: Path, cpu: str, best: str) -> None:
    kernel_build.build(aarch64_build, "detect_isa")
    assert emulate(aarch64_build / "csrc" / "detect_isa", cpu).stdout.split() == [best]


# On the weakest and on the strongest CPU; to compile the loops themselves takes minutes of a core.
@pytest.mark.parametrize(("cpu", "arm_isa"), [("cortex-a57", "baseline"), ("max,sve-max-vq=1", "i8mm_bf16")])
def test_what_loops_are_made_of(aarch64_build: Path, cpu: str, arm_isa: str) -> None:
    passes(aarch64_build, "vec_test", cpu, arm_isa)


@pytest.mark.full
@pytest.mark.parametrize("program", ["vec_test", "loops_test"])
@pytest.mark.parametrize(("cpu", "arm_isa"), FORCED)
def test_loops_run(aarch64_build: Path, program: str, cpu: str, arm_isa: str) -> None:
    passes(aarch64_build, program, cpu, arm_isa)


@pytest.mark.full
@pytest.mark.parametrize(("cpu", "arm_isa"), [("cortex-a57", "dotprod"), ("neoverse-n1", "i8mm_bf16")])
def test_what_a_cpu_lacks_stops_there(aarch64_build: Path, cpu: str, arm_isa: str) -> None:
    # That the emulator takes no more than the CPU does; else the tests above would say nothing of detection.
    kernel_build.build(aarch64_build, f"loops_test_{arm_isa}")
    done = emulate(aarch64_build / "csrc" / f"loops_test_{arm_isa}", cpu)
    assert done.returncode in (-signal.SIGILL, 128 + signal.SIGILL)
