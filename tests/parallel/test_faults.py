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

pytestmark = pytest.mark.usefixtures("native_only")


@pytest.mark.parametrize(
    ("when", "status", "says"),
    [
        ("prompt", 3, "ParallelError: rank 0 of 2 waited for the others, and one has ended"),
        ("token", 1, "has ended; rank 0 waited for it in collective"),
    ],
)
def test_a_rank_that_ends(tmp_path: Path, when: str, status: int, says: str) -> None:
    save(tmp_path, ("llama",))
    (first, text), (second, other) = ranks.finish(
        ranks.start(2, "parallel.jobs_faults:one_ends", str(tmp_path / "llama"), when), timeout=120
    )
    assert (first, second) == (0, status), text + other
    found = ranks.result(text)
    assert says in found["text"] and found["seconds"] < 30
    assert ("planted in rank 1" in other) == (when == "token")


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
