"""``python -m liteboost_adaptor run``: programs and their children run as they do alone, with us before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import processes

from liteboost_adaptor import cli, config
from liteboost_adaptor.cli import programs

run = sys.modules["liteboost_adaptor.cli.run"]  # the package has the function under this name
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate.py"
US = [sys.executable, "-m", "liteboost_adaptor", "run"]
#: What a program can see of how it was started, and whether we come before torch does.
SEES = """
import json, signal, sys
seen = [sys.argv, __name__, __file__, sys.path, list(sys.flags), sys.executable, sys.warnoptions]
seen += [name in sys.modules for name in ("sitecustomize", "liteboost_adaptor")]
seen += [signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN]
import importlib.util
importlib.util.find_spec("torch")
print(json.dumps([seen, "liteboost_adaptor" in sys.modules, "torch" in sys.modules]))
sys.exit(3)
"""


def started(*command: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        env=processes.environment(**changes),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def answer(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path / "sees.py", SEES)


def test_a_script_sees_what_it_sees_alone(script: Path, tmp_path: Path) -> None:
    options = ["-u", "-W", "ignore::ImportWarning"]
    arguments = ["--level", "9", "-m", "--help", ""]
    seen, before, torch = answer(started(sys.executable, *options, script, *arguments), 3)
    assert (before, torch) == (False, False)
    us = write(
        tmp_path / "liteboost", "import sys\nfrom liteboost_adaptor import cli\nsys.exit(cli.main())\n"
    )
    for ours in (["-m", "liteboost_adaptor"], [us]):  # the second is what an installation makes a command
        command = [sys.executable, *options, *ours, "run", "--level", "1", script, *arguments]
        assert answer(started(*command), 3) == [seen, True, False]


def test_a_module_sees_what_it_sees_alone(script: Path) -> None:
    path = os.pathsep.join([str(script.parent), processes.environment()["PYTHONPATH"]])
    seen, before, _ = answer(started(sys.executable, "-m", "sees", "--help", PYTHONPATH=path), 3)
    assert not before
    assert answer(started(*US, "-m", "sees", "--help", PYTHONPATH=path), 3) == [seen, True, False]


def test_a_console_command_runs_by_its_own_interpreter(script: Path, tmp_path: Path) -> None:
    command = write(tmp_path / "third-party", f"#!{sys.executable}\n{SEES}", 0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    seen, before, _ = answer(started(command, "x", PATH=path), 3)
    assert not before
    assert answer(started(*US, "third-party", "x", PATH=path), 3) == [seen, True, False]
    assert answer(started(*US, command, "x"), 3) == [seen, True, False]


def test_children_and_threads_of_any_kind_are_preceded(tmp_path: Path) -> None:
    program = write(
        tmp_path / "children.py",
        "import importlib.util, json, multiprocessing, os, subprocess, sys\n"
        "def look(queue):\n"
        "    importlib.util.find_spec('torch')\n"
        "    queue.put('liteboost_adaptor' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    found = {}\n"
        "    for way in ('fork', 'spawn', 'forkserver'):\n"
        "        context = multiprocessing.get_context(way)\n"
        "        queue = context.SimpleQueue()\n"
        "        child = context.Process(target=look, args=(queue,))\n"
        "        child.start(); found[way] = queue.get(); child.join()\n"
        "    code = 'import sys, importlib.util as u; u.find_spec(\"torch\"); ' \\\n"
        "        'print(\"liteboost_adaptor\" in sys.modules)'\n"
        "    for name, options in (('subprocess', []), ('isolated', ['-I'])):\n"
        "        command = [sys.executable, *options, '-c', code]\n"
        "        found[name] = subprocess.check_output(command, text=True).strip() == 'True'\n"
        "    print(json.dumps(found))\n",
    )
    found = answer(started(*US, program))
    assert found == {"fork": True, "spawn": True, "forkserver": True, "subprocess": True, "isolated": False}


def test_a_users_own_sitecustomize_runs_as_ever(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "import builtins; builtins.users_own = __file__\n")
    program = write(
        tmp_path / "says.py", "import sitecustomize\nprint([users_own, sitecustomize.__file__])\n"
    )
    path = os.pathsep.join([str(tmp_path), processes.environment()["PYTHONPATH"]])
    alone = started(sys.executable, program, PYTHONPATH=path)
    with_us = started(*US, program, PYTHONPATH=path)
    assert str(tmp_path / "sitecustomize.py") in alone.stdout
    assert (with_us.stdout, with_us.stderr) == (alone.stdout, alone.stderr)


def test_a_python_without_us_starts_as_ever(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages, and with them this package; sitecustomize is then imported by hand."""
    code = (
        "try:\n import sitecustomize\nexcept ImportError as e: print(e.name)\n"
        "import importlib.util\nprint(importlib.util.find_spec('torch'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(programs.STARTUP)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("sitecustomize\nNone\n", "")


def test_native_programs_signals_and_statuses(tmp_path: Path) -> None:
    done = started(*US, "sh", "-c", "echo $PYTHONPATH; kill -TERM $$")
    assert done.returncode == -signal.SIGTERM  # it has taken our place: nothing is between
    assert done.stdout.split(os.pathsep)[0].strip() == str(programs.STARTUP)
    status = started(*US, "grep", "SigIgn", "/proc/self/status").stdout.split()[1]
    assert not int(status, 16) & 1 << (signal.SIGPIPE - 1)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["no-such-command"], 127, "no such command"),
        (["./no/such/file"], 127, "no such file"),
        (["nowhere.py"], 127, "no such file"),
        (["--level", "9", "true"], 1, "error: level must be 0, 1 or 2; found '9'. Change it or leave it out"),
        (["--quant", "w5", "true"], 1, "error: quant must be"),
        ([], 1, "run needs a program"),
        (["--no-such-option", "true"], 2, "--no-such-option"),
    ],
)
def test_what_cannot_be_run_is_said(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{python} -I", "-I, which ignores PYTHONPATH"),
        ("{other}", "has no liteboost_adaptor. Install it there"),
    ],
)
def test_a_command_whose_python_would_not_import_us_is_refused(
    line: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "python", "#!/bin/sh\nexit 1\n", 0o755)
    line = line.format(python=sys.executable, other=other)
    command = write(tmp_path / "command", f"#!{line}\n", 0o755)
    assert cli.main(["run", str(command)]) == 1
    assert says in capfd.readouterr().err


def test_options_are_what_the_program_finds_set(tmp_path: Path) -> None:
    program = write(
        tmp_path / "set.py",
        "import os, json\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('LITEBOOST_')}))\n",
    )
    found = answer(started(*US, "--level", "1", "--quant", "w4a16", program, LITEBOOST_LEVEL="0"))
    assert found == {"LITEBOOST_LEVEL": "1", "LITEBOOST_QUANT": "w4a16"}


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What takes the place of this process, with its environment and the signals it finds."""
    found: list[Any] = []

    def execve(file: str, argv: list[str], environment: dict[str, str]) -> None:
        if file.endswith(".txt"):
            raise OSError(8, "Exec format error")
        found.append((file, argv, environment, dict(signals)))

    signals: dict[int, Any] = {}
    monkeypatch.setattr(run.signal, "signal", signals.__setitem__)
    monkeypatch.setattr(run.os, "execve", execve)
    return found


@pytest.mark.parametrize("threads", ["", "3"])
def test_the_program_takes_the_place_of_the_process(
    threads: str, become: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LITEBOOST_STATUS_FILE", "status.json")
    monkeypatch.setenv("PYTHONPATH", "/a/folder")
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(run, "usable_cores", lambda: 10)
    config.settings.cache_clear()
    try:
        cli.main(["run", "--level", "1", "--tp", "2", "-m", "json.tool", "--sort-keys", "x"])
    finally:
        monkeypatch.undo()
        config.settings.cache_clear()
    ((file, argv, environment, signals),) = become
    assert file == argv[0] == sys.executable
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert argv[-8:] == [*launched, "--module", "json.tool", "--sort-keys", "x"]
    assert (environment["LITEBOOST_LEVEL"], environment["LITEBOOST_TP"]) == ("1", "2")
    assert environment["OMP_NUM_THREADS"] == (threads or "5")
    assert environment["LITEBOOST_STATUS_FILE"] == str(tmp_path / "status.json")
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(programs.STARTUP), "/a/folder"]
    assert signals == dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ), signal.SIG_DFL)


@pytest.mark.usefixtures("become")
def test_a_file_that_is_no_program_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = write(tmp_path / "notes.txt", "some notes", 0o755)
    assert cli.main(["run", str(program)]) == 126
    assert "notes.txt cannot be run: Exec format error. Make it executable" in capsys.readouterr().err


def test_ranks_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_script = programs.of_name(str(EXAMPLE), ["--x"]).in_ranks(2).argv
    assert of_script[-5:] == [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLE),
        "--x",
    ]
    assert programs.of_module("json.tool", []).in_ranks(2).argv[-2:] == ["--module", "json.tool"]
    of_command = programs.of_name("sh", ["-c"]).in_ranks(2).argv
    assert of_command[-3] == "--no-python" and of_command[-1] == "-c"


STATUS = """
import json, os, signal, sys, time, types
sys.modules["liteboost_adaptor.huggingface.runtime"] = types.ModuleType("serving")
import liteboost_adaptor
api = sys.modules["liteboost_adaptor.api"] = types.ModuleType("liteboost_adaptor.api")
liteboost_adaptor.api = api
class Status:
    def to_json(self): return json.dumps(sys.argv[1])
    def __str__(self): return sys.argv[1]
api.status = Status
"""


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_a_process_writes_its_status_when_it_ends(tmp_path: Path, suffix: str) -> None:
    pattern = tmp_path / f"status-%p.{suffix}"
    # A fork has a number, and so a file, of its own.
    code = STATUS + "child = os.fork()\nif child: os.waitpid(child, 0); print(f'[{os.getpid()}, {child}]')\n"
    pids = answer(processes.python(code, "a note", LITEBOOST_STATUS_FILE=str(pattern)))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(written) == {f"status-{pid}.{suffix}" for pid in pids}
    assert set(written.values()) == {'"a note"\n' if suffix == "json" else "a note\n"}


def test_a_fork_does_not_write_over_its_parents_file(tmp_path: Path) -> None:
    file = tmp_path / "status.txt"
    code = STATUS + (
        f"if not os.fork(): sys.argv[1] = 'child'; sys.exit()\nos.wait()\n"
        f"print(int(os.path.exists({str(file)!r})))\n"
    )
    assert answer(processes.python(code, "parent", LITEBOOST_STATUS_FILE=str(file))) == 0
    assert file.read_text() == "parent\n"


SIGNALLED = """
os.kill(os.getpid(), signal.SIGUSR1)
while not os.path.exists({file!r}): time.sleep(0.01)
os._exit(0)
"""


def test_a_process_writes_its_status_at_a_signal(tmp_path: Path) -> None:
    file = tmp_path / "status.txt"
    code = STATUS + SIGNALLED.format(file=str(file))
    assert processes.python(code, "at a signal", LITEBOOST_STATUS_FILE=str(file)).returncode == 0
    assert file.read_text() == "at a signal\n"


#: As a server does that closes before it ends: its own handler, then the one before it.
CLOSES = """
before = signal.signal(signal.SIGTERM, lambda *_: print("closing", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, before)
signal.raise_signal(signal.SIGTERM)
"""
#: The main thread holds what the status needs.
HOLDS = """
liteboost_adaptor.status_file.PATIENCE = 0.2
import threading
lock = threading.Lock()
Status.__str__ = lambda self: lock.acquire() and ""
with lock: os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "written", "prints"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "at its end\n", ""),
        (CLOSES, "at its end\n", "closing\n"),
        (HOLDS, None, ""),
    ],
    ids=["at once", "closes first", "cannot be written"],
)
def test_a_process_that_sigterm_ends_writes_its_status_and_ends_by_it(
    program: str, written: str | None, prints: str, tmp_path: Path
) -> None:
    file = tmp_path / "status.txt"
    done = processes.python(STATUS + program, "at its end", LITEBOOST_STATUS_FILE=str(file))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, prints), done.stderr
    assert (file.read_text() if file.exists() else None) == written


def test_a_fork_that_sigterm_ends_writes_nothing(tmp_path: Path) -> None:
    # Before the fork has run a line of Python, too: there are several, because one may be quick.
    code = STATUS + (
        "for wait in [0] * 20 + [0.2]:\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(5); os._exit(0)\n"
        "    if wait: time.sleep(wait)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitpid(child, 0)[1], flush=True)\n"
        "os._exit(0)\n"
    )
    done = processes.python(code, "x", LITEBOOST_STATUS_FILE=str(tmp_path / "%p.txt"))
    assert set(done.stdout.split()) == {str(int(signal.SIGTERM))}, done.stderr
    assert not list(tmp_path.iterdir())


def test_anothers_handler_of_the_signal_is_left(tmp_path: Path) -> None:
    code = (
        "import json, signal\nmine = lambda *_: None\nsignal.signal(signal.SIGUSR1, mine)\n"
        "import liteboost_adaptor\n"
        "print(json.dumps(signal.getsignal(signal.SIGUSR1) is mine))"
    )
    assert processes.python_json(code, LITEBOOST_STATUS_FILE=str(tmp_path / "s")) is True


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    code = "import liteboost_adaptor.report\n" + STATUS  # as it is wherever a model can be served
    done = processes.python(code, "x", LITEBOOST_STATUS_FILE=str(tmp_path / "no" / "folder"))
    assert done.returncode == 0
    assert "The status was not written to" in done.stderr and "FileNotFoundError" in done.stderr


def served(status: dict[str, Any]) -> int:
    return sum(rule["calls"] for rule in status["rules"])


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher", [["--tp", "2"], ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"]]
)
def test_both_processes_of_a_launcher_are_served(launcher: list[str], tmp_path: Path) -> None:
    """Each has a status of its own, and the text of one alone; with ``--tp`` they divide the model."""
    text = EXAMPLE.read_text().replace("import liteboost_adaptor\n", "")
    text = text.replace("Path(__file__).parent", f"Path({str(EXAMPLE.parent)!r})")
    program = write(tmp_path / "alone.py", text)
    alone = started(sys.executable, program, "--new-tokens", "4").stdout.strip()
    file = str(tmp_path / "%p.json")
    done = started(*US, *launcher, program, "--new-tokens", "4", LITEBOOST_STATUS_FILE=file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(alone) == 2 and len(alone) > 20
    statuses = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len([status for status in statuses if served(status) > 20]) == 2


def test_the_example_is_served_without_its_line(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("import liteboost_adaptor\n", "")
    program = write(
        tmp_path / "alone.py", text.replace("Path(__file__).parent", f"Path({str(EXAMPLE.parent)!r})")
    )
    file = tmp_path / "status.json"
    done = started(*US, "--level", "1", program, "--new-tokens", "3", LITEBOOST_STATUS_FILE=str(file))
    assert done.returncode == 0 and done.stdout.startswith("ROMEO:"), done.stderr
    status = json.loads(file.read_text())
    calls = {rule["id"]: rule["calls"] for rule in status["rules"] if rule["state"] == "applied"}
    # Three tokens are three passes, with nine norms each.
    assert status["level"] == 1 and calls["norm.rms"] + calls["norm.residual"] == 27
