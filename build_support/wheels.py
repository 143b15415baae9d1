"""Build the wheels that carry kernels for every supported torch: one for each architecture (`make wheels`).

Decision 61 says what is in them. For each architecture the loops are compiled once, the ops once for each
minor version of torch (`torch_headers`); the rest is the wheel that has no kernels, into which they are put.
auditwheel names the tag.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch_headers

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
#: The newest C library that may be asked of a machine: torch's own wheels ask for it, too.
NEWEST_GLIBC = (2, 28)
PREBUILT = Path("liteboost_adaptor") / "_prebuilt"
LOOPS = "libliteboost_loops.so"
LARGEST = 8 << 20


def main() -> None:
    """Build what the command line names; all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES)
    parser.add_argument(
        "--torch", nargs="+", choices=torch_headers.RELEASES, default=list(torch_headers.RELEASES)
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels go (dist)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "wheels", help="what is kept for next time"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (one a core)"
    )
    chosen = parser.parse_args()
    for machine in chosen.machine:
        wheel = build(machine, chosen.torch, chosen.dist, chosen.work, chosen.jobs)
        print(f"{wheel} ({wheel.stat().st_size / (1 << 20):.1f} MiB), torch {', '.join(chosen.torch)}")  # noqa: T201


def build(machine: str, torches: list[str], dist: Path, work: Path, jobs: int) -> Path:
    """The wheel of ``machine`` for minor versions ``torches``.

    Raises:
        SystemExit: A compiler is missing, a library needs a name that its torch does not have, or the wheel
            is larger than `LARGEST` or asks for a newer C library than `NEWEST_GLIBC`.
        subprocess.CalledProcessError: CMake, pip, auditwheel or another program failed, and said why.
    """
    prebuilt = work / machine / "prebuilt"
    shutil.rmtree(prebuilt, ignore_errors=True)
    prefixes = {
        minor: torch_headers.fetched(torch_headers.RELEASES[minor], machine, work / "torch")
        for minor in torches
    }
    # They know no torch; which one it is configured with makes no difference.
    options = configured(machine, prefixes[torches[0]])
    compiled(work / machine / "loops", prebuilt, jobs, options, "liteboost_loops", "loops")
    for minor, prefix in prefixes.items():
        options = {**configured(machine, prefix), "LITEBOOST_LOOPS": prebuilt / LOOPS}
        compiled(work / machine / f"torch-{minor}", prebuilt / f"torch-{minor}", jobs, options)
        unknown = torch_headers.missing(prebuilt / f"torch-{minor}" / "_C.so", prefix)
        unknown -= torch_headers.exported_names(prebuilt / LOOPS)
        if unknown:
            raise SystemExit(
                f"the library for torch {minor} on {machine} needs what nobody has: {sorted(unknown)}"
            )
    wheel = audited(assembled(machine, prebuilt, work / machine), dist)
    if wheel.stat().st_size > LARGEST:
        raise SystemExit(f"{wheel} has {wheel.stat().st_size} bytes; a wheel shall have at most {LARGEST}")
    return wheel


def configured(machine: str, prefix: Path) -> dict[str, object]:
    """CMake's variables for ``machine`` and the torch in ``prefix``."""
    options: dict[str, object] = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": torch_headers.compiler(machine),
        "Torch_DIR": prefix / "share" / "cmake" / "Torch",
        "LITEBOOST_INSTALL_DIR": ".",
        "LITEBOOST_NPU": "OFF",
        "LITEBOOST_WERROR": "ON",
        "LITEBOOST_WHEEL": "ON",
    }
    if machine != platform.machine():
        options |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
    return options


def compiled(
    work: Path,
    stage: Path,
    jobs: int,
    options: dict[str, object],
    target: str = "all",
    component: str = "Unspecified",
) -> None:
    """Compile a target in ``work`` and install a component, without its debugging symbols, into ``stage``."""
    defined = [f"-D{name}={value}" for name, value in options.items()]
    _run("cmake", "-S", ROOT / "kernels", "-B", work, "-G", "Ninja", *defined)
    _run("cmake", "--build", work, "--parallel", jobs, "--target", target)
    _run("cmake", "--install", work, "--prefix", stage, "--strip", "--component", component)


def assembled(machine: str, prebuilt: Path, work: Path) -> Path:
    """The wheel that has no kernels, with those in ``prebuilt``."""
    made = work / "wheel"
    shutil.rmtree(made, ignore_errors=True)
    pure = ["--config-settings=wheel.cmake=false", "--config-settings=wheel.platlib=false"]
    how = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    with tempfile.TemporaryDirectory() as scratch:
        _run(sys.executable, "-m", "pip", "wheel", *how, *pure, "--wheel-dir", scratch, ROOT)
        (wheel,) = Path(scratch).glob("*.whl")
        _run(sys.executable, "-m", "wheel", "unpack", "--dest", scratch, wheel)
        (tree,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        shutil.copytree(prebuilt, tree / PREBUILT)
        (metadata,) = tree.glob("*.dist-info/WHEEL")
        text = metadata.read_text(encoding="utf-8")
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        metadata.write_text(text.replace("py3-none-any", f"py3-none-linux_{machine}"), encoding="utf-8")
        made.mkdir()
        _run(sys.executable, "-m", "wheel", "pack", "--dest-dir", made, tree)
    (packed,) = made.glob("*.whl")
    return packed


def audited(wheel: Path, dist: Path) -> Path:
    """``wheel`` under the tag that auditwheel finds for it, in ``dist``.

    Raises:
        SystemExit: The tag is of a C library newer than `NEWEST_GLIBC`.
    """
    # Torch's libraries are found in the torch that is installed.
    outside = [f"--exclude={name}" for name in torch_headers.LIBRARIES]
    with tempfile.TemporaryDirectory() as scratch:
        how = ["--plat", "auto", "--only-plat", "--wheel-dir", scratch]
        _run(sys.executable, "-m", "auditwheel", "repair", *how, *outside, wheel)
        (named,) = Path(scratch).glob("*.whl")
        tag = re.search(r"-manylinux_(\d+)_(\d+)_", named.name)
        if tag is None or (int(tag[1]), int(tag[2])) > NEWEST_GLIBC:
            raise SystemExit(
                f"auditwheel names {named.name}: more is asked of glibc than {NEWEST_GLIBC} has. `auditwheel "
                "show` says what; kernels/common/manylinux_2_28.cpp is where it is done by older names"
            )
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(named, dist / named.name))


def _run(*command: object) -> None:
    """Run a program of this environment, or else of the PATH; a failure is an exception."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
