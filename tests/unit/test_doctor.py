"""What doctor says of machines other than this one."""

from __future__ import annotations

import builtins
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from liteboost_adaptor import native
from liteboost_adaptor.cli import doctor as _  # noqa: F401
from liteboost_adaptor.environment import ascend, diagnosis
from liteboost_adaptor.environment.diagnosis import Diagnosis, Problem
from liteboost_adaptor.errors import NativeLibraryError

TOOLS = {"c++": "/usr/bin/c++", "cmake": None, "ninja": None, "make": "/usr/bin/make"}
NATIVE: dict[str, Any] = {"backend": "native", "path": "/a/_C.so", "isa": "avx2", "tools": TOOLS, "npu": None}
ASCEND: dict[str, Any] = {"devices": (), "cann_loadable": False, "cann_fault": "no libascendcl.so"}
ASCEND |= dict.fromkeys(("cann_version", "soc", "missing_operators", "cann_folder"))
ON_NPU = {
    "devices": ("/dev/davinci0", "/dev/davinci1"),
    "cann_loadable": True,
    "cann_version": "8.5.0",
    "soc": None,
    "missing_operators": ("aclnnRmsNorm", "aclnnSwiGlu"),
    "cann_folder": "/opt/cann",
}
NPU_KERNELS = {"path": "/a/_C_npu.so", "reason": None, "build_info": {"torch_npu": "2.9.0"}}


def said(*problems: Problem, native: dict[str, Any] = NATIVE, ascend: dict[str, Any] = ASCEND) -> str:
    module = sys.modules["liteboost_adaptor.cli.doctor"]  # the package has the function under this name
    cpu = {"name": "A CPU", "machine": "x86_64", "isas": ["baseline", "avx2"]}
    found = Diagnosis({"torch": "2.13.0", "peft": None}, cpu, native, ascend, {"level": 2}, list(problems))
    console = Console(width=200, file=io.StringIO())
    module._show(found, console)
    lines = console.file.getvalue().replace("│", " ").splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


@pytest.mark.parametrize(
    ("native", "ascend", "lines"),
    [
        ({}, {}, ["kernels /a/_C.so, running avx2", "CANN not loadable: no libascendcl.so", "NPUs none"]),
        ({}, {}, ["peft not installed", "instruction sets baseline, avx2", "build tools c++, make"]),
        ({"backend": "reference", "reason": "none built"}, {}, ["kernels none: none built"]),
        (
            {"backend": None, "reason": "torch is not installed"},
            {},
            ["kernels not loaded: torch is not installed"],
        ),
        ({"build_info": {"torch": "2.12", "compiler": "GCC 14"}}, {}, ["built for torch 2.12 with GCC 14"]),
        (
            {"npu": NPU_KERNELS},
            ON_NPU,
            [
                "NPUs /dev/davinci0, /dev/davinci1",
                "CANN version, SoC 8.5.0, ?",
                f"aclnn operators {len(ascend.OPERATORS) - 2} of {len(ascend.OPERATORS)} that we can use",
                "not in this CANN: aclnnRmsNorm, aclnnSwiGlu",
                "CANN folder /opt/cann",
                "NPU kernels /a/_C_npu.so, built for torch_npu 2.9.0",
            ],
        ),
        ({"npu": {**NPU_KERNELS, "reason": "none fit"}}, {}, ["NPU kernels none: none fit"]),
    ],
)
def test_every_part_of_a_machine_has_a_line(
    native: dict[str, Any], ascend: dict[str, Any], lines: list[str]
) -> None:
    found = said(native=NATIVE | native, ascend=ASCEND | ascend).splitlines()
    assert [line for line in lines if line not in found] == [] and "Everything is in place." in found


def test_problems_come_with_what_to_do() -> None:
    found = said(Problem("torch is old", "pip install torch", True), Problem("No CANN", "Install it"))
    assert "error: torch is old\n-> pip install torch\nnote: No CANN\n-> Install it" in found
    assert "Everything is in place." not in found


def fault(words: str, cause: str = "") -> ImportError:
    found = ImportError(words)
    found.__cause__ = OSError(cause) if cause else None
    return found


@pytest.mark.parametrize(
    ("torch_npu", "cann", "remedy"),
    [("2.9.0", "no CANN", "source CANN's set_env.sh"), (None, None, "Install torch again")],
)
def test_a_torch_that_does_not_import(
    torch_npu: str | None, cann: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without_torch(name: str, *how: Any) -> Any:
        if name == "torch":
            raise fault("it fails", "libc10.so")
        return imported(name, *how)

    monkeypatch.setattr(ascend, "torch_npu_version", lambda: torch_npu)
    monkeypatch.setattr(ascend, "cann_fault", lambda: cann)
    problems: list[Problem] = []
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_torch)
        found = diagnosis._native({"torch": "2.13.0"}, problems)
    assert (found["backend"], found["reason"]) == (None, "torch cannot be imported")
    (problem,) = problems
    assert problem.fatal and problem.what == "import torch fails: it fails (libc10.so)"
    assert remedy in problem.do


@pytest.mark.parametrize(
    ("tools", "remedy"),
    [
        (TOOLS, f"Install CMake (pip install cmake), then {native.BUILD_COMMAND}"),
        (TOOLS | {"cmake": "/usr/bin/cmake"}, native.BUILD_COMMAND),
        (
            dict.fromkeys(TOOLS),
            "Install a C++ compiler, CMake (pip install cmake), ninja (pip install ninja), then "
            f"{native.BUILD_COMMAND}",
        ),
    ],
)
def test_kernels_that_are_not_there(
    tools: dict[str, str | None], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = native.NativeStatus(False, reason="none fit torch 2.13")
    monkeypatch.setattr(diagnosis, "_tools", lambda: tools)
    monkeypatch.setattr(native, "load", lambda: status)
    problems: list[Problem] = []
    found = diagnosis._native({"torch": "2.13.0"}, problems)
    assert (found["backend"], found["reason"]) == ("reference", "none fit torch 2.13")
    words = "Models run their original code, without our kernels: none fit torch 2.13"
    assert problems == [Problem(words, remedy)]


@pytest.mark.parametrize("is_required", [False, True])
def test_kernels_without_torch_or_required(is_required: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise NativeLibraryError("they are required")

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "status", lambda: None)
    problems: list[Problem] = []
    found = diagnosis._native({"torch": "2.13.0" if is_required else None}, problems)
    if is_required:
        assert found["reason"] == "they are required" and problems[0].fatal
        assert (problems[0].what, problems[0].do) == ("they are required", native.BUILD_COMMAND)
    else:
        assert found["reason"] == "torch is not installed" and problems == []
        assert found["path"] is None or Path(found["path"]).is_file()
