"""``selftest --device npu --report``: what it runs behind the operators, and what it does with faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cann_sim.faults import failing

from liteboost_adaptor import cli, config, native_npu
from liteboost_adaptor.selftest import families, helper, kit
from liteboost_adaptor.selftest.kit import Stage


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """The default setting, an empty cache directory; faults of SIMCANN_FAIL are for other processes."""
    native_npu.load()
    with pytest.MonkeyPatch.context() as patch, failing():
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setenv("LITEBOOST_FIRST_USE", "process")
        config.settings.cache_clear()
        torch.ops.liteboost._npu_forget_verdicts()
        yield tmp_path
        helper.close()
    config.settings.cache_clear()
    torch.ops.liteboost._npu_forget_verdicts()


def test_stages_are_in_order_of_risk_and_there_are_20_families() -> None:
    assert len(set(families.FAMILIES)) == 20
    kinds = list(dict.fromkeys(name.split()[0] for name in kit.STAGES))
    assert kinds == ["capture", "collectives", "family", "launches", "timed_step"]


def test_the_report_says_what_failed_and_what_to_do() -> None:
    words = kit.text([Stage("capture", "pass", "3 | 3", 1.25), Stage("family opt", "FAIL", "gone", 2.0)])
    assert "| capture | pass | 1.2 | 3 \\| 3 |" in words and "| family opt | FAIL | 2.0 | gone |" in words
    assert "Stages that fail: family opt." in words and "into an issue" in words


@pytest.mark.full
def test_an_operator_that_loses_the_device_fails_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCANN_FAIL", "aclnnLayerNorm@device")
    monkeypatch.setattr(kit, "STAGES", ("capture", "collectives"))
    report, figures = cache / "report.md", cache / "figures.json"
    command = ["selftest", "--device", "npu", "--report", "--ops", "inverse_rms,layer_norm,linear"]
    assert cli.main([*command, "--output", str(report), "--json", str(figures)]) == 1
    found = json.loads(figures.read_text())
    outcomes = {(each["op"], each["kind"]): each["outcome"] for each in found["results"]}
    served = [op for (op, _), outcome in outcomes.items() if outcome == "FAIL"]
    assert set(served) == {"layer_norm"} and "pass" in {
        v for (op, _), v in outcomes.items() if op == "linear"
    }
    assert all("507015" in each["fault"] for each in found["results"] if each["op"] == "layer_norm")
    assert {each["name"]: each["outcome"] for each in found["stages"]} == {
        "capture": "pass",
        "collectives": "pass",
    }
    text = report.read_text()
    assert "**fails**" in text and "507015" in text and "| collectives | pass |" in text
    assert "helper processes started in" in text


@pytest.mark.full
def test_a_stage_that_loses_the_device_fails_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITEBOOST_FIRST_USE", "thread")  # so that the stage's own process loses it
    monkeypatch.setenv("SIMCANN_FAIL", "aclnnRmsNorm@device")
    (broken,) = kit.run("npu:0", ("capture",))
    assert broken.outcome == "FAIL" and "507015" in broken.words
    monkeypatch.delenv("SIMCANN_FAIL")
    passed = {stage.name: stage for stage in kit.run("npu:0", ("family qwen3", "launches"))}
    assert [stage.outcome for stage in passed.values()] == ["pass", "pass"]
    assert "all tokens the CPU's" in passed["family qwen3"].words


@pytest.mark.full
def test_a_wrong_model_and_a_hang_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCANN_WRONG", "aclnnAdd")
    (wrong,) = kit.run("npu:0", ("family qwen3",))
    assert wrong.outcome == "FAIL" and "error" in wrong.words
    monkeypatch.delenv("SIMCANN_WRONG")
    monkeypatch.setenv("SIMCANN_FAIL", "aclnnRmsNorm@hang")
    monkeypatch.setenv("LITEBOOST_FIRST_USE", "thread")
    monkeypatch.setattr(kit, "STAGE_SECONDS", 20.0)
    (hung,) = kit.run("npu:0", ("capture",))
    assert (hung.outcome, hung.words) == ("FAIL", "did not come to an end within 20 s")


def test_a_stage_that_needs_more_npus_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.npu, "device_count", lambda: 1)
    (stage,) = kit.run("npu:0", ("collectives",))
    assert (stage.outcome, stage.words) == ("skipped", "needs 2 NPUs, found 1")
