"""Processes that compare ops or run stages, in place of which a few lines answer. On an NPU: tests/npu."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest import helper, helper_main, kit
from liteboost_adaptor.selftest.compare import Figure, Result

IDENTITY = {"soc": "Ascend910B2", "cann": "8.5.0"}
RESULT = Result("rms_norm", "bf16", (Figure("[1, 64]", 0.25, 0.5),))
LOST = Result("rms_norm", "bf16", (), fault="lost the device")
#: A helper that sends what is written here for an op; it ends, hangs or is idle for ops of these names.
HELPER = """
import os, sys, time
from multiprocessing.connection import Connection
there = Connection(int(sys.argv[2]))
assert sys.argv[3] == "npu:0" and "RANK" not in os.environ
assert os.environ["LITEBOOST_FIRST_USE"] == "thread"
there.send_bytes(READY)
while True:
    op, kind = there.recv()
    if op == "ending":
        sys.exit("some words\\n  the last   words\\n\\n")
    if op == "hanging":
        time.sleep(600)
    if op == "idle" and not os.path.exists(kind):
        open(kind, "w").close()
        there.send(("idle", None))
        break
    there.send_bytes(ANSWERS[op])
"""
ANSWERS = {
    "right": ("result", RESULT),
    "idle": ("result", RESULT),
    "lost": ("result", LOST),
    "full": ("memory", "no memory left"),
    "raising": ("raised", "ValueError: no such kind"),
}


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Starts helpers that say what they are told to, at first and later on."""

    def plan(ready: tuple[str, Any] = ("ready", IDENTITY), code: str = HELPER) -> None:
        answers = {op: pickle.dumps(answer) for op, answer in ANSWERS.items()}
        entry = code.replace("READY", repr(pickle.dumps(ready))).replace("ANSWERS", repr(answers))
        monkeypatch.setattr(helper, "ENTRY", entry)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(helper.facts, "identity", lambda: IDENTITY)
    monkeypatch.setattr(helper, "GRACE_SECONDS", 60.0)  # so that an end is never hurried
    helper.close()
    plan()
    before = helper.started()
    yield types.SimpleNamespace(plan=plan, started=lambda: helper.started() - before)
    helper.close()


def test_one_helper_gives_one_answer_after_the_other(helpers: types.SimpleNamespace) -> None:
    assert helper.compare("right", "bf16", "npu:0") == RESULT
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        helper.compare("full", "bf16", "npu:0")
    with pytest.raises(RuntimeError, match="ValueError: no such kind"):
        helper.compare("raising", "bf16", "npu:0")
    assert helper.compare("right", "bf16", "npu:0") == RESULT
    assert helpers.started() == 1 and helper.start_seconds() > 0
    process = helper.process_on("npu:0")
    assert process.poll() is None
    helper.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        ("ending", "the helper process that compared it ended with status 1: the last words (bf16)"),
        ("hanging", "the helper process that compared it did not come to an end within 0 s (bf16)"),
        ("lost", "lost the device"),
    ],
)
def test_a_helper_that_is_gone_is_a_fault_of_its_op_and_another_takes_the_next(
    helpers: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, op: str, fault: str
) -> None:
    assert helper.compare("right", "bf16", "npu:0") == RESULT
    first = helper.process_on("npu:0")
    with monkeypatch.context() as patch:
        if op == "hanging":
            patch.setattr(helper, "KIND_SECONDS", 0.1)
            patch.setattr(helper, "GRACE_SECONDS", 0.1)
        assert helper.compare(op, "bf16", "npu:0").fault == fault
    assert first.poll() is not None
    assert helper.compare("right", "bf16", "npu:0") == RESULT
    assert helpers.started() == 2


def test_a_helper_that_ended_for_nobody_asked_is_started_again(
    helpers: types.SimpleNamespace, tmp_path: Path
) -> None:
    assert helper.compare("idle", str(tmp_path / "asked"), "npu:0") == RESULT
    assert helpers.started() == 2


@pytest.mark.parametrize(
    ("ready", "code", "words"),
    [
        (("ready", {"soc": "another"}), HELPER, "it found another installation: {'soc': 'another'}"),
        (("raised", "RuntimeError: it finds no NPU"), HELPER, "RuntimeError: it finds no NPU"),
        (("ready", IDENTITY), "import sys; sys.exit('no torch')", "ended with status 1: no torch"),
    ],
    ids=["another installation", "raised", "ended"],
)
def test_a_helper_that_cannot_start_is_tried_once(
    helpers: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ready: tuple[str, Any],
    code: str,
    words: str,
) -> None:
    helpers.plan(ready, code)
    for _ in range(2):
        with pytest.raises(helper.HelperError) as raised:
            helper.compare("right", "bf16", "npu:0")
        assert words in str(raised.value) and "LITEBOOST_FIRST_USE=thread" in str(raised.value)
        monkeypatch.setattr(helper, "_Helper", lambda device: pytest.fail("another was started"))
    assert helpers.started() == 0


class _Exited(BaseException):
    """In place of the end of the process: the end of a thread."""


def quietly(run: Callable[..., None]) -> Callable[..., None]:
    def until_exit(*arguments: Any) -> None:
        with contextlib.suppress(_Exited):
            run(*arguments)

    return until_exit


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """`helper_main` in a thread, on a device that is there; ``asked`` hands a request to it."""
    here, theirs = Pipe()
    exits: list[int] = []
    left = threading.Semaphore(0)

    def leave(status: int) -> None:
        exits.append(status)
        left.release()
        raise _Exited

    def begin() -> Any:
        arguments = os.dup(theirs.fileno()), "cpu"
        threading.Thread(target=quietly(helper_main.main), args=arguments).start()
        theirs.close()
        return here.recv()

    def asked(op: str, kind: str) -> Any:
        here.send((op, kind))
        return here.recv()

    before = threading.enumerate()
    device = types.SimpleNamespace(set_device=lambda name: None, synchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", device, raising=False)
    monkeypatch.setattr(native_npu, "load", lambda: types.SimpleNamespace(loaded=True))
    monkeypatch.setattr(helper_main.facts, "identity", lambda: IDENTITY)
    monkeypatch.setattr(helper_main, "_read", quietly(helper_main._read))
    monkeypatch.setattr(helper_main, "os", types.SimpleNamespace(_exit=leave))
    yield types.SimpleNamespace(begin=begin, asked=asked, device=device, exits=exits, left=left, here=here)
    here.close()
    for thread in threading.enumerate():  # while its end is not that of this process
        if thread not in before:
            thread.join(timeout=60)
            assert not thread.is_alive()


def test_a_helper_answers_until_the_pipe_is_closed(
    serving: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(op: str, kind: str, device: str) -> Result:
        assert device == "cpu"
        if op == "full":
            raise torch.OutOfMemoryError("no memory\n left")
        if op == "raising":
            raise ValueError(f"no kind  {kind}")
        return RESULT

    monkeypatch.setattr(helper_main, "compare", compared)
    assert serving.begin() == ("ready", IDENTITY)
    assert serving.asked("rms_norm", "bf16") == ("result", RESULT)
    assert serving.asked("full", "bf16") == ("memory", "OutOfMemoryError: no memory left")
    assert serving.asked("raising", "bf16") == ("raised", "ValueError: no kind bf16")
    assert serving.asked("rms_norm", "bf16") == ("result", RESULT) and serving.exits == []
    monkeypatch.setattr(helper_main, "IDLE_SECONDS", 0.05)
    assert serving.asked("rms_norm", "bf16") == ("result", RESULT)
    assert serving.here.recv() == ("idle", None)
    serving.here.close()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result("rope", "bf16", (Figure("[2]", 0.0, 1.0), Figure("[4]", 9.0, 1.0, "507015"))), "[4]: 507015"),
        (Result("rope", "bf16", ()), "after the last case: RuntimeError: it is lost"),
    ],
)
def test_a_helper_that_has_lost_its_device_says_where_and_ends(
    serving: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, result: Result, words: str
) -> None:
    def lost() -> None:
        raise RuntimeError("it is lost")

    def compared(op: str, kind: str, device: str) -> Result:
        serving.device.synchronize = lost
        return result

    monkeypatch.setattr(helper_main, "compare", compared)
    assert serving.begin() == ("ready", IDENTITY)
    answer, found = serving.asked("rope", "bf16")
    assert (answer, found.figures) == ("result", result.figures)
    assert found.fault == f"the helper process that compared it lost the device, {words} (bf16)"
    serving.left.acquire(timeout=60)
    assert serving.exits == [1]


@pytest.mark.parametrize(
    ("status", "words"),
    [(None, "it finds no NPU"), (types.SimpleNamespace(loaded=False, sentence="none built"), "none built")],
)
def test_a_helper_without_a_device_says_so(
    serving: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, status: Any, words: str
) -> None:
    monkeypatch.setattr(native_npu, "load", lambda: status)
    assert serving.begin() == ("raised", f"RuntimeError: {words}")


#: A stage whose outcome is what its name says.
STAGE = """
import json, os, sys, time
name, device, file = sys.argv[2:]
rank = os.environ.get("RANK")
if name == "hanging":
    time.sleep(600)
if name == "ending":
    sys.exit("one\\n\\ntwo\\nthree\\n  four \\nfive")
assert os.environ["LITEBOOST_LEVEL"] == "0"
if name == "collectives":
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0
    assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (rank, "2")
with open(file, "w") as out:
    json.dump([rank != FAILING, f"{device}, rank {rank}"], out)
if name == "ending badly":
    sys.exit(9)
"""


@pytest.fixture
def npus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, as far as stages are counted; this process is a rank of something else."""
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(device_count=lambda: 2), raising=False)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setattr(kit, "ENTRY", STAGE.replace("FAILING", "'7'"))


@pytest.mark.usefixtures("npus")
def test_stages_run_one_after_the_other_and_say_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    names = ("capture", "ending badly", "ending", "collectives")
    found = list(kit.run("npu:1", names, lambda done, total, what: told.append((done, total, what))))
    assert told == [(at, 4, name) for at, name in enumerate(names)]
    assert [(each.name, each.outcome, each.words) for each in found] == [
        ("capture", "pass", "npu:1, rank None"),
        ("ending badly", "pass", "npu:1, rank None"),  # behind its answer
        ("ending", "FAIL", "ended with status 1: two / three / four / five"),
        ("collectives", "pass", "npu:0, rank 0"),
    ]
    assert all(each.seconds > 0 for each in found)


@pytest.mark.usefixtures("npus")
def test_a_rank_that_fails_speaks_for_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "ENTRY", STAGE.replace("FAILING", "'1'"))
    (found,) = kit.run("npu:0", ("collectives",))
    assert (found.outcome, found.words) == ("FAIL", "npu:1, rank 1")


@pytest.mark.usefixtures("npus")
def test_a_stage_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "STAGE_SECONDS", 0.1)
    (found,) = kit.run("npu:0", ("hanging",))
    assert (found.outcome, found.words) == ("FAIL", "did not come to an end within 0 s")
