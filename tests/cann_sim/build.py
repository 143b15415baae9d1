"""Compiles the simulator, and links ``libopapi.so`` as a CANN release has it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .releases import DEFAULT_RELEASE, absent_in

SOURCE = Path(__file__).resolve().parent
ROOT = SOURCE.parents[1]


def build() -> Path:
    """Compiles what changed; returns the CMake build folder, under ``build/cann_sim`` of the checkout."""
    folder = _environment_folder()
    cmake_folder, stamp, wanted = folder / "cmake", folder / "sources", _source_hash()
    with _locked(folder):
        if stamp.exists() and stamp.read_text() == wanted:
            return cmake_folder
        sys.stderr.write(f"cann_sim: compiling into {cmake_folder}\n")
        options = [f"-DPython_EXECUTABLE={sys.executable}"]
        if shutil.which("ccache"):
            options.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        _run(_tool("cmake"), "-S", SOURCE, "-B", cmake_folder, *_generator(cmake_folder), *options)
        _run(_tool("cmake"), "--build", cmake_folder, "--parallel", os.cpu_count() or 1)
        stamp.write_text(wanted)
    return cmake_folder


def libraries(
    release: str = DEFAULT_RELEASE, soc: str | None = None, without: Iterable[str] = (), broken: bool = False
) -> Path:
    """The folder of libraries of a CANN release.

    ``libopapi.so`` exports no operator that came after ``release``, and none of ``without``. ``soc`` changes
    nothing here: on hardware too an operator that a SoC does not run is there, and refuses. ``broken``: of
    ``libopapi.so`` there is only the beginning, as after an interrupted copy.
    """
    del soc
    cmake_folder = build()
    hidden = sorted({*absent_in(release), *without})
    key = hashlib.sha256("\n".join([_source_hash(), str(broken), *hidden]).encode()).hexdigest()[:16]
    folder = cmake_folder.parent / f"lib-{key}"
    with _locked(cmake_folder.parent):
        if not folder.exists():
            _link(cmake_folder, folder, hidden, broken)
    return folder


def _link(cmake_folder: Path, folder: Path, hidden: list[str], broken: bool) -> None:
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for library in (cmake_folder / "lib").glob("*.so"):
        if library.name != "libopapi.so":
            shutil.copy(library, draft)
    script = draft / "exports.map"
    names = "".join(f"    {name}; {name}GetWorkspaceSize;\n" for name in hidden)
    script.write_text("{\n  global: *;\n" + (f"  local:\n{names}" if names else "") + "};\n")
    _run(
        *(_compiler(cmake_folder), "-shared", "-o", draft / "libopapi.so", "-Wl,-soname,libopapi.so"),
        *("-Wl,--whole-archive", cmake_folder / "libopapi_archive.a", "-Wl,--no-whole-archive"),
        *(f"-Wl,--version-script={script}", "-Wl,--no-undefined", "-Wl,-rpath,$ORIGIN"),
        *(f"-L{draft}", "-lascendcl", f"-L{torch_libraries()}", "-ltorch_cpu", "-lc10"),
    )
    if broken:
        os.truncate(draft / "libopapi.so", 48)
    draft.rename(folder)


def torch_libraries() -> Path:
    """The folder of PyTorch's own libraries."""
    return Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"


def _environment_folder() -> Path:
    """One folder for each Python environment: its headers and libraries are compiled against."""
    try:
        versions = [version("torch"), version("torch-npu")]
    except PackageNotFoundError as error:
        raise SystemExit(
            f"cann_sim: {error.name} is not installed in {sys.prefix}; the simulator needs it"
        ) from None
    key = hashlib.sha256("\n".join([sysconfig.get_paths()["purelib"], *versions]).encode()).hexdigest()[:12]
    folder = ROOT / "build" / "cann_sim" / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _source_hash() -> str:
    digest = hashlib.sha256()
    suffixes = {".cpp", ".h", ".inc", ".txt"}
    paths = [p for p in SOURCE.rglob("*") if p.suffix in suffixes or p.name == "build.py"]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(SOURCE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _compiler(cmake_folder: Path) -> str:
    cache = (cmake_folder / "CMakeCache.txt").read_text()
    return re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.MULTILINE).group(1)


def _generator(cmake_folder: Path) -> list[str]:
    if (cmake_folder / "CMakeCache.txt").exists():
        return []
    return ["-G", "Ninja"] if _find("ninja") else ["-G", "Unix Makefiles"]


def _find(tool: str) -> str | None:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(tool, path=beside)


def _tool(name: str) -> str:
    if found := _find(name):
        return found
    raise SystemExit(f"cann_sim: {name} is needed to build the simulator")


def _run(*command: object) -> None:
    environment = dict(os.environ)
    environment.pop("LD_LIBRARY_PATH", None)
    # Precompiled headers are cached only with these; paths are cached relative to the checkout.
    environment.setdefault(
        "CCACHE_SLOPPINESS", "pch_defines,time_macros,include_file_mtime,include_file_ctime"
    )
    environment.setdefault("CCACHE_BASEDIR", str(ROOT))
    environment.setdefault("CCACHE_NOHASHDIR", "1")
    text = [str(part) for part in command]
    done = subprocess.run(text, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = done.stdout + done.stderr
        raise SystemExit(f"cann_sim: {' '.join(text)} ended with {done.returncode}:\n{output[-8000:]}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
