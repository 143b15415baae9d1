"""Finding, checking and loading the compiled library, above all what happens when it cannot be used."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liteboost_adaptor import native

# Loads with a folder of libraries in place of the package's own, twice, and says what came of it.
LOAD = """
import json, sys, threading, warnings
from pathlib import Path
from liteboost_adaptor import native

places = [Path(place) for place in sys.argv[1:]]
native._packaged = lambda: places
native.build_folders = lambda: ()
results = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    threads = [threading.Thread(target=lambda: results.append(native.load())) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    again = native.load()
import torch
value = torch.ops.liteboost.rms_norm(torch.ones(2, 8), torch.full((8,), 3.0), 1e-6)
assert all(each is again for each in results) and len(results) == 8
print(json.dumps({
    **again.to_dict(),
    "warnings": [str(w.message) for w in caught if "liteboost" in str(w.message)],
    "value": value.mean().item(),
}))
"""


@pytest.fixture(scope="module")
def library() -> Path:
    """A library that works with the torch that is installed."""
    found = native.find()
    if found is None or found.reason is not None:
        pytest.skip(f"needs the compiled kernels: {found.reason if found else 'there are none'}")
    return found.path


@pytest.fixture
def copy(library: Path, tmp_path: Path) -> Path:
    """A copy of it, with its build info, to be damaged."""
    shutil.copy(library, tmp_path)
    shutil.copy(library.parent / native.BUILD_INFO, tmp_path)
    return tmp_path / native.LIBRARY


def change_info(path: Path, **changes: object) -> None:
    place = path.parent / native.BUILD_INFO
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))


def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def load(*libraries: Path, **environment: str) -> dict[str, object]:
    done = run(LOAD, *libraries, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(path: Path) -> str:
    reason = native.inspect(path, torch.__version__).reason
    assert reason is not None
    return reason


def test_load_uses_the_library_once_for_all_threads(library: Path) -> None:
    result = load(library)
    assert result["loaded"] and result["backend"] == "native" and result["reason"] is None
    assert result["path"] == str(library) and result["build_info"]["torch"] == torch.__version__
    assert result["warnings"] == [] and result["value"] == pytest.approx(3.0, abs=1e-5)


def test_a_library_someone_else_loaded_is_not_loaded_again(copy: Path) -> None:
    code = f"import torch\ntorch.ops.load_library({str(copy)!r})\n{LOAD}"
    done = run(code, "/nowhere/_C.so")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["loaded"] and result["path"] == str(copy)


@pytest.mark.parametrize("limit", ["baseline", "avx512_bf16"])
def test_isa_setting_is_an_upper_limit(library: Path, limit: str) -> None:
    limited = load(library, LITEBOOST_ISA=limit)["isa"]
    offered = native.inspect(library, torch.__version__).build_info["isas"]
    assert offered.index(limited) <= (offered.index(limit) if limit in offered else len(offered))


@pytest.mark.parametrize(
    ("limit", "offered", "best"),
    [
        ("", ["baseline", "avx2"], "avx2"),
        ("", [], None),
        ("avx2", ["baseline", "avx2", "avx512"], "avx2"),
        ("amx_bf16", ["baseline", "avx2"], "avx2"),
        ("avx512", ["amx_bf16"], None),  # compiled for the CPU here, LITEBOOST_ISAS=native
        ("baseline", ["baseline", "i8mm_bf16"], "baseline"),
        ("dotprod", ["baseline", "avx2"], "avx2"),
        ("avx2", ["baseline", "dotprod"], "dotprod"),
    ],
)
def test_limit_is_the_best_set_not_above_it(limit: str, offered: list[str], best: str | None) -> None:
    assert native._best_within(limit, offered) == best


@pytest.mark.parametrize(
    ("limit", "allowed", "words"),
    [
        ("", [], "this CPU, or ATEN_CPU_CAPABILITY, allows none"),
        ("avx2", ["avx512"], "LITEBOOST_ISA=avx2 allows none"),
    ],
)
def test_a_library_for_another_cpu_alone_is_refused(
    limit: str, allowed: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = SimpleNamespace(_isas=lambda: allowed)  # `_limit_isa` is not asked for
    torch = SimpleNamespace(ops=SimpleNamespace(liteboost=ops))
    monkeypatch.setattr(native.config, "settings", lambda: SimpleNamespace(isa=limit))
    status = native._within_limits(torch, Path("/nowhere/_C.so"), {"isas": ["avx512"]})
    assert not status.loaded and status.isa is None
    assert status.reason == f"/nowhere/_C.so: compiled for avx512, of which {words}"


def test_the_most_recent_usable_library_is_taken(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "_native"
    paths = [copy]
    for build in ("1", "2"):
        home = folder / f"{native.build_key(torch.__version__)}-{build}"
        shutil.copytree(copy.parent, home, ignore=shutil.ignore_patterns("_native"))
        paths.append(home / native.LIBRARY)
    monkeypatch.setattr(native, "_packaged", lambda: [copy])
    monkeypatch.setattr(native, "build_folders", lambda: (folder, tmp_path / "absent"))
    for newest in paths:
        for path in paths:
            os.utime(path, (1, 2 if path == newest else 1))
        assert native.find().path == newest
        change_info(newest, torch="1.0.0")
        assert native.find().path != newest
        change_info(newest, torch=torch.__version__)
    other = folder / f"{native.build_key('1.0.0')}-3"
    shutil.copytree(copy.parent, other, ignore=shutil.ignore_patterns("_native"))
    assert other / native.LIBRARY not in [each.path for each in native.candidates()]


def test_library_built_for_another_torch_is_refused_by_name(copy: Path) -> None:
    change_info(copy, torch="2.12.0")
    result = load(copy)
    assert not result["loaded"] and result["backend"] == "reference"
    assert result["reason"] == f"{copy} was built for torch 2.12.0, found {torch.__version__}"
    (warning,) = result["warnings"]
    assert result["reason"] in warning and native.BUILD_COMMAND in warning and "original code" in warning
    assert result["value"] == pytest.approx(3.0, abs=1e-5)


@pytest.mark.parametrize(
    ("torch_version", "minor"),
    [
        ("2.13.0", "2.13"),
        ("2.10.3+cu130", "2.10"),
        ("2.14.0a0+git1234", None),
        ("2.14.0.dev20260401", None),
        ("2.14.0rc1", None),
        (None, None),
    ],
)
def test_only_releases_have_a_minor_version(torch_version: str | None, minor: str | None) -> None:
    assert native.minor_version(torch_version) == minor


@pytest.fixture
def prebuilt(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a wheel for all torches brings: a copy of the library for each of three, and loops."""
    folder = tmp_path / "_prebuilt"
    monkeypatch.setattr(native, "PREBUILT", folder)
    monkeypatch.setattr(native, "PACKAGE_DIR", tmp_path / "package")
    monkeypatch.setattr(native, "build_folders", lambda: ())
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    for minor in ("2.9", "2.10", "2.13"):
        place = folder / f"torch-{minor}" / native.LIBRARY
        place.parent.mkdir(parents=True)
        os.link(copy, place)
        shutil.copy(copy.parent / native.BUILD_INFO, place.parent)
        change_info(place, torch=f"{minor}.0", torch_minor=minor, loops="loops.so")
    shutil.copy(copy, folder / "loops.so")
    # They are copies of one, and say so.
    monkeypatch.setattr(native, "embedded_build_info", lambda path: {})
    return folder


@pytest.mark.parametrize("installed", ["2.10.0", "2.10.1+cpu", "2.13.2+cu130", "2.9.1"])
def test_the_library_of_a_wheel_for_the_minor_version_is_taken(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: installed)
    (found,) = native.candidates()
    minor = ".".join(installed.split(".")[:2])
    assert found.reason is None and found.path == prebuilt / f"torch-{minor}" / native.LIBRARY


@pytest.mark.parametrize("installed", ["2.14.0", "2.8.0", "2.13.0a0+git1234", "3.10.0"])
def test_a_torch_that_a_wheel_has_no_kernels_for_is_named(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: installed)
    (found,) = native.candidates()
    assert found.reason == f"{prebuilt} has kernels for releases of torch 2.9, 2.10, 2.13, found {installed}"


def test_what_was_built_for_an_unknown_torch_stands_before_a_wheels(
    prebuilt: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: "2.14.0")
    folder = tmp_path / "_native"
    home = folder / f"{native.build_key('2.14.0')}-1"
    shutil.copytree(prebuilt / "torch-2.13", home)
    change_info(home / native.LIBRARY, torch="2.14.0")
    (home / native.BUILD_INFO).write_text(json.dumps({"torch": "2.14.0", "processor": platform.machine()}))
    monkeypatch.setattr(native, "build_folders", lambda: (folder,))
    assert native.find() == native.Candidate(home / native.LIBRARY, native.find().build_info, None)


def test_a_library_for_another_minor_version_is_refused_in_the_folder_of_this(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0+cpu")
    place = prebuilt / "torch-2.13" / native.LIBRARY
    change_info(place, torch="2.12.0", torch_minor="2.12")
    (found,) = native.candidates()
    assert found.reason == f"{place} was built for torch 2.12.0, found 2.13.0+cpu"


@pytest.mark.parametrize(("size", "words"), [(None, "cannot be read"), (4096, "is truncated")])
def test_loops_that_are_missing_or_damaged_are_named(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch, size: int | None, words: str
) -> None:
    monkeypatch.setattr(native, "torch_version", lambda: "2.13.0")
    loops = prebuilt / "loops.so"
    loops.unlink() if size is None else loops.write_bytes(loops.read_bytes()[:size])
    (found,) = native.candidates()
    assert found.reason is not None and found.reason.startswith(f"{loops} {words}")


def test_truncated_library_is_refused_before_it_can_crash(copy: Path) -> None:
    content = copy.read_bytes()
    for size in (0, 3, 63, 64, 4096, len(content) // 2, len(content) - 1):
        copy.write_bytes(content[:size])
        assert refusal(copy).startswith(str(copy))
    copy.write_bytes(content[: len(content) // 2])
    result = load(copy)
    assert not result["loaded"] and result["value"] == pytest.approx(3.0, abs=1e-5)
    assert result["reason"].startswith(f"{copy} is truncated: {len(content) // 2} bytes")
    assert len(result["warnings"]) == 1


def test_unloadable_library_is_named_with_the_words_of_the_loader(copy: Path) -> None:
    content = copy.read_bytes()
    assert b"libtorch_cpu.so\0" in content
    copy.write_bytes(content.replace(b"libtorch_cpu.so\0", b"libtorch_gone.s\0"))
    result = load(copy)
    assert not result["loaded"] and result["path"] == str(copy)
    assert result["reason"].startswith(f"{copy}: libtorch_gone.s: cannot open shared object file")
    assert result["warnings"][0].startswith(f"liteboost_adaptor: {copy}: libtorch_gone.s")


def test_next_library_is_tried_after_one_that_does_not_load(copy: Path, library: Path) -> None:
    copy.write_bytes(copy.read_bytes().replace(b"libtorch_cpu.so\0", b"libtorch_gone.s\0"))
    result = load(copy, library)
    assert result["loaded"] and result["path"] == str(library) and result["warnings"] == []


@pytest.mark.parametrize("content", [None, "", "{", "[]"])
def test_library_without_build_info_is_refused(copy: Path, content: str | None) -> None:
    info = copy.parent / native.BUILD_INFO
    info.unlink() if content is None else info.write_text(content)
    assert str(copy) in refusal(copy) and native.BUILD_INFO in refusal(copy)


def test_build_info_that_contradicts_the_library_is_refused(copy: Path) -> None:
    change_info(copy, torch="9.9.9")
    reason = native.inspect(copy, "9.9.9").reason
    assert reason is not None and f"built for torch {torch.__version__}" in reason and "9.9.9" in reason


def test_other_abi_and_processor_are_refused(copy: Path) -> None:
    found = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    change_info(copy, cxx11_abi=1 - found)
    assert f"C++11 ABI {1 - found}" in refusal(copy) and f"found ABI {found}" in refusal(copy)
    change_info(copy, cxx11_abi=found, processor="riscv64")
    assert "riscv64" in refusal(copy) and platform.machine() in refusal(copy)


def test_no_library_at_all_is_said_in_one_sentence() -> None:
    result = load()
    assert not result["loaded"] and result["path"] is None
    assert f"no kernels compiled for torch {torch.__version__}" in result["reason"]
    assert len(result["warnings"]) == 1 and native.BUILD_COMMAND in result["warnings"][0]


def test_require_native_makes_it_an_error() -> None:
    done = run(LOAD, LITEBOOST_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "NativeLibraryError: LITEBOOST_REQUIRE_NATIVE=1" in last and native.BUILD_COMMAND in last


def test_torch_version_is_read_without_importing_torch() -> None:
    code = """
        import sys
        from liteboost_adaptor import native
        print(native.torch_version(), "torch" in sys.modules)
    """
    done = run(code)
    assert done.stdout.split() == [torch.__version__, "False"], done.stderr
