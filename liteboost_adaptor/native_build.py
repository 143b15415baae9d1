"""Compile the kernels for torch and torch_npu as installed now, from the sources shipped in the package."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import config, native, native_npu
from .errors import NativeLibraryError

#: Called with (steps done, steps in all, what is being done); the total is 0 while it is not known.
Progress = Callable[[int, int, str], None]

_STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)")
_TAIL_LINES = 25


@dataclass(frozen=True)
class Tools:
    """The programs a build needs."""

    cmake: Path
    generator: str
    make: Path


@dataclass(frozen=True)
class Built:
    """What a build made.

    Attributes:
        library: ``_C.so``.
        npu: ``_C_npu.so``, None where it was not built.
        npu_fault: Why not, if it was tried; else None.
    """

    library: Path
    npu: Path | None = None
    npu_fault: str | None = None


def build_cpu(progress: Progress = lambda done, total, what: None, jobs: int | None = None) -> Path:
    """`build` without the NPU kernels; return where ``_C.so`` lies."""
    return build(progress, jobs, npu=False).library


def build(
    progress: Progress = lambda done, total, what: None,
    jobs: int | None = None,
    npu: bool = True,
    runner: bool = False,
) -> Built:
    """Configure, compile, try and put in place the kernels for the installed torch and torch_npu.

    A process that starts meanwhile sees the libraries of before or the new ones, never a part of them: the
    folder is made elsewhere on the same file system and renamed. This process keeps what it has loaded.

    Args:
        progress: Told of every step.
        jobs: Compilers at a time; None leaves it to the build tool (one a core with ninja).
        npu: Build ``_C_npu.so`` as well where torch_npu is installed. If that fails, the other is built.
        runner: Build ``liteboost-run`` and its library, too, which run exported folders.

    Raises:
        NativeLibraryError: Sources, torch, CMake, a build tool or a compiler are missing, or the build
            failed; the message ends with the last lines of the output.
    """
    sources = find_sources()
    torch = native.torch_version()
    if torch is None:
        raise NativeLibraryError(
            "building the kernels needs an installed torch, and this Python has none "
            f"({sys.executable}). Install torch, then run `{native.BUILD_COMMAND}` again."
        )
    tools = find_tools()
    parent = _writable_folder()
    npu = npu and native_npu.torch_npu_version() is not None
    npu_fault = None
    with tempfile.TemporaryDirectory(prefix=".building-", dir=parent) as scratch:
        stage, work = Path(scratch) / "stage", Path(scratch) / "work"
        run = functools.partial(_compile, sources, work, stage, tools, progress, jobs, runner)
        progress(0, 0, f"configuring for torch {torch}")
        try:
            run(npu=npu)
        except NativeLibraryError as fault:
            if not npu:
                raise
            npu_fault = str(fault)
            progress(0, 0, "without the NPU kernels")
            run(npu=False)  # in the same folder: what is compiled is not compiled again
        progress(0, 0, "loading the library in a fresh process")
        _try(stage / native.LIBRARY, torch)
        if npu and npu_fault is None:
            npu_fault = _npu_fault(stage)
        home = parent / f"{native.build_key(torch)}-{time.time_ns():x}"
        stage.rename(home)
    _remove_older(parent, torch, keep=home)
    library = home / native_npu.LIBRARY
    return Built(home / native.LIBRARY, library if library.is_file() else None, npu_fault)


def _compile(
    sources: Path,
    work: Path,
    stage: Path,
    tools: Tools,
    progress: Progress,
    jobs: int | None,
    runner: bool,
    npu: bool,
) -> None:
    _run(
        [
            *(tools.cmake, "-S", sources, "-B", work, "-G", tools.generator),
            f"-DCMAKE_MAKE_PROGRAM={tools.make}",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DLITEBOOST_INSTALL_DIR=.",
            f"-DLITEBOOST_NPU={'ON' if npu else 'OFF'}",
            f"-DLITEBOOST_RUNNER={'ON' if runner else 'OFF'}",
        ],
        progress,
    )
    _run([tools.cmake, "--build", work, "--parallel", str(jobs or os.cpu_count() or 1)], progress)
    _run([tools.cmake, "--install", work, "--prefix", stage], progress)


def _npu_fault(stage: Path) -> str | None:
    """Check the new NPU library, and load it where torch_npu can be imported; remove it if it is no good."""
    library = stage / native_npu.LIBRARY
    if not library.is_file():
        return "torch_npu does not lie beside torch, where its headers are sought"
    fault = native_npu.inspect(library).reason
    if fault is None:
        # What a machine without CANN cannot tell is seen on the one that has an NPU.
        code = (
            "import sys, torch\n"
            "torch.ops.load_library(sys.argv[1])\n"
            "try:\n    import torch_npu\nexcept Exception:\n    sys.exit(0)\n"
            "torch.ops.load_library(sys.argv[2])\ntorch.ops.liteboost._npu_build_info()"
        )
        fault = _fault_in_fresh_process(code, stage / native.LIBRARY, library)
    if fault is not None:
        library.unlink()
    return fault


def find_sources() -> Path:
    """The folder ``kernels`` of an installed package (wheel or editable) or of a checkout.

    Raises:
        NativeLibraryError: The sources are in neither place.
    """
    import liteboost_adaptor

    places = [Path(folder) / "kernels" for folder in liteboost_adaptor.__path__]
    places.append(native.PACKAGE_DIR.parent / "kernels")
    for place in places:
        if (place / "CMakeLists.txt").is_file():
            return place
    raise NativeLibraryError(
        f"the sources of the kernels are not where the package keeps them ({places[0]}). "
        "Install liteboost_adaptor again."
    )


def find_tools() -> Tools:
    """CMake and ninja or make: the ones installed with pip beside this Python, else those on the PATH.

    Raises:
        NativeLibraryError: One of them is missing; says how to get it.
    """
    cmake = find_program("cmake")
    if cmake is None:
        raise NativeLibraryError(
            "building the kernels needs CMake, and none was found beside this Python or on the PATH. "
            "Install one, for example with `pip install cmake ninja`."
        )
    if ninja := find_program("ninja"):
        return Tools(cmake, "Ninja", ninja)
    if make := find_program("make"):
        return Tools(cmake, "Unix Makefiles", make)
    raise NativeLibraryError(
        "building the kernels needs ninja or make, and neither was found beside this Python or on the PATH. "
        "Install one, for example with `pip install ninja`."
    )


def find_program(name: str) -> Path | None:
    """A program installed with pip beside this Python, else one on the PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return Path(found) if found else None


def _writable_folder() -> Path:
    refusals = []
    for folder in native.build_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                return folder
        except OSError as fault:
            refusals.append(f"{folder}: {fault.strerror}")
    raise NativeLibraryError(
        f"the compiled library can be kept nowhere: {'; '.join(refusals)}. "
        "Make one of these folders writable, or set XDG_CACHE_HOME to one that is."
    )


def _run(command: list[str | Path], progress: Progress) -> None:
    """Run one CMake command, turning its lines into progress and its failure into a typed error."""
    lines: list[str] = []
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if step := _STEP.match(line):
                    progress(int(step[1]), int(step[2] or 100), step[3])
        except BaseException:
            process.kill()
            raise
    code = process.returncode
    if code == 0:
        return
    output = "\n".join(lines[-_TAIL_LINES:])
    if "No CMAKE_CXX_COMPILER could be found" in output or "CMAKE_CXX_COMPILER not set" in output:
        raise NativeLibraryError(
            "building the kernels needs a C++20 compiler, and CMake found none. "
            f"Install one, for example g++, or name it in CXX.\n{output}"
        )
    raise NativeLibraryError(
        f"building the kernels failed: `{' '.join(str(part) for part in command[:2])} …` ended with status "
        f"{code}. The last lines of its output:\n{output}"
    )


#: An error that says what it found: a library with a C++ runtime of its own cannot print the number, or dies.
_PRINTS_A_NUMBER = """
import sys, torch
torch.ops.load_library(sys.argv[1])
try:
    torch.ops.liteboost.rms_norm(torch.zeros(1, 4), torch.zeros(4), -3.0)
except ValueError as refusal:
    if "got -3" not in str(refusal):
        raise SystemExit(f"It prints no numbers: linked with a C++ runtime of its own? It said: {refusal}")
"""


def _try(library: Path, torch: str) -> None:
    """Check the new library as `native` will, and load it in a process of its own."""
    if reason := native.inspect(library, torch).reason:
        raise NativeLibraryError(f"the library just built cannot be used: {reason}")
    if fault := _fault_in_fresh_process(_PRINTS_A_NUMBER, library):
        raise NativeLibraryError(f"the library just built {fault}")


def _fault_in_fresh_process(code: str, *libraries: Path) -> str | None:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, libraries)],
        # torch_npu without CANN would make `import torch` fail.
        env=config.child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    words = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
    return f"does not load (status {done.returncode}), so it was not installed:\n{words}"


def _remove_older(parent: Path, torch: str, keep: Path) -> None:
    """Remove what earlier builds left for this torch, but for the last: a process may be about to load it."""
    earlier = sorted(
        (path for path in parent.glob(f"{native.build_key(torch)}-*") if path != keep),
        key=lambda path: path.name,
    )
    for path in earlier[:-1]:
        shutil.rmtree(path, ignore_errors=True)
