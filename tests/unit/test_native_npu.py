"""Finding and checking the library of an NPU, on a machine that has none; loading it: tests/npu."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from pathlib import Path

import pytest
import torch

from liteboost_adaptor import native, native_npu
from liteboost_adaptor.environment import diagnosis


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that nothing speaks against: that for the CPU under another name, as it is not loaded."""
    found = native.find()
    if found is None or found.reason is not None:
        pytest.skip("needs the compiled kernels")
    path = tmp_path / "liteboost_adaptor" / native_npu.LIBRARY
    path.parent.mkdir()
    shutil.copy(found.path, path)
    change_info(
        path,
        torch=torch.__version__,
        torch_npu="2.13.0",
        processor=platform.machine(),
        schemas=found.build_info.get("schemas"),
    )
    monkeypatch.setattr(native, "build_folders", lambda: (tmp_path / "built",))
    monkeypatch.setattr(native_npu, "torch_npu_version", lambda: "2.13.0")
    monkeypatch.setattr(native_npu, "_packaged", lambda: [path])
    return path


def change_info(path: Path, **changes: object) -> None:
    place = path.parent / native_npu.BUILD_INFO
    before = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps({**before, **changes}))


def refusal(path: Path) -> str:
    reason = native_npu.inspect(path).reason
    assert reason is not None
    return reason


def test_library_beside_the_package_is_found(library: Path) -> None:
    found = native_npu.find()
    assert found is not None and found.path == library and found.reason is None
    assert found.build_info["torch_npu"] == "2.13.0"


def test_library_built_last_is_taken_and_a_refused_one_passed_over(library: Path, tmp_path: Path) -> None:
    home = tmp_path / "built" / f"{native.build_key(torch.__version__)}-1"
    shutil.copytree(library.parent, home)
    (home / native_npu.LIBRARY).touch()
    assert native_npu.find().path == home / native_npu.LIBRARY
    change_info(home / native_npu.LIBRARY, torch_npu="2.12.0")
    assert native_npu.find().path == library and len(native_npu.candidates()) == 2


def test_library_built_for_another_torch_npu_is_refused_by_name(library: Path) -> None:
    change_info(library, torch_npu="2.12.0")
    assert refusal(library) == f"{library} was built for torch_npu 2.12.0, found 2.13.0"


def test_library_built_for_another_torch_is_refused_by_name(library: Path) -> None:
    change_info(library, torch="2.12.0")
    assert refusal(library) == f"{library} was built for torch 2.12.0, found {torch.__version__}"


def test_library_without_torch_npu_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_npu, "torch_npu_version", lambda: None)
    assert refusal(library).endswith("was built for torch_npu 2.13.0, found no torch_npu")


def test_library_with_other_schemas_than_the_cpu_library_is_refused(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = native.Candidate(Path("/x/_C.so"), {"schemas": "0123"}, None)
    monkeypatch.setattr(native, "status", lambda: None)
    monkeypatch.setattr(native, "find", lambda: cpu)
    change_info(library, schemas="4567")
    assert refusal(library) == f"{library} was built from other sources than /x/_C.so"
    change_info(library, schemas="0123")
    assert native_npu.inspect(library).reason is None


def test_damaged_library_is_refused(library: Path) -> None:
    content = library.read_bytes()
    for size in (0, 3, 64, len(content) // 2, len(content) - 1):
        library.write_bytes(content[:size])
        assert refusal(library).startswith(str(library))


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_library_without_build_info_is_refused(library: Path, content: str | None) -> None:
    info = library.parent / native_npu.BUILD_INFO
    info.unlink() if content is None else info.write_text(content)
    assert f"no readable {native_npu.BUILD_INFO} beside it" in refusal(library)


def test_doctor_says_what_an_npu_would_run(library: Path) -> None:
    found = diagnosis.diagnose()
    assert found.native["npu"]["path"] == str(library) and found.native["npu"]["reason"] is None
    change_info(library, torch_npu="2.12.0")
    found = diagnosis.diagnose()
    assert "was built for torch_npu 2.12.0" in found.native["npu"]["reason"]
    (problem,) = [each for each in found.problems if "On an NPU" in each.what]
    assert problem.do == f"{native.BUILD_COMMAND} --npu" and not problem.fatal


def test_torch_npu_that_is_hidden_has_a_version_and_is_not_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    (package / "version.py").write_text("__version__ = '9.8.7'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert native_npu.torch_npu_version() == "9.8.7" and not native_npu.present()
