"""Installing where the kernels can be compiled. Each of these compiles them, hence the second tier."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sandbox import NO_COMPILER, TORCH, Sandbox, make_sdist

pytestmark = pytest.mark.full

Make = Callable[..., Sandbox]


def assert_native(look: dict[str, object], box: Sandbox) -> None:
    assert look["loaded"], look["reason"]
    assert look["warnings"] == [] and look["value"] == 3.0
    assert look["build_info"]["torch"] == torch.__version__
    assert Path(look["path"]).is_relative_to(box.folder.resolve()), "not the library that was installed"


# Without a compiler and without isolation: test_without_native.py, in the first tier.
@pytest.mark.parametrize(
    ("compiler", "isolation"),
    [(True, False), (True, True), (False, True)],
    ids=["compiler", "compiler, isolation", "isolation"],
)
@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_install(
    kind: str, compiler: bool, isolation: bool, sources: Path, sandbox: Make, request: pytest.FixtureRequest
) -> None:
    wheelhouse = request.getfixturevalue("wheelhouse") if isolation else None
    box = sandbox()
    what = {"wheel": (sources,), "sdist": (make_sdist(sources),), "editable": ("--editable", sources)}[kind]
    done = box.pip_install(*what, isolated=wheelhouse, **({} if compiler else NO_COMPILER))
    assert done.returncode == 0, done.stderr
    look = box.look()
    if compiler:
        assert_native(look, box)
    else:
        assert not look["loaded"] and len(look["warnings"]) == 1 and look["value"] == 3.0
    inside = sources if kind == "editable" else box.folder
    assert Path(look["package"]).resolve().is_relative_to(inside.resolve())


def test_isolation_without_torch_installs_the_reference_ops(
    sources: Path, sandbox: Make, wheelhouse: Path
) -> None:
    box = sandbox(*TORCH)
    done = box.pip_install(sources, isolated=wheelhouse)
    assert done.returncode == 0, done.stderr
    box.show(*TORCH)
    assert not box.look()["loaded"]


@pytest.mark.parametrize("writable", [True, False], ids=["in the package", "in the cache"])
def test_build_mends_an_installation_without_kernels(
    writable: bool, sources: Path, sandbox: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = sandbox()
    assert box.pip_install(sources, **NO_COMPILER).returncode == 0
    package = box.site_packages / "liteboost_adaptor"
    if not writable:
        (package / "_native").write_text("a file where the folder would be")
    done = box.run("-m", "liteboost_adaptor", "build", "--json")
    assert done.returncode == 0, done.stderr
    library = Path(json.loads(done.stdout)["path"])
    where = package / "_native" if writable else box.folder / "cache" / "liteboost_adaptor" / "native"
    assert library.is_relative_to(where.resolve())
    look = box.look()
    assert_native(look, box)
    assert look["path"] == str(library)
    leftovers = [path for path in where.iterdir() if path.name.startswith(".")]
    assert leftovers == []
