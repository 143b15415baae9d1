"""The table of op speeds: right results first, every op in it, and what is written. No time is asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from liteboost_adaptor import native
from liteboost_adaptor.bench import ops as bench
from liteboost_adaptor.bench.op_cases import MAKERS, cases, linear_cases
from liteboost_adaptor.errors import NativeLibraryError
from liteboost_adaptor.ops.registry import ops

DOCUMENT = Path(__file__).parents[2] / "docs" / "op_speed.md"


def test_every_op_has_a_case_and_a_row() -> None:
    assert set(MAKERS) == set(ops())
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in MAKERS:
        for phase in bench.PHASES:
            for dtype in ("bfloat16", "float32"):
                assert f"| `{name}` | {phase} | {dtype} |" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"linear"}))
def test_op_and_sequence_agree(name: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        for rows in (1, 9):
            for case in cases(rows, dtype, {name}):
                assert case.op == name and case.dtype == dtype
                bench.compare(case)


def test_weights_are_taken_in_turn() -> None:
    (case,) = linear_cases(2, torch.float32, {"some": (8, 16)}, weight_bytes=3 * 8 * 16 * 4)
    bench.compare(case)
    assert len({next(case.weights).data_ptr() for _ in range(9)}) == 3


@pytest.mark.parametrize("fault", [0.5, float("nan")])
def test_a_wrong_op_is_not_timed(fault: float) -> None:
    (case,) = cases(1, torch.float32, {"gated_activation"})
    right = case.ours
    wrong = replace(case, ours=lambda: right() + fault)
    with pytest.raises(bench.DisagreementError, match=r"gated_activation \[1, 1, 3072\].*was not timed"):
        bench.measure(wrong, 0.0)


def test_tables(native_only: None) -> None:
    with torch.inference_mode():
        table = list(bench.ops_table({"layer_norm"}, 0.0))
        assert len(table) == 2 + len(bench.PHASES) * len(bench.DTYPES)
        assert all(line.count("|") == table[0].count("|") and line.endswith("|\n") for line in table)
        assert len(list(bench.rows_table(0.0, (24, 16), 1 << 16))) == 2 + 3
        assert len(list(bench.bandwidth_table(0.0, {"small": (24, 16)}, 1 << 16))) == 2 + 3


def test_written_as_it_is_printed(
    native_only: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speed.md"
    bench.main(["--seconds", "0", "--ops", "layer_norm", "--write", str(file)])
    text = file.read_text(encoding="utf-8")
    assert text == capsys.readouterr().out and "`layer_norm`" in text and "threads" in text


def test_the_reference_ops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = native.NativeStatus(loaded=False, reason="no compiled library")
    monkeypatch.setattr(bench.native, "load", lambda: absent)
    with pytest.raises(NativeLibraryError, match=r"reference ops are in use: .*no compiled library"):
        next(bench.document({"linear"}, 0.0, full=False))
