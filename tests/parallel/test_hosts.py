"""One model over two hosts: two agents of ``torchrun`` that find each other by a rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parallel import ranks
from parallel.test_loading import save
from support import processes

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("native_only")]

_SCRIPT = """
import json, sys
import liteboost_adaptor, torch
from liteboost_adaptor.parallel.runtime import groups, host_processes
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(5, 17)[None]
text = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
drawn = model.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0).tolist()
group = groups.join().name if torch.distributed.is_initialized() else ""
found = {"text": text, "drawn": drawn, "held": sum(p.numel() for p in model.parameters())}
found |= {"host": host_processes.host(), "shares": torch.ops.liteboost_parallel._shares_memory(group)}
sys.stdout.write("FOUND " + json.dumps(found) + "\\n")
"""


#: Generates until it is told to end, or cannot any more.
_ENDLESS = """
import sys
import liteboost_adaptor, torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
while True:
    model.generate(torch.arange(5, 17)[None], max_new_tokens=40, do_sample=False, pad_token_id=0)
    print("GENERATED", flush=True)
"""
#: What a rank is told that has lost the other: who is missing, or what the other host has served.
_REASON = re.compile(r"ParallelError: .*(rank \d|the store by which the ranks find each other)")


def _as_a_host() -> list[str]:
    """A command that starts another with process numbers of its own, by which ranks tell hosts apart."""
    options = ["--pid", "--fork", "--kill-child", "--mount-proc"]
    options += [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    try:
        subprocess.run(["unshare", *options, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as fault:
        pytest.skip(f"needs unshare, with a namespace of process numbers: {fault}")
    return ["unshare", *options]


def _started(
    script: Path, folder: Path, endpoint: str, number: int, host: list[str]
) -> subprocess.Popen[str]:
    """The agent of a host, which has an address of its own."""
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint={endpoint}"),
        f"--local-addr=127.0.0.{number + 1}",
    ]
    return subprocess.Popen(
        [*host, *agent, str(script), str(folder)],
        env=processes.environment(LITEBOOST_TP="2", GLOO_SOCKET_IFNAME="lo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _found(output: str) -> dict[str, Any]:
    (said,) = re.findall("^FOUND (.*)$", output, re.MULTILINE)
    return json.loads(said)


@contextlib.contextmanager
def _two_agents(text: str, folder: Path, wrapped: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Agents that run a script, the second one ``wrapped``, until the block ends."""
    save(folder, ("llama",))
    script = folder / "generate.py"
    script.write_text(text)
    held = ranks.reserved()
    endpoint = f"127.0.0.1:{held.getsockname()[1]}"
    agents = [
        _started(script, folder / "llama", endpoint, number, host)
        for number, host in enumerate(([], wrapped))
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        held.close()


@pytest.mark.parametrize("hosts", [1, 2])
def test_two_agents_and_one_model(hosts: int, tmp_path: Path) -> None:
    """On one host ranks communicate through shared memory, and between hosts by gloo."""
    with _two_agents(_SCRIPT, tmp_path, _as_a_host() if hosts == 2 else []) as agents:
        outputs = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)[-6000:]
    alone = processes.python(_SCRIPT, str(tmp_path / "llama"))
    expected = _found(alone.stdout)
    found = [_found(output) for output in outputs]
    assert len({each["host"] for each in found}) == hosts
    for each in found:
        assert each["text"] == expected["text"]
        assert each["drawn"] == found[0]["drawn"]
        assert each["held"] < 0.51 * expected["held"]
        assert each["shares"] == (hosts == 1)


def test_a_host_that_dies_ends_the_other_with_the_reason(tmp_path: Path) -> None:
    with _two_agents(_ENDLESS, tmp_path, _as_a_host()) as (here, there):
        for agent in (here, there):
            assert any(line.startswith("GENERATED") for line in iter(agent.stdout.readline, "")), agent.poll()
        there.kill()  # and with it all that is numbered there
        output, _ = here.communicate(timeout=300)
        assert here.returncode == 1 and _REASON.search(output), output[-6000:]
