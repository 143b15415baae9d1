"""Wheels with kernels for every supported torch: what is compiled against what, and what a wheel brings."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from sandbox import NO_COMPILER, ROOT, Sandbox

sys.path.insert(0, str(ROOT / "build_support"))
import torch_headers
import wheels

from liteboost_adaptor import native

#: What manylinux_2_28 has.
NEWEST = {"GLIBC": "2.28", "GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}


def test_the_releases_compiled_against_are_minor_versions_and_documented() -> None:
    for minor, release in torch_headers.RELEASES.items():
        assert native.minor_version(release) == minor
    (tested,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert native.minor_version(tested) in torch_headers.RELEASES
    minors = list(torch_headers.RELEASES)
    words = f"torch {minors[0]} to {minors[-1]}"
    for page in ("README.md", "docs/install.md"):
        assert words in (ROOT / page).read_text(encoding="utf-8"), page


def test_what_the_loader_looks_for_is_what_is_packed() -> None:
    assert native.PREBUILT == native.PACKAGE_DIR.parent / wheels.PREBUILT
    text = (ROOT / "kernels" / "cmake" / "wheel.cmake").read_text(encoding="utf-8")
    assert wheels.LOOPS in text


@pytest.fixture
def compiler() -> str:
    found = shutil.which("g++")
    if found is None or shutil.which("readelf") is None:
        pytest.skip("needs g++ and readelf")
    return found


def test_names_that_nobody_has_are_found(compiler: str, tmp_path: Path) -> None:
    source = tmp_path / "needs.cpp"
    source.write_text(
        'extern "C" { int of_torch(); int of_nobody(); void GOMP_parallel();\n'
        "__attribute__((weak)) int perhaps(); }\n"
        "int all() { GOMP_parallel(); return of_torch() + of_nobody() + (perhaps ? perhaps() : 0); }\n"
    )
    library = tmp_path / "needs.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O0", "-o", str(library), str(source)], check=True)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / torch_headers.EXPORTED).write_text("of_torch\nanother")
    assert torch_headers.missing(library, tmp_path) == {"of_nobody"}
    assert "_Z3allv" in torch_headers.exported_names(library)


# What `kernels/common/manylinux_2_28.cpp` stands in for, used as torch's headers use it.
USES = r"""
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int, char** arguments) {
  std::ostringstream stream;
  stream << "abc" << 12;
  std::cout << stream.str() << "|" << std::move(stream).str() << "|" << stream.str() << "|";
  std::exception_ptr thrown;
  try { throw std::runtime_error("boom"); } catch (...) { thrown = std::current_exception(); }
  { std::exception_ptr second = thrown, third; third = second; second = nullptr; }
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& fault) { std::cout << fault.what() << "|"; }
  thrown = nullptr;
  try {
    std::__throw_bad_array_new_length();
  } catch (const std::bad_alloc& fault) { std::cout << fault.what() << "|"; }
  auto shared = std::make_shared<int>(3), other = shared;
  pthread_t thread;
  auto set = [](void* value) -> void* { return *static_cast<int*>(value) = 7, nullptr; };
  pthread_create(&thread, nullptr, set, shared.get());
  pthread_join(thread, nullptr);
  struct stat found;
  const int file = open(arguments[1], O_RDONLY);
  std::cout << *other << other.use_count() << "|" << (fstat(file, &found) == 0 ? found.st_size : -1);
}
"""


def asked_of_libraries(library: Path) -> list[tuple[str, str]]:
    """(kind, version) of all that a library or program asks of the C and C++ libraries."""
    text = subprocess.run(
        ["objdump", "--private-headers", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)$", text, re.MULTILINE)


def test_what_is_new_in_the_c_and_cpp_libraries_is_done_by_what_is_old(compiler: str, tmp_path: Path) -> None:
    if platform.machine() not in wheels.MACHINES:
        pytest.skip(f"there is no wheel for {platform.machine()}")
    (tmp_path / "uses.cpp").write_text(USES)
    shim = ROOT / "kernels" / "common" / "manylinux_2_28.cpp"
    how = [compiler, "-std=c++20", "-O2", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    for name, sources in (("with", ["uses.cpp", str(shim)]), ("without", ["uses.cpp"])):
        subprocess.run([*how, "-o", name, *sources], cwd=tmp_path, check=True)
    # The start of a program, unlike that of a library, asks for a new version itself.
    of_cpp = [each for each in asked_of_libraries(tmp_path / "with") if each[0] in ("GLIBCXX", "CXXABI")]
    assert of_cpp and all(Version(version) <= Version(NEWEST[name]) for name, version in of_cpp)
    printed = {
        name: subprocess.run(
            [f"./{name}", "uses.cpp"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        for name in ("with", "without")
    }
    size = (tmp_path / "uses.cpp").stat().st_size
    assert printed["with"].stdout == f"abc12|abc12||boom|std::bad_array_new_length|72|{size}"
    assert printed["with"].stdout == printed["without"].stdout


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SystemExit, match="aarch64-linux-gnu-g\\+\\+, which is not on the PATH"):
        torch_headers.compiler("aarch64")


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel for the torch at hand brings, compiled as for a wheel."""
    machine = platform.machine()
    if shutil.which(f"{machine}-linux-gnu-g++") is None or machine not in wheels.MACHINES:
        pytest.skip(f"needs {machine}-linux-gnu-g++, with which wheels are compiled")
    work = tmp_path_factory.mktemp("wheel")
    options = wheels.configured(machine, Path(torch.__file__).parent)
    jobs = os.cpu_count() or 1
    stage = work / "prebuilt"
    wheels.compiled(work / "loops", stage, jobs, options, "liteboost_loops", "loops")
    place = stage / f"torch-{native.minor_version(torch.__version__)}"
    wheels.compiled(work / "ops", place, jobs, {**options, "LITEBOOST_LOOPS": stage / wheels.LOOPS})
    return stage


@pytest.mark.full
def test_its_libraries_ask_for_nothing_newer_than_the_tag_says(prebuilt: Path) -> None:
    libraries = sorted(prebuilt.rglob("*.so"))
    assert [library.name for library in libraries] == [wheels.LOOPS, native.LIBRARY]
    for library in libraries:
        versions = asked_of_libraries(library)
        assert len(versions) >= 3
        for name, version in versions:
            assert Version(version) <= Version(NEWEST[name]), (library, name, version)


@pytest.mark.full
def test_installed_without_a_compiler_it_has_kernels_for_its_torches(
    prebuilt: Path, sources: Path, sandbox: Callable[..., Sandbox]
) -> None:
    box = sandbox()
    assert box.pip_install(sources, **NO_COMPILER).returncode == 0
    place = box.site_packages / wheels.PREBUILT
    shutil.copytree(prebuilt, place)
    look = box.look()
    assert look["loaded"] and look["value"] == 3.0 and look["bound"] == 1 and look["warnings"] == []
    assert Path(look["path"]).is_relative_to(place.resolve())
    (found,) = place.glob("torch-*")
    found.rename(place / "torch-1.2")
    look = box.look()
    assert not look["loaded"] and look["bound"] == 0
    (sentence,) = look["warnings"]
    assert f"has kernels for releases of torch 1.2, found {torch.__version__}" in sentence
    assert native.BUILD_COMMAND in sentence
