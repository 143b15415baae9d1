"""Scripts of everyday use: what is compared, and that the variant without us is without us."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest

from liteboost_adaptor.bench.everyday import __main__ as command
from liteboost_adaptor.bench.everyday import models, runner, worker
from liteboost_adaptor.bench.everyday.runner import Row, ScriptError, measure, table
from liteboost_adaptor.bench.everyday.script import Script
from liteboost_adaptor.bench.everyday.scripts import SCRIPTS

FOLDER = Path(worker.__file__).parent
#: What runs in the process that makes the models and compares: the others run in the variant without us, too.
OURS = {"__main__.py", "models.py", "runner.py"}


def test_there_are_thirty_scripts_and_each_has_a_model() -> None:
    assert len(SCRIPTS) >= 30
    known = {*models.MODELS, "image-text"}
    assert {script.model for script in SCRIPTS.values()} == known


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.py") if file.name not in OURS))
def test_the_variant_without_us_imports_nothing_of_the_package(name: str) -> None:
    for node in ast.walk(ast.parse((FOLDER / name).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1 and not (node.module or "").startswith("liteboost_adaptor")
        elif isinstance(node, ast.Import):
            assert not any(each.name.startswith("liteboost_adaptor") for each in node.names)


@pytest.mark.parametrize(
    ("expected", "found"),
    [([5.0, 6.0], [5.0, 7.0]), ([5.0, 6.0], [5.0]), ([0.5, 0.1], [0.5, 0.102])],
    ids=["another token", "a token less", "another value"],
)
def test_another_result_is_an_error(expected: list[float], found: list[float]) -> None:
    runner._compare("greedy", expected, expected)
    runner._compare("greedy", expected, [each + 1e-5 for each in expected])
    with pytest.raises(ScriptError, match="'greedy' gives other results"):
        runner._compare("greedy", expected, found)


def test_the_table_has_a_row_for_each_script() -> None:
    lines = list(table([Row("greedy", "`generate`", 2.0, 1.0, 0.5)]))
    assert lines[-1] == "| greedy | `generate` | 2.00 | 1.00 | 0.50 |\n"


#: In place of `worker`: rounds without us take 3, 1 and 2 seconds, at level 2 a quarter of that, and at level
#: 1 as much, with another token; at level 0 the process ends.
WORKER = """
import json, os, sys
level = os.environ.get("LITEBOOST_LEVEL")
assert sys.argv[1:] == ([] if level is None else ["liteboost_adaptor"])
assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
for at, line in enumerate(sys.stdin):
    name, folder = json.loads(line)
    assert os.path.isdir(folder)
    if level == "0":
        break
    seconds = (3, 1, 2)[at % 3] * (0.25 if level == "2" else 1)
    numbers = [5.0, 6.0 if level != "1" else 7.0]
    print(json.dumps({"cpu_s": seconds, "wall_s": seconds, "numbers": numbers}), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that answer at once; returns a folder with a model for them."""
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    monkeypatch.setattr(worker, "__file__", str(file))
    (tmp_path / SCRIPTS["short"].model).mkdir()
    return tmp_path


def test_variants_take_turns_and_the_command_says_how_they_did(
    stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stand_in / "figures.json"
    where = ["--workdir", str(stand_in), "--json", str(file), "--threads", "1"]
    command.main(["--scripts", "short", "greedy", *where])
    found = capsys.readouterr()
    row = {"plain_s": 2.0, "ours_s": 0.5, "ratio": 0.25}
    assert json.loads(file.read_text()) == [
        {"name": name, "words": SCRIPTS[name].words, **row} for name in ("short", "greedy")
    ]
    assert found.out.splitlines()[2:] == [
        "| short | `generate`, 20 tokens once | 2.00 | 0.50 | 0.25 |",
        "| greedy | `generate`, 240 tokens | 2.00 | 0.50 | 0.25 |",
        "",
        "2 of 2 at most 0.7 times, 0 over 1.03.",
    ]
    assert found.err == "short: 2.00 s, 0.50 s, 0.25\ngreedy: 2.00 s, 0.50 s, 0.25\n"


@pytest.mark.parametrize(
    ("level", "words"),
    [("1", "'short' gives other results"), ("0", "the script 'short' at level 0: it ended")],
)
def test_a_variant_that_cannot_be_compared_is_an_error(stand_in: Path, level: str, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        list(measure(["short"], stand_in, rounds=1, threads=1, level=level))


def test_a_worker_answers_from_a_fork_and_survives_what_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(folder: Path) -> list[float]:
        raise ValueError(f"no model in {folder.name}")

    seen: list[Path] = []
    scripts = {
        "noted": Script("", lambda folder: [float(seen.append(folder) is None), len(seen)], ""),
        "raising": Script("", raising, ""),
    }
    requests = [("noted", "a"), ("raising", "b"), ("noted", "c")]
    lines = "".join(json.dumps(each) + "\n" for each in requests)
    monkeypatch.setattr(worker, "scripts", lambda: scripts)
    monkeypatch.setattr(worker, "_IMPORTED", ("wave",))
    monkeypatch.setattr(sys, "argv", ["worker.py", "imported_first"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_first.py").write_text("import sys\nassert 'wave' not in sys.modules")
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with (tmp_path / "answers").open("w") as file:
        monkeypatch.setattr(worker, "answers", file, raising=False)
        worker.main()
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    # A child begins as all others did: what the one before it noted is not there.
    assert [each.get("numbers") for each in answers] == [[1.0, 1.0], None, [1.0, 1.0]]
    assert answers[1] == {"error": "ValueError: no model in b"} and seen == []
    assert all(0 <= each["cpu_s"] and 0 < each["wall_s"] for each in answers[::2])


def test_the_variant_without_us_has_the_same_scripts_under_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [name for name in sys.modules if name.partition(".")[0] == "everyday"]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    found = worker.scripts()
    assert {name: (each.model, each.words) for name, each in found.items()} == {
        name: (each.model, each.words) for name, each in SCRIPTS.items()
    }
    assert {each.run.__module__.partition(".")[0] for each in found.values()} == {"everyday"}


@pytest.mark.full
def test_a_script_runs_without_us_and_at_level_2(tmp_path: Path) -> None:
    (row,) = measure(["short"], tmp_path, rounds=1, threads=1)
    assert row.plain_s > 0 and row.ours_s > 0
    assert row.ratio == pytest.approx(row.ours_s / row.plain_s)


@pytest.mark.full
def test_a_script_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / SCRIPTS["short"].model).mkdir()
    with pytest.raises(ScriptError, match=r"the script 'short' without us: \w+Error: .*decoder"):
        list(measure(["short"], tmp_path, rounds=1, threads=1))
