"""`build`: what it needs, what it says when something is missing, how a library is put in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from liteboost_adaptor import native, native_build, native_npu
from liteboost_adaptor.cli import main
from liteboost_adaptor.errors import NativeLibraryError

# Installs a library that is there already where the real one compiles it.
PREBUILT = """
cmake_minimum_required(VERSION 3.18)
project(prebuilt LANGUAGES NONE)
install(FILES "{library}" "{info}" DESTINATION "${{LITEBOOST_INSTALL_DIR}}")
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In place of the folders libraries are built into."""
    places = [tmp_path / "package" / "_native", tmp_path / "cache"]
    monkeypatch.setattr(native, "build_folders", lambda: tuple(places))
    return places


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the sources of the kernels; a test writes the CMakeLists.txt."""
    folder = tmp_path / "some kernels"
    folder.mkdir()
    monkeypatch.setattr(native_build, "find_sources", lambda: folder)
    if native_build.find_program("cmake") is None:
        pytest.skip("needs CMake")
    return folder


def use_prebuilt(sources: Path, library: Path | None = None) -> None:
    found = native.find()
    if found is None or found.reason is not None:
        pytest.skip("needs the compiled kernels")
    text = PREBUILT.format(library=library or found.path, info=found.path.parent / native.BUILD_INFO)
    (sources / "CMakeLists.txt").write_text(text)


def test_library_is_put_in_place_and_older_ones_are_pruned(folders: list[Path], sources: Path) -> None:
    use_prebuilt(sources)
    told: list[str] = []
    built = [native_build.build_cpu(lambda done, total, what: told.append(what)) for _ in range(3)]
    assert built[-1].is_file() and native.inspect(built[-1], torch.__version__).reason is None
    assert any("configuring" in what for what in told) and any("fresh process" in what for what in told)
    # The last but one stays: a process may have chosen it and not loaded it yet.
    assert sorted(path.name for path in folders[0].iterdir()) == sorted(
        path.parent.name for path in built[1:]
    )
    assert built[-1] in [candidate.path for candidate in native.candidates()]


def test_cache_is_used_where_the_package_cannot_be_written(folders: list[Path], sources: Path) -> None:
    use_prebuilt(sources)
    folders[0].parent.mkdir()
    folders[0].write_text("in the way")
    assert native_build.build_cpu().is_relative_to(folders[1])
    folders[1].rename(folders[1].with_suffix(".old"))
    folders[1].write_text("in the way too")
    with pytest.raises(NativeLibraryError, match="XDG_CACHE_HOME") as caught:
        native_build.build_cpu()
    assert all(str(folder) in str(caught.value) for folder in folders)


def test_library_that_does_not_load_is_not_put_in_place(folders: list[Path], sources: Path) -> None:
    found = native.find()
    if found is None or found.reason is not None:
        pytest.skip("needs the compiled kernels")
    broken = sources / native.LIBRARY
    broken.write_bytes(found.path.read_bytes().replace(b"libtorch_cpu.so\0", b"libtorch_gone.s\0"))
    use_prebuilt(sources, broken)
    with pytest.raises(NativeLibraryError, match=r"does not load[\s\S]*libtorch_gone\.s"):
        native_build.build_cpu()
    assert list(folders[0].iterdir()) == []


def test_failed_build_ends_with_its_output(folders: list[Path], sources: Path) -> None:
    (sources / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        "project(broken LANGUAGES NONE)\n"
        'message(FATAL_ERROR "kettle")\n'
    )
    with pytest.raises(NativeLibraryError, match=r"ended with status 1[\s\S]*kettle"):
        native_build.build_cpu()
    assert list(folders[0].iterdir()) == []


def test_missing_compiler_is_named(
    folders: list[Path], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    (sources / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(any LANGUAGES CXX)\n"
    )
    with pytest.raises(NativeLibraryError, match=r"needs a C\+\+20 compiler"):
        native_build.build_cpu()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"cmake"}, "needs CMake.*pip install cmake"),
        ({"ninja", "make"}, "needs ninja or make.*pip install ninja"),
    ],
)
def test_missing_tools_are_named(missing: set[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native_build, "find_program", lambda name: None if name in missing else Path("/usr/bin") / name
    )
    with pytest.raises(NativeLibraryError, match=message):
        native_build.find_tools()


def test_make_does_where_ninja_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native_build, "find_program", lambda name: None if name == "ninja" else Path("/usr/bin") / name
    )
    assert native_build.find_tools().generator == "Unix Makefiles"


def test_missing_torch_and_missing_sources_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: None)
    with pytest.raises(NativeLibraryError, match="needs an installed torch"):
        native_build.build_cpu()
    monkeypatch.setattr("liteboost_adaptor.__path__", [str(tmp_path)])
    monkeypatch.setattr(native, "PACKAGE_DIR", tmp_path / "liteboost_adaptor")
    with pytest.raises(NativeLibraryError, match="Install liteboost_adaptor again"):
        native_build.find_sources()


def test_npu_kernels_without_torch_npu_are_refused_plainly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_npu, "torch_npu_version", lambda: None)
    assert main(["build", "--npu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: `build --npu`") and "torch_npu is not installed" in said


#: Has an NPU part that fails to configure, as one that does not compile would fail later.
FAILING_NPU = """
if(LITEBOOST_NPU)
  message(FATAL_ERROR "the headers of torch_npu are another version's")
endif()
"""


def test_failing_npu_kernels_leave_those_of_the_cpu(
    folders: list[Path], sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_prebuilt(sources)
    with (sources / "CMakeLists.txt").open("a") as file:
        file.write(FAILING_NPU)
    monkeypatch.setattr(native_npu, "torch_npu_version", lambda: "2.13.0")
    built = native_build.build()
    assert built.library.is_file() and built.npu is None
    assert "the headers of torch_npu are another version's" in built.npu_fault
    assert main(["build"]) == 0
    expected = "warning: the NPU kernels were not built, and models on an NPU run their original code"
    assert expected in capsys.readouterr().err
    assert main(["build", "--npu"]) == 1
    assert "error: the NPU kernels were not built" in capsys.readouterr().err
    # Left out, they cannot fail.
    assert native_build.build(npu=False).npu_fault is None


def test_npu_library_that_is_no_good_is_not_put_in_place(
    folders: list[Path], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_prebuilt(sources)
    (sources / native_npu.LIBRARY).write_bytes(b"no library")
    (sources / native_npu.BUILD_INFO).write_text(
        json.dumps({"torch": torch.__version__, "torch_npu": "2.13.0"})
    )
    names = f"{native_npu.LIBRARY} {native_npu.BUILD_INFO}"
    with (sources / "CMakeLists.txt").open("a") as file:
        file.write(f'install(FILES {names} DESTINATION "${{LITEBOOST_INSTALL_DIR}}")\n')
    monkeypatch.setattr(native_npu, "torch_npu_version", lambda: "2.13.0")
    built = native_build.build()
    assert built.npu is None and "is no 64-bit ELF library" in built.npu_fault
    assert not (built.library.parent / native_npu.LIBRARY).exists()


def test_the_runner_is_built_where_it_is_asked_for(
    folders: list[Path], sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_prebuilt(sources)
    (sources / "liteboost-run").write_text("runs folders")
    with (sources / "CMakeLists.txt").open("a") as file:
        file.write(
            "if(LITEBOOST_RUNNER)\n"
            '  install(FILES liteboost-run DESTINATION "${LITEBOOST_INSTALL_DIR}")\nendif()\n'
        )
    assert main(["build"]) == 0
    assert "liteboost-run" not in capsys.readouterr().out
    assert main(["build", "--runner"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "liteboost-run" in line]
    assert Path(line.split(": ")[1]).read_text() == "runs folders"


def test_command_prints_json(folders: list[Path], sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use_prebuilt(sources)
    assert main(["build", "--json", "--jobs", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Path(printed["path"]).is_file() and printed["build_info"]["torch"] == torch.__version__


def test_tools_are_found_beside_this_python() -> None:
    found = native_build.find_program("cmake")
    if found is None:
        pytest.skip("needs CMake")
    assert subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
    assert native_build.find_program("no-such-program") is None
    assert native_build.find_program(Path(sys.executable).name) is not None
