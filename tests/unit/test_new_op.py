"""``new-op``: what it writes is whole, and formatted as everything here; and what it refuses."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support import kernel_build, processes

from liteboost_adaptor import cli
from liteboost_adaptor.cli import new_op_files

ROOT = Path(__file__).resolve().parents[2]
#: As short and as long as names may be, and one with several words.
NAMES = ("f2", "abcdefghijklmn_opqrstuvwxyzz", "leaky_relu")

#: An editable install knows the modules of this checkout alone, and would be asked first.
OTHER_CHECKOUT = """
import os, sys
checkout, name = sys.argv[1:]
os.chdir(checkout)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""

#: Imports everything of a generated op that needs no compiled kernel, and compares op and reference.
USE = """
import json, torch
import liteboost_adaptor
from liteboost_adaptor import ops
from liteboost_adaptor.bench import op_cases
from liteboost_adaptor.selftest import compare
from fuzz import table
ops.register_reference_ops()
x = torch.randn(3, 5)
(timed,) = op_cases.cases(2, torch.bfloat16, {name})
print(json.dumps({
    "package": liteboost_adaptor.__file__,
    "equal": torch.equal(getattr(torch.ops.liteboost, name)(x, 2.0), 2 * x),
    "compared": compare.compare(name, "bf16", "cpu").reason,
    "timed": timed.op,
    "fuzzed": name in table.load(),
}))
"""

#: Runs the tests of one op on the compiled library of another checkout.
TESTS = """
import pytest
files = [f"tests/ops/test_{name}.py", "tests/ops/test_schemas.py", "tests/fuzz/test_ops.py"]
files += ["tests/fuzz/test_nonfinite.py", "tests/unit/test_selftest.py", "tests/unit/test_op_speed.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", name, *files]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that a new op touches, and of what says how it is formatted."""
    return _copy(tmp_path / "a clone")


def _copy(folder: Path) -> Path:
    skip = shutil.ignore_patterns("*.so", "_build_info*.json", "_rules.json", "_native", "__pycache__")
    for name in ("build_support", "docs/api", "kernels", "liteboost_adaptor", "patches", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    for name in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / name, folder)
    return folder


def _generate(name: str, root: Path) -> list[Path]:
    changes = new_op_files.plan(name, root)
    new_op_files.write(changes, root)
    return [root / change.path for change in changes]


def _environment(checkout: Path) -> dict[str, str]:
    """Of a process that takes the package, its libraries and the helpers of tests from ``checkout``."""
    return {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}", "XDG_CACHE_HOME": str(checkout.parent)}


def _contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_it_writes_is_named_after_the_op_and_formatted(checkout: Path) -> None:
    ruff = kernel_build.find("ruff", why="says how Python is formatted")
    clang_format = kernel_build.find("clang-format", why="says how C++ is formatted")
    for name in NAMES:
        files = _generate(name, checkout)
        assert len(files) == len(set(files)) > 20
        for file in files:
            text = file.read_text(encoding="utf-8")
            assert name in text
            if file.suffix == ".py":
                ast.parse(text)
            elif file.suffix in (".cpp", ".h"):
                kernel_build.run([clang_format, "--dry-run", "-Werror", str(file)])
        python = [str(file) for file in files if file.suffix == ".py"]
        kernel_build.run([ruff, "check", "--no-cache", *python])
        kernel_build.run([ruff, "format", "--no-cache", "--check", *python])
    assert not list(checkout.rglob("*.new-op"))


def test_every_part_of_the_new_op_is_known(checkout: Path) -> None:
    _generate("leaky_relu", checkout)
    script, environment = OTHER_CHECKOUT + USE, _environment(checkout)
    found = processes.python_json(script, str(checkout), "leaky_relu", **environment)
    assert Path(found.pop("package")).is_relative_to(checkout)
    assert found == {"equal": True, "compared": "", "timed": "leaky_relu", "fuzzed": True}


def _taken(root: Path) -> str:
    (root / "tests" / "fuzz" / "cases" / "f2.py").write_text("# somebody's\n")
    return "f2"


def _list_gone(root: Path) -> str:
    (root / "tests" / "csrc" / "loops.h").write_text("#pragma once\n")
    return "f2"


def _no_checkout(root: Path) -> str:
    shutil.rmtree(root / "build_support")
    return "f2"


REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "a file is there": (_taken, r"overwrite tests/fuzz/cases/f2\.py\. Move that away"),
    "a list has changed": (_list_gone, r"adds a line to tests/csrc/loops\.h, .*nothing was written"),
    "installed from a wheel": (_no_checkout, r"no build_support/new_op in .* Clone the project"),
    "no name": (lambda root: "Leaky-Relu", "found 'Leaky-Relu'. Choose another"),
    "a keyword": (lambda root: "lambda", "found 'lambda'. Choose another"),
    "too long": (lambda root: "x" * 29, "at most 28 letters"),
    "an op of a family": (lambda root: "add_rms_norm", r"kernels/norm/norm\.cpp has a add_rms_norm"),
    "a name in a list": (lambda root: "ops", r"ops/__init__\.py names ops already"),
    "a folder of kernels": (lambda root: "cmake", "kernels/cmake has a cmake"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_nothing_is_written_where_something_is_in_the_way(checkout: Path, why: str) -> None:
    prepare, words = REFUSED[why]
    name = prepare(checkout)
    before = _contents(checkout)
    with pytest.raises(new_op_files.NewOpError, match=words):
        _generate(name, checkout)
    assert _contents(checkout) == before


def test_nothing_is_left_where_a_file_cannot_be_written(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write_text = _contents(checkout), Path.write_text

    def full(path: Path, text: str, **how: str) -> int:
        if "test_f2.py" in path.name:
            raise OSError(28, "No space left on device")
        return write_text(path, text, **how)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(new_op_files.NewOpError, match=r"No space left on device.*; nothing was written"):
        _generate("f2", checkout)
    assert _contents(checkout) == before and not (checkout / "kernels" / "f2").exists()


def test_command_says_what_it_wrote_and_what_comes_next(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(new_op_files, "ROOT", checkout)
    assert cli.main(["new-op", "f2"]) == 0
    printed = capsys.readouterr().out
    assert "new      kernels/f2/f2.cpp\n" in printed and "changed  kernels/CMakeLists.txt\n" in printed
    assert "docs/adding_an_op.md" in printed
    assert cli.main(["new-op", "f2"]) == 1 and "NAME must be new" in capsys.readouterr().err


#: What names other families where kernels and the programs of tests/csrc are built.
OTHER_FAMILIES = {
    "kernels/CMakeLists.txt": r"^(lb_family\((?!leaky_relu)\w+\)|target_sources\(lb_ops PRIVATE coll.*)\n",
    "tests/csrc/CMakeLists.txt": r"\b(?!leaky_relu|loops|vec)\w+_test\.cpp",
    "tests/csrc/loops_test.cpp": r"^  testing::test_(?!leaky_relu)\w+\(\);\n",
}


@pytest.mark.full
def test_it_compiles_and_passes_its_tests(checkout: Path, tmp_path: Path) -> None:
    """With warnings as errors, without the other families: those are compiled elsewhere."""
    kernel_build.find("c++", "g++", "clang++", why="compiles the kernels for this test")
    _generate("leaky_relu", checkout)
    for name, others in OTHER_FAMILIES.items():
        text = (checkout / name).read_text()
        (checkout / name).write_text(re.sub(others, "", text, flags=re.MULTILINE))
    build = tmp_path / "build"
    kernel_build.configure(build, "-DLITEBOOST_NPU=OFF", sources=checkout / "kernels")
    programs = [f"loops_test_{isa}" for isa in kernel_build.built_isas(build)]
    kernel_build.build(build, "_C", *programs)
    kernel_build.run([str(build / "csrc" / programs[0])])
    for name in ("_C.so", "_build_info.json"):
        shutil.copy(build / name, checkout / "liteboost_adaptor")
    script, environment = OTHER_CHECKOUT + TESTS, _environment(checkout)
    done = processes.python(script, str(checkout), "leaky_relu", timeout=900, **environment)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
