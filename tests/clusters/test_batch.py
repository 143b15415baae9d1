"""``examples/ray/batch.py`` on two nodes: every prompt has one text, whatever dies meanwhile."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import nodes
from clusters.nodes import MODEL, Nodes
from serve import plan

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("needs_ray", "native_only")]

TOKENS = 24
BLOCK = 2
#: The title of an actor that is at a block.
_AT_WORK = r"ray::MapWorker.*\.submit"
#: Behind what the model has room for.
LONG = "night " * 1100


@pytest.fixture
def two_nodes(needs_ray: None) -> Iterator[Nodes]:
    with nodes.cluster(2, cpus=1) as found:
        yield found


@pytest.fixture(scope="module")
def texts(needs_ray: None) -> dict[str, str]:
    """Prompts, and what `generate` alone gives for them."""
    return nodes.alone([*plan.prompts(80, 5), "one line\N{LINE SEPARATOR}of two"], TOKENS)


@pytest.fixture
def prompts(texts: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """A folder of them, by the names they have in the output."""
    folder = tmp_path / "prompts"
    (folder / "more").mkdir(parents=True)
    first, *lines, last = [*texts, LONG]
    (folder / "lines.jsonl").write_text(
        "\n".join(json.dumps({"prompt": line}, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    (folder / "first.txt").write_text(first, encoding="utf-8")
    (folder / "more" / "last.txt").write_text(last, encoding="utf-8")
    named = {f"lines.jsonl:{number}": line for number, line in zip(range(1, 999, 2), lines, strict=False)}
    return named | {"first.txt": first, "more/last.txt": last}


class Batch:
    """Runs of the example with one folder of prompts and one of texts."""

    def __init__(self, cluster: Nodes, folder: Path) -> None:
        self.cluster, self.folder, self.output = cluster, folder, folder / "texts"
        self.log = folder / "batch.log"

    def program(self, block: int = BLOCK) -> Any:
        arguments = (MODEL, self.folder / "prompts", self.output, "--dtype", "float32")
        options = ("--max-tokens", TOKENS, "--block", block)
        return self.cluster.program(self.log, "batch.py", *arguments, *options)

    def files(self) -> dict[str, int]:
        """Blocks that are written, and when each was."""
        return {path.name: path.stat().st_mtime_ns for path in self.output.glob("*.jsonl")}

    def finish(self, process: Any) -> None:
        assert process.wait(nodes.PATIENCE) == 0, self.log.read_text(errors="replace")[-6000:]

    def check(self, prompts: dict[str, str], texts: dict[str, str]) -> None:
        """Each prompt is there once, with its text or with why it has none."""
        lines = [line for file in self.files() for line in (self.output / file).read_text().splitlines()]
        answers = [json.loads(line) for line in lines]
        assert Counter(answer["name"] for answer in answers) == Counter([*prompts])
        for answer in answers:
            assert answer["prompt"] == prompts[answer["name"]]
            if answer["prompt"] == LONG:
                assert "the model has room for 1024" in answer["error"]
            else:
                assert answer["text"] == texts[answer["prompt"]]
        assert not list(self.output.glob("*.tmp"))


def test_a_node_is_killed(
    two_nodes: Nodes, prompts: dict[str, str], texts: dict[str, str], tmp_path: Path
) -> None:
    """While it makes a block, which the other node makes then."""
    batch = Batch(two_nodes, tmp_path)
    with batch.program() as process:
        nodes.wait(lambda: batch.files() and two_nodes.workers(1, _AT_WORK), process, batch.log)
        before = batch.files()
        two_nodes.kill(1)
        batch.finish(process)
    assert len(before) < len(prompts) // BLOCK
    assert before.items() <= batch.files().items()
    batch.check(prompts, texts)


def test_the_program_is_killed_and_run_again(
    two_nodes: Nodes, prompts: dict[str, str], texts: dict[str, str], tmp_path: Path
) -> None:
    batch = Batch(two_nodes, tmp_path)
    with batch.program() as process:
        nodes.wait(lambda: len(batch.files()) >= 3, process, batch.log)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = batch.files()
    assert len(before) < len(prompts) // BLOCK
    new = tmp_path / "prompts" / "new.txt"
    new.write_text(prompts["first.txt"])
    with batch.program(block=5) as process:  # of new prompts
        batch.finish(process)
    assert before.items() <= batch.files().items()
    batch.check(prompts | {"new.txt": prompts["first.txt"]}, texts)
    new.unlink()
    with batch.program() as process:
        assert process.wait(nodes.PATIENCE) == 1
    assert "1 prompts of" in batch.log.read_text() and "new.txt" in batch.log.read_text()
