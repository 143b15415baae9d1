"""A cluster of Ray on this host, one raylet for each node, and programs that use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ray"
MODEL = ROOT / "examples" / "models" / "shakespeare-llama"
#: Seconds until what is waited for has come.
PATIENCE = 300.0
#: Of each node; what objects need here is far less.
_STORE_BYTES = 80 * 2**20
#: A variable that all processes of a cluster inherit, by which those that are left are found.
_MARK = "CLUSTER_OF_A_TEST"


class Nodes:
    """A running cluster.

    Attributes:
        address: Where its head is.
        environment: For programs that use it.
    """

    def __init__(self, cluster: Any, environment: dict[str, str]) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self.environment = environment
        self.nodes = [cluster.head_node, *cluster.worker_nodes]

    def workers(self, node: int, title: str) -> list[psutil.Process]:
        """Processes of a node whose titles, which say what each is at, begin with this pattern."""
        found = []
        for process in self._raylet(node).children(recursive=True):
            with _gone_is_fine():
                if re.match(title, process.cmdline()[0]):
                    found.append(process)
        return found

    def kill(self, node: int) -> None:
        """SIGKILL for a node's raylet and all that it has started."""
        raylet = self._raylet(node)
        for process in (*raylet.children(recursive=True), raylet):
            with _gone_is_fine():
                process.kill()
        self._cluster.remove_node(self.nodes[node], allow_graceful=False)

    def _raylet(self, node: int) -> psutil.Process:
        return psutil.Process(self.nodes[node].all_processes["raylet"][0].process.pid)

    @contextmanager
    def program(self, log: Path, script: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
        """An example on this cluster, until the block ends."""
        command = [sys.executable, "-u", EXAMPLES / script, *arguments, "--address", self.address]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                list(map(str, command)), env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def cluster(count: int, cpus: int) -> Iterator[Nodes]:
    """So many nodes, each with ``cpus``; fails where a process of them is left."""
    from ray.cluster_utils import Cluster

    mark = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie in it, whose paths have to be short
    settings = {_MARK: mark, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    environment = processes.environment(**settings)
    with pytest.MonkeyPatch.context() as patch:
        for name in (*settings, "PYTHONPATH"):
            patch.setenv(name, environment[name])
        started = Cluster()
        try:
            for _ in range(count):
                started.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES, include_dashboard=False)
            started.wait_for_nodes()
            yield Nodes(started, environment)
        finally:
            started.shutdown()
            left = _left(mark)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, left


def _left(mark: str) -> list[str]:
    """Processes of a cluster that was shut down, once they have had time to end; they are killed."""
    until = time.monotonic() + 60
    while (found := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    said = []
    for process in found:
        with _gone_is_fine():
            said.append(" ".join(process.cmdline()))
            process.kill()
    return said


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with _gone_is_fine():
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found.append(process)
    return found


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except (
        psutil.NoSuchProcess,
        psutil.AccessDenied,
        IndexError,
    ):  # the last of one that has no title any more
        pass


def wait(found: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """What ``found`` returns, once it is true; fails with the log where ``process`` ends before."""
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError(f"exit status {process.poll()}\n{log.read_text(errors='replace')[-6000:]}")


def alone(prompts: list[str], tokens: int) -> dict[str, str]:
    """Greedy texts of ``generate`` alone, in fp32 and without us."""
    done = subprocess.run(
        [sys.executable, "-m", "serve.alone", str(MODEL), str(tokens)],
        env=processes.environment(),
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return {prompt: texts[-1] for prompt, texts in json.loads(done.stdout).items()}
