"""Installing where the kernels cannot be compiled: it succeeds, works and says so truthfully."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import BUILD_TOOLS, NO_COMPILER, TORCH, Sandbox, make_sdist

from liteboost_adaptor.native import BUILD_COMMAND

Make = Callable[..., Sandbox]


def assert_reference(look: dict[str, object]) -> None:
    """Our ops are their references, and no model runs on them."""
    assert not look["loaded"] and look["backend"] == "reference" and look["value"] == 3.0
    assert look["bound"] == 0
    (sentence,) = look["warnings"]
    assert BUILD_COMMAND in sentence and "no kernels compiled for torch" in sentence
    assert look["kernels"] and look["typed"] and any(name.endswith(".toml") for name in look["rules"])


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.full), "editable"])
def test_no_compiler(kind: str, sources: Path, sandbox: Make) -> None:
    box = sandbox()
    what = {"wheel": (sources,), "sdist": (make_sdist(sources),), "editable": ("--editable", sources)}[kind]
    done = box.pip_install(*what, **NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert "could NOT be built" in done.stdout + done.stderr
    assert_reference(box.look())


def test_no_compiler_but_native_required(sources: Path, sandbox: Make) -> None:
    done = sandbox().pip_install(sources, LITEBOOST_REQUIRE_NATIVE="1", **NO_COMPILER)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "LITEBOOST_REQUIRE_NATIVE=1 asks for the compiled kernels" in output and "compiler" in output


def test_wrong_value_of_require_native_is_refused(sources: Path, sandbox: Make) -> None:
    done = sandbox().pip_install(sources, LITEBOOST_REQUIRE_NATIVE="maybe", **NO_COMPILER)
    assert done.returncode != 0
    assert "LITEBOOST_REQUIRE_NATIVE must be 0 or 1; found 'maybe'" in done.stdout + done.stderr


@pytest.mark.parametrize("present", [(), ("cmake",)], ids=["no CMake", "no ninja or make"])
def test_no_build_tools(present: tuple[str, ...], sources: Path, sandbox: Make, tmp_path: Path) -> None:
    box = sandbox(*(name for name in BUILD_TOOLS if name not in present))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in present:
        if shutil.which(name) is None:
            pytest.skip(f"needs {name} on the PATH")
        (programs / name).symlink_to(shutil.which(name))
    done = box.pip_install(sources, PATH=str(programs))
    assert done.returncode == 0, done.stderr
    assert "could NOT be built" in done.stdout + done.stderr
    assert_reference(box.look())
    required = box.pip_install(sources, PATH=str(programs), LITEBOOST_REQUIRE_NATIVE="1")
    assert required.returncode != 0


def test_no_torch_yet(sources: Path, sandbox: Make) -> None:
    box = sandbox(*TORCH)
    done = box.pip_install(sources)
    assert done.returncode == 0, done.stderr
    doctor = box.run("-m", "liteboost_adaptor", "doctor", "--json")
    assert doctor.returncode == 1, doctor.stderr
    report = json.loads(doctor.stdout)
    assert not report["usable"] and report["versions"]["torch"] is None
    assert any(
        problem["fatal"] and "torch is not installed" in problem["what"] for problem in report["problems"]
    )
    build = box.run("-m", "liteboost_adaptor", "build")
    assert build.returncode != 0 and "needs an installed torch" in build.stderr
    box.show(*TORCH)
    assert_reference(box.look())


def test_installed_without_kernels_and_native_required_at_run_time(sources: Path, sandbox: Make) -> None:
    box = sandbox()
    assert box.pip_install(sources, **NO_COMPILER).returncode == 0
    done = box.run("-c", "from liteboost_adaptor import native; native.load()", LITEBOOST_REQUIRE_NATIVE="1")
    assert done.returncode != 0 and BUILD_COMMAND in done.stderr.strip().splitlines()[-1]
    doctor = box.run("-m", "liteboost_adaptor", "doctor")
    assert doctor.returncode == 0, doctor.stderr
    assert BUILD_COMMAND in doctor.stdout and "none: " in doctor.stdout
    build = box.run("-m", "liteboost_adaptor", "build", **NO_COMPILER)
    assert build.returncode != 0 and "needs a C++20 compiler" in build.stderr, build.stderr


def test_what_a_wheel_without_kernels_holds(sources: Path, sandbox: Make, tmp_path: Path) -> None:
    box = sandbox()
    wheels = tmp_path / "wheels"
    done = box.run(
        *("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, sources),
        **NO_COMPILER,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"liteboost_adaptor", next(top for top in tops if top.endswith(".dist-info"))}
    expected = {
        f"liteboost_adaptor/{path.relative_to(sources)}"
        for folder in ("kernels", "patches")
        for path in (sources / folder).rglob("*")
        if path.is_file()
    }
    assert expected <= names
