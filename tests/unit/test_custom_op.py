"""``examples/custom_op``: an op outside of the package, its library, its rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import custom_op

from liteboost_adaptor.cli import main


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return custom_op.build(tmp_path_factory.mktemp("custom_op"), "mix")


def test_op_is_applied_by_its_rule_and_computes_the_same(example: Path) -> None:
    row, printed = custom_op.status(example)
    assert (row["state"], row["targets"], row["calls"], row["fallbacks"]) == ("applied", 4, 4, {})
    assert row["where"] == ["model:Mix"]
    assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-6
    assert re.search(r"example\.mix +applied", printed)


def test_rule_whose_library_is_missing_fails_in_the_status_and_nowhere_else(example: Path) -> None:
    library = example / "build" / "mix.so"
    kept = library.rename(library.with_suffix(".kept"))
    try:
        row, printed = custom_op.status(example)
    finally:
        kept.rename(library)
    assert row["state"] == "failed" and "mix.so" in row["reason"] and row["calls"] == 0
    assert "largest difference: 0.0e+00" in printed


def test_folder_of_the_cmake_function_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cmake-dir"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert "function(liteboost_add_op" in (folder / "liteboost_op.cmake").read_text()
