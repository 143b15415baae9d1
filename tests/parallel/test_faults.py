"""Ranks do not wait for one that is gone, and say which it was."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from parallel import ranks
from parallel.test_loading import save
from support import processes

from liteboost_adaptor.parallel import synchronize

pytestmark = pytest.mark.usefixtures("native_only")


@pytest.mark.parametrize(
    ("when", "status", "says"),
    [
        ("prompt", 3, "has ended; its own output says why"),
        ("token", 1, "rank 1 has left the call that all ranks are in, by ValueError: planted in rank 1"),
    ],
)
def test_a_rank_that_ends(tmp_path: Path, when: str, status: int, says: str) -> None:
    save(tmp_path, ("llama",))
    (first, text), (second, other) = ranks.finish(
        ranks.start(2, "parallel.jobs_faults:one_ends", str(tmp_path / "llama"), when, LITEBOOST_TP="2"),
        timeout=120,
    )
    assert (first, second) == (0, status), text + other
    found = ranks.result(text)
    assert says in found["text"] and found["seconds"] < 30
    assert ("planted in rank 1" in other) == (when == "token")


@pytest.mark.parametrize("waited", [2, pytest.param(0, marks=pytest.mark.full)])
def test_ranks_that_are_not_started_are_named(tmp_path: Path, waited: float) -> None:
    """Also one that does not come because it is of another level, without a launcher that has a store."""
    save(tmp_path, ("llama",))
    job = ("parallel.jobs_faults:waits_for_missing", str(tmp_path / "llama"), waited)
    started = {
        "no rank 1": ranks.start(2, *job, left_out=(1,), LITEBOOST_TP="2"),
        "no rank 0": ranks.start(2, *job, left_out=(0,), LITEBOOST_TP="2"),
        "level": ranks.start(2, *job, each=[{}, {"LITEBOOST_LEVEL": "1"}], LITEBOOST_TP="2"),
    }
    if not waited:  # ranks that have come take part in time
        started["no ranks 1 and 3"] = ranks.start(4, *job, left_out=(1, 3), LITEBOOST_TP="4")
    said_of = {"no rank 0": "rank 0 has not come", "no ranks 1 and 3": "ranks 1, 3 have not come"}
    found = {case: ranks.finish(each) for case, each in started.items()}
    for case in started:
        says = said_of.get(case, "rank 1 has not come")
        (code, text), *others = found[case]
        said = ranks.result(text)
        assert code == 0 and said["text"].startswith(f"ParallelError: {says} within"), text
        assert waited or said["seconds"] < 30, (case, said)
        assert all(other == 0 for other, _ in others)
    assert "another LITEBOOST_LEVEL" in ranks.result(found["level"][0][1])["text"]
    assert ranks.result(found["level"][1][1])["text"] == "nothing raised"
    assert "MASTER_PORT" in ranks.result(found["no rank 0"][0][1])["text"]


def test_ranks_of_different_models_are_told_so_at_start(tmp_path: Path) -> None:
    save(tmp_path, ("llama", "qwen3"))
    job = ("parallel.jobs_faults:loads", str(tmp_path), ["llama", "qwen3"])
    done = ranks.finish(ranks.start(2, *job, LITEBOOST_TP="2"))
    for code, text in done:
        assert code == 0
        assert "different model (rank 0: LlamaForCausalLM; rank 1: Qwen3ForCausalLM)" in ranks.result(text)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["raise ValueError('planted')", "os.kill(os.getpid(), 9)"])
def test_torchrun_ends_all_with_the_reason(tmp_path: Path, fault: str) -> None:
    save(tmp_path, ("llama",))
    script = tmp_path / "generate.py"
    script.write_text(
        "import liteboost_adaptor, os, sys, time, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.arange(5, 17)[None]\n"
        "model.generate(ids, max_new_tokens=3, pad_token_id=0)\n"
        "open(sys.argv[2], 'w').write(str(time.time()))\n"
        "if os.environ['RANK'] == '1':\n"
        f"    {fault}\n"
        "model.generate(ids, max_new_tokens=3, pad_token_id=0)\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "llama"), str(tmp_path / "time")],
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode
    assert time.time() - float((tmp_path / "time").read_text()) < 30
    assert "planted" in done.stderr or "Signal 9 (SIGKILL)" in done.stderr


def test_ranks_that_differ_read_one_reason() -> None:
    """Each rank has its own facts first; whichever decides, all are told the same."""
    facts = [{"call": "generate", "settings": {"max_new_tokens": n}, "inputs": ""} for n in (2, 3, 4)]
    reasons = {
        synchronize._why_diverged({rank: facts[rank] for rank in order}) for order in ((0, 1, 2), (2, 0, 1))
    }
    assert reasons == {
        "generate was called with different settings on rank 0 and on rank 1: max_new_tokens=2 and 3"
    }
