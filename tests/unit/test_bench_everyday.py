"""Scripts of everyday use: what is compared, and that the variant without us is without us."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from liteboost_adaptor.bench.everyday import models, runner, worker
from liteboost_adaptor.bench.everyday.runner import Row, ScriptError, measure, table
from liteboost_adaptor.bench.everyday.scripts import SCRIPTS

FOLDER = Path(worker.__file__).parent
#: What runs in the process that makes the models and compares: the others run in the variant without us, too.
OURS = {"__main__.py", "models.py", "runner.py"}


def test_there_are_thirty_scripts_and_each_has_a_model() -> None:
    assert len(SCRIPTS) >= 30
    known = {*models.MODELS, "image-text"}
    assert {script.model for script in SCRIPTS.values()} == known


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.py") if file.name not in OURS))
def test_the_variant_without_us_imports_nothing_of_the_package(name: str) -> None:
    for node in ast.walk(ast.parse((FOLDER / name).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1 and not (node.module or "").startswith("liteboost_adaptor")
        elif isinstance(node, ast.Import):
            assert not any(each.name.startswith("liteboost_adaptor") for each in node.names)


@pytest.mark.parametrize(
    ("expected", "found"),
    [([5.0, 6.0], [5.0, 7.0]), ([5.0, 6.0], [5.0]), ([0.5, 0.1], [0.5, 0.102])],
    ids=["another token", "a token less", "another value"],
)
def test_another_result_is_an_error(expected: list[float], found: list[float]) -> None:
    runner._compare("greedy", expected, expected)
    runner._compare("greedy", expected, [each + 1e-5 for each in expected])
    with pytest.raises(ScriptError, match="'greedy' gives other results"):
        runner._compare("greedy", expected, found)


def test_the_table_has_a_row_for_each_script() -> None:
    lines = list(table([Row("greedy", "`generate`", 2.0, 1.0, 0.5)]))
    assert lines[-1] == "| greedy | `generate` | 2.00 | 1.00 | 0.50 |\n"


@pytest.mark.full
def test_a_script_runs_without_us_and_at_level_2(tmp_path: Path) -> None:
    (row,) = measure(["short"], tmp_path, rounds=1, threads=1)
    assert row.plain_s > 0 and row.ours_s > 0
    assert row.ratio == pytest.approx(row.ours_s / row.plain_s)


@pytest.mark.full
def test_a_script_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / SCRIPTS["short"].model).mkdir()
    with pytest.raises(ScriptError, match="the script 'short' without us: OSError"):
        list(measure(["short"], tmp_path, rounds=1, threads=1))
