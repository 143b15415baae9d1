"""First uses are compared in a helper process: a device that is lost there is not lost to the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cann_sim.faults import failing
from support import llamas

import liteboost_adaptor
from liteboost_adaptor import config, native_npu
from liteboost_adaptor.ops import norm
from liteboost_adaptor.selftest import first_use, helper

pytestmark = pytest.mark.usefixtures("no_grad", "undone")

#: What the runtime says of a core that ended with an exception (ACL_ERROR_RT_AICORE_EXCEPTION).
LOST = "507015"
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}

Plant = Callable[[str], None]


@pytest.fixture(autouse=True)
def plant(tmp_path: Path, undone: None) -> Iterator[Plant]:
    """Plant a fault in helpers that are started from now on. The cache is empty, and nothing was compared."""
    assert native_npu.load().loaded
    with pytest.MonkeyPatch.context() as patch, failing():  # which has read SIMCANN_FAIL for this process
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setenv("LITEBOOST_FIRST_USE", "process")
        config.settings.cache_clear()
        forget()
        yield lambda fault: patch.setenv("SIMCANN_FAIL", fault)
        helper.close()
    config.settings.cache_clear()
    forget()


def forget() -> None:
    torch.ops.liteboost._npu_forget_verdicts()
    torch.ops.liteboost._npu_forget_counts()


def run(dtype: torch.dtype = torch.float32) -> None:
    """One norm, held against the same on the CPU in float64."""
    x, weight = torch.randn(2, 5, 64).to(dtype), torch.randn(64).to(dtype)
    result = torch.ops.liteboost.rms_norm(x.npu(), weight.npu(), 1e-6)
    exact = norm.rms_norm(x.double(), weight.double(), 1e-6)
    assert (result.cpu().double() - exact).abs().max() < 0.05


def test_a_model_runs_on_though_an_operator_lost_the_device_at_first_use(plant: Plant) -> None:
    prompt = torch.randint(0, 128, (1, 7), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = llamas.llama(factor=8, device="cpu", **SIZES).generate(prompt, **how)
    plant("aclnnRmsNorm@device")
    before = helper.started()
    liteboost_adaptor.apply(level=2)
    model = llamas.llama(factor=8, **SIZES)
    assert model.generate(prompt.npu(), **how).tolist() == expected.tolist()
    reasons = {op: reason for op, _, reason in native_npu.verdicts()}
    assert {op for op, reason in reasons.items() if reason} == {"rms_norm"} < reasons.keys()
    assert "lost the device" in reasons["rms_norm"] and LOST in reasons["rms_norm"]
    assert f"  rms_norm refused: {reasons['rms_norm']}" in native_npu.status().lines()
    assert helper.started() == before + 2  # the one that was lost, and one for all other kinds
    # The next process knows it, and starts none.
    forget()
    assert model.generate(prompt.npu(), **how).tolist() == expected.tolist()
    assert {op: reason for op, _, reason in native_npu.verdicts()} == reasons
    assert helper.started() == before + 2


@pytest.mark.full
def test_an_operator_that_never_ends_is_refused(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "KIND_SECONDS", 1.0)  # which a hang exceeds on any machine
    plant("aclnnRmsNorm@hang")
    run()
    ((op, kind, reason),) = native_npu.verdicts()
    assert (op, kind) == ("rms_norm", "fp32") and "did not come to an end within 1 s" in reason


@pytest.mark.full
def test_a_helper_that_is_killed_is_refused_and_another_serves_the_next_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run()
    helper.process_on("npu:0").kill()
    helper.process_on("npu:0").wait()
    run(torch.float16)  # ended between two comparisons: another is started
    assert [reason for _, _, reason in native_npu.verdicts()] == ["", ""]
    send = helper._Helper._send

    def kill(self: helper._Helper, request: object) -> None:
        self.process.kill()
        send(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(helper._Helper, "_send", kill)
        run(torch.bfloat16)
    (reason,) = [reason for _, kind, reason in native_npu.verdicts() if kind == "bf16"]
    assert reason.startswith("the helper process that compared it ended with status -9")
    assert first_use.verdict("layer_norm", "fp32") == ""


@pytest.mark.full
def test_without_a_helper_nothing_is_compared_and_the_status_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run()
    run(torch.float16)
    reasons = [reason for _, _, reason in native_npu.verdicts()]
    assert len(reasons) == 2 and all("LITEBOOST_FIRST_USE=thread" in reason for reason in reasons)
    assert not list(config.user_cache_dir().rglob("*.json"))


@pytest.mark.full
def test_a_helper_that_nobody_asks_ends_and_the_next_comparison_starts_another() -> None:
    soon = "import liteboost_adaptor.selftest.helper_main as m; m.IDLE_SECONDS = 5; main(int"
    code = helper.ENTRY.replace("main(int", soon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "ENTRY", code)
        run()
        helper.process_on("npu:0").wait()
        run(torch.float16)
    assert [reason for _, _, reason in native_npu.verdicts()] == ["", ""]


PROGRAM = """
import json, sys, torch, torch_npu
from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest import helper
torch.npu.set_device(int(sys.argv[1]))
native_npu.load()
with torch.inference_mode():
    x = torch.ones(2, 32).npu()
    torch.ops.liteboost.rms_norm(x, x[0], 1e-6)
print(json.dumps([native_npu.verdicts(), native_npu.calls(), helper.started()]))
"""


@pytest.mark.full
def test_of_processes_that_start_together_one_compares() -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = config.child_environment()
    started = [
        subprocess.Popen([*command, str(device)], env=environment, stdout=subprocess.PIPE, text=True)
        for device in (0, 1)
    ]
    found = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in started]
    assert [each[:2] for each in found] == [[[["rms_norm", "fp32", ""]], [["rms_norm", "", 1]]]] * 2
    assert sorted(each[2] for each in found) == [0, 1]


@pytest.mark.full
def test_the_users_program_is_not_run_again_by_the_helper(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('the program')\n" + PROGRAM.replace("sys.argv[1]", "0"))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=config.child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("the program") == 1 and json.loads(done.stdout.splitlines()[-1])[2] == 1
