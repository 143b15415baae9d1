"""What `doctor` reports: versions, processor, kernels, Ascend, and every problem with what to do about it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from typing import Any

from packaging.version import Version

from .. import __version__, config, native, native_build, native_npu
from ..errors import NativeLibraryError
from . import ascend, machine

#: Oldest versions the package works with; pyproject.toml states the same.
FLOORS = {"torch": "2.6", "transformers": "4.57", "wrapt": "1.16"}


@dataclass(frozen=True)
class Problem:
    """Something that is wrong: what was found, what to do, and whether anything works without it."""

    what: str
    do: str
    fatal: bool = False


@dataclass
class Diagnosis:
    """One machine and one Python, as found."""

    versions: dict[str, str | None]
    cpu: dict[str, Any]
    native: dict[str, Any]
    ascend: dict[str, Any]
    settings: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether scripts can run with the package at all, be it as without us."""
        return not any(problem.fatal for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain JSON types."""
        return {"usable": self.usable, **asdict(self)}


def diagnose() -> Diagnosis:
    """Look at everything, tolerating that any of it is missing, torch included."""
    problems: list[Problem] = []
    versions = {"python": platform.python_version(), "liteboost_adaptor": __version__}
    versions.update(machine.package_versions())
    # The metadata of a CUDA build leaves out which one it is, and a library is good for one.
    versions["torch"] = native.torch_version() or versions["torch"]
    _check_versions(versions, problems)
    return Diagnosis(
        versions=versions,
        cpu={"name": machine.cpu_name(), "machine": platform.machine(), "isas": machine.cpu_isas()},
        native={**_native(versions, problems), "npu": _npu_kernels(versions, problems)},
        ascend=_ascend(versions, problems),
        settings=asdict(config.settings()),
        problems=problems,
    )


def _check_versions(versions: dict[str, str | None], problems: list[Problem]) -> None:
    for name, floor in FLOORS.items():
        found = versions.get(name)
        if found is None:
            problems.append(Problem(f"{name} is not installed", f"pip install '{name}>={floor}'", True))
        elif Version(found) < Version(floor):
            problems.append(
                Problem(f"{name} {found} is older than {floor}", f"pip install '{name}>={floor}'", True)
            )


def _native(versions: dict[str, str | None], problems: list[Problem]) -> dict[str, Any]:
    tools = _tools()
    if versions["torch"] is None:
        found = native.find()
        path = str(found.path) if found else None
        return {"backend": None, "path": path, "reason": "torch is not installed", "tools": tools}
    try:
        import torch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as fault:
        problems.append(_torch_problem(fault))
        return {"backend": None, "path": None, "reason": "torch cannot be imported", "tools": tools}
    try:
        status = native.load()
    except NativeLibraryError as fault:
        problems.append(Problem(str(fault), native.BUILD_COMMAND, True))
        status = native.status() or native.NativeStatus(False, reason=str(fault))
    else:
        if not status.loaded:
            problems.append(_kernels_problem(status, tools))
        elif left_out := machine.isas_left_out(status.build_info):
            remedy = f"With GCC 11, Clang 12 or a newer compiler: {native.BUILD_COMMAND}"
            problems.append(Problem(left_out[0].upper() + left_out[1:], remedy))
    return {**status.to_dict(), "tools": tools}


def _tools() -> dict[str, str | None]:
    """What `build` would use, None where there is no such program."""
    compilers = (native_build.find_program(name) for name in ("c++", "g++", "clang++"))
    found = {"c++": next((path for path in compilers if path), None)}
    found.update({name: native_build.find_program(name) for name in ("cmake", "ninja", "make")})
    return {name: str(path) if path else None for name, path in found.items()}


def _torch_problem(fault: BaseException) -> Problem:
    words = f"import torch fails: {fault}"
    if fault.__cause__ is not None:
        words += f" ({fault.__cause__})"
    if ascend.torch_npu_version() and ascend.cann_fault():
        remedy = (
            "torch loads torch_npu, which needs CANN: source CANN's set_env.sh, or import liteboost_adaptor "
            "before torch, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    else:
        remedy = "Install torch again"
    return Problem(words, remedy, True)


def _kernels_problem(status: native.NativeStatus, tools: dict[str, str | None]) -> Problem:
    missing = [] if tools["c++"] else ["a C++ compiler"]
    missing += [] if tools["cmake"] else ["CMake (pip install cmake)"]
    missing += [] if tools["ninja"] or tools["make"] else ["ninja (pip install ninja)"]
    remedy = native.BUILD_COMMAND
    if missing:
        remedy = f"Install {', '.join(missing)}, then {remedy}"
    return Problem(f"Models run their original code, without our kernels: {status.reason}", remedy)


def _ascend(versions: dict[str, str | None], problems: list[Problem]) -> dict[str, Any]:
    state = ascend.survey()
    if state.torch_npu and not state.cann_loadable:
        problems.append(
            Problem(
                f"torch_npu {state.torch_npu} is installed, but CANN cannot be loaded ({state.cann_fault}). "
                "A program that imports torch before liteboost_adaptor fails at that import; with "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 transformers fails next: is_torch_npu_available() imports "
                "torch_npu wherever it is installed",
                _cann_remedy(state),
            )
        )
    if state.devices and not state.torch_npu:
        wanted = (versions["torch"] or "").partition("+")[0]
        problems.append(
            Problem(
                f"{len(state.devices)} NPU(s) are there, but torch_npu is not installed",
                f"pip install 'torch_npu=={wanted}'" if wanted else "Install torch and torch_npu",
            )
        )
    if state.torch_npu and versions["torch"] and _release(state.torch_npu) != _release(versions["torch"]):
        problems.append(
            Problem(
                f"torch_npu {state.torch_npu} is made for torch {_release(state.torch_npu)}, "
                f"found {versions['torch']}",
                f"pip install 'torch_npu=={_release(versions['torch'])}'",
            )
        )
    return asdict(state)


def _npu_kernels(versions: dict[str, str | None], problems: list[Problem]) -> dict[str, Any] | None:
    """The NPU library that would be loaded; None where torch_npu is not installed."""
    version = native_npu.torch_npu_version()
    if version is None or not versions["torch"]:
        return None
    found = native_npu.find()
    if found is None or found.reason is not None:
        reason = found.reason if found else f"none are compiled for torch_npu {version}"
        what = f"On an NPU models run their original code, without our kernels: {reason}"
        problems.append(Problem(what, f"{native.BUILD_COMMAND} --npu"))
        return {"path": str(found.path) if found else None, "reason": reason, "build_info": {}}
    return {"path": str(found.path), "reason": None, "build_info": dict(found.build_info)}


def _cann_remedy(state: ascend.AscendState) -> str:
    if state.cann_folder:
        return f"source {state.cann_folder}/set_env.sh"
    if state.devices:
        return "Install CANN and source its set_env.sh"
    return "Import liteboost_adaptor first, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall torch_npu"


def _release(version: str) -> str:
    return ".".join(str(part) for part in Version(version).release) if version != "unknown" else version
