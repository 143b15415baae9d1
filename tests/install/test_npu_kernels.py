"""Installing beside a torch_npu without CANN: where its kernels do not compile, those for the CPU stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import Sandbox

from liteboost_adaptor import native

#: Installs the CPU library that is there already, and has an NPU part that cannot be configured.
PREBUILT = """
cmake_minimum_required(VERSION 3.18)
project(prebuilt LANGUAGES NONE)
if(NOT DEFINED LITEBOOST_NPU OR LITEBOOST_NPU)
  message(FATAL_ERROR "kettle")
endif()
install(FILES "{library}" "{info}" DESTINATION liteboost_adaptor)
"""


@pytest.fixture
def box(sources: Path, sandbox: Callable[..., Sandbox]) -> Sandbox:
    """A Python that has a torch_npu, which cannot be imported; and the sources with `PREBUILT`."""
    found = native.find()
    if found is None or found.reason is not None:
        pytest.skip("needs the compiled kernels")
    text = PREBUILT.format(library=found.path, info=found.path.parent / native.BUILD_INFO)
    (sources / "CMakeLists.txt").write_text(text)
    made = sandbox("torch_npu")
    package = made.site_packages / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise ImportError('libascendcl.so: cannot open shared object file')\n"
    )
    (package / "version.py").write_text("__version__ = '2.13.0'\n")
    return made


@pytest.mark.parametrize(
    "how", [(), pytest.param(("--editable",), marks=pytest.mark.full)], ids=["wheel", "editable"]
)
def test_failing_npu_kernels_leave_those_of_the_cpu(
    how: tuple[str, ...], box: Sandbox, sources: Path
) -> None:
    done = box.pip_install(*how, sources)
    assert done.returncode == 0, done.stderr
    assert "the kernels for NPUs could NOT be built" in done.stdout + done.stderr
    look = box.look()
    assert look["loaded"] and look["value"] == 3.0


def test_required_native_kernels_are_all_of_them(box: Sandbox, sources: Path) -> None:
    done = box.pip_install(sources, LITEBOOST_REQUIRE_NATIVE="1")
    assert done.returncode != 0 and "kettle" in done.stdout + done.stderr


def test_sources_of_the_npu_kernels_are_installed(box: Sandbox, sources: Path) -> None:
    assert box.pip_install(sources).returncode == 0
    done = box.run("-m", "liteboost_adaptor", "cmake-dir")
    folder = Path(done.stdout.strip())
    assert done.returncode == 0 and (folder / "liteboost_op.cmake").is_file()
    assert {path.name for path in (folder.parent / "npu").iterdir()} >= {
        "CMakeLists.txt",
        "aclnn.h",
        "aclnn.cpp",
    }
