"""``python -m liteboost_adaptor selftest --device npu``: every op of ours on the NPU, and a wrong one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.npu_ops import covering

from liteboost_adaptor import cli, native_npu
from liteboost_adaptor.selftest import compare, facts
from liteboost_adaptor.selftest import report as report_module
from liteboost_adaptor.selftest.case import kinds_of, ops_with_cases


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_npu.load()
    torch.ops.liteboost._npu_forget_verdicts()
    yield tmp_path
    torch.ops.liteboost._npu_forget_verdicts()  # a fault that was planted is not one of tests that follow


LONG = [(op, kind) for op in ops_with_cases() for kind in kinds_of(op) if kind.endswith(" long")]


@pytest.mark.full
@pytest.mark.parametrize(("op", "kind"), LONG)
def test_every_op_passes_with_many_keys(op: str, kind: str) -> None:
    result = compare.compare(op, kind, "npu")
    assert not result.failed and (result.served or all(figure.fallback for figure in result.figures))


@pytest.mark.parametrize("dtypes", ["bf16", pytest.param("", marks=pytest.mark.full)], ids=["bf16", "all"])
def test_every_op_with_an_aclnn_operator_passes(
    dtypes: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kinds(op: str) -> list[str]:
        kinds = [kind for kind in kinds_of(op) if kind.startswith(dtypes) and (op, kind) not in LONG]
        return covering(kinds) if dtypes else kinds

    monkeypatch.setattr(report_module, "kinds_of", kinds)
    report, figures = cache / "report.md", cache / "figures.json"
    code = cli.main(["selftest", "--device", "npu", "--output", str(report), "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert code == 0 and found["passed"], [each for each in found["results"] if each["outcome"] == "FAIL"]
    served = {each["op"] for each in found["results"] if each["outcome"] == "pass"}
    assert served >= {"rms_norm", "add_rms_norm", "layer_norm"}
    # What is not served says why, and everything that is was kept for first uses.
    for each in found["results"]:
        assert each["outcome"] == "pass" or all(case["fallback"] for case in each["cases"])
    kept = [json.loads(path.read_text()) for path in cache.rglob("first_use/*/*.json")]
    assert {(each["op"], each["kind"]) for each in kept} == {
        (each["op"], each["kind"]) for each in found["results"] if each["outcome"] == "pass"
    }
    assert all(each["reason"] == "" for each in kept)
    text = report.read_text()
    assert text.startswith("# liteboost_adaptor selftest on npu:0: passes\n")
    for words in (
        facts.identity()["soc"],
        f"CANN: {facts.identity()['cann']}",
        "| aclnnRmsNorm | tensor,tensor,double",
    ):
        assert words in text


def test_wrong_op_fails_the_command_and_the_next_first_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = compare._error
    monkeypatch.setattr(compare, "_error", lambda result, true: exact(result, true) + 0.5)
    monkeypatch.setitem(compare.ALLOWED, torch.bfloat16, 0.1)
    monkeypatch.setattr(compare, "OWN_FACTOR", 0.0)
    report = cache / "report.md"
    assert cli.main(["selftest", "--device", "npu", "--ops", "layer_norm", "--output", str(report)]) == 1
    assert "**fails**" in report.read_text() and "| layer_norm | bf16 | 14 of 14 | 5.0" in report.read_text()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    x = torch.randn(2, 64, dtype=torch.bfloat16).npu()
    with torch.no_grad():
        torch.ops.liteboost.layer_norm(x, None, None, 1e-5)
    ((op, kind, reason),) = native_npu.verdicts()
    assert (op, kind) == ("layer_norm", "bf16 weightless") and "differs from its reference" in reason
