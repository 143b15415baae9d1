"""What a comparison was made on: the device, CANN, torch_npu, and our own kernels."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__, native, native_npu
from ..environment import machine

HERE = Path(__file__).parent
#: Where Ascend's driver says which one it is.
DRIVER_VERSION = "/usr/local/Ascend/driver/version.info"


@functools.cache
def identity() -> dict[str, Any]:
    """All that an answer about an op on the NPU depends on, as JSON types. Read once per process."""
    status = native_npu.status()
    return {
        "soc": torch.ops.liteboost._npu_soc(),
        "cann": cann_version(),
        "torch": str(torch.__version__),
        "torch_npu": str(sys.modules["torch_npu"].__version__),
        "liteboost_adaptor": __version__,
        "kernels": _digest([status.path] if status and status.path else []),
        "cases": _digest([HERE / "case.py", HERE / "compare.py", *sorted((HERE / "cases").glob("*.py"))]),
        "operators": _operator_libraries(),
    }


def cann_version() -> str:
    """CANN's own version, ``"unknown"`` where it does not say."""
    try:
        return str(torch.npu.utils.get_cann_version()) or "unknown"
    except (AttributeError, RuntimeError):
        return "unknown"


def _operator_libraries() -> list[list[Any]]:
    """[path, bytes, time of change] of each library the operators were found in: vendors replace them."""
    paths = {found.get("library") for found in native_npu.operators().values()} - {None, ""}
    libraries = []
    for path in sorted(paths):
        try:
            facts = Path(path).stat()
        except OSError:  # replaced or renamed since it was loaded
            libraries.append([path])
        else:
            libraries.append([path, facts.st_size, facts.st_mtime_ns])
    return libraries


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def of_npu() -> dict[str, str]:
    """What a report on an NPU says of it."""
    here = identity()
    index = torch.npu.current_device()
    status = native_npu.status()
    return {
        **_versions(),
        "device": f"{torch.npu.get_device_name(index)}, {torch.npu.device_count()} of them",
        "memory": f"{torch.npu.get_device_properties(index).total_memory / 2**30:.0f} GiB",
        "SoC": here["soc"],
        "CANN": here["cann"],
        "driver": _driver_version(),
        "kernels": status.sentence if status else "none",
        "built with": _words(status.build_info if status else {}),
    }


def of_cpu() -> dict[str, str]:
    """What a report on the CPU says of it."""
    status = native.load()
    return {
        **_versions(),
        "device": f"{machine.cpu_name()} ({', '.join(machine.cpu_isas())})",
        "kernels": status.sentence,
        "built with": _words(status.build_info),
    }


def _versions() -> dict[str, str]:
    installed = {
        "liteboost_adaptor": __version__,
        "python": platform.python_version(),
        **machine.package_versions(),
    }
    installed["torch"] = str(torch.__version__)
    versions = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    return {"versions": versions, "system": platform.platform()}


def _driver_version() -> str:
    try:
        lines = Path(DRIVER_VERSION).read_text(encoding="utf-8").splitlines()
    except OSError as fault:
        return f"unknown ({DRIVER_VERSION}: {fault.strerror})"
    return "; ".join(line.strip() for line in lines if line.strip())


def _words(build_info: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in build_info.items()) or "unknown"
