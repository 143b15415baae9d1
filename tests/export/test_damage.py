"""Folders that are damaged, changed or hostile: an error that names the file, and no crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes, runner

Copy = Callable[[], Path]


def refuse(folder: Path) -> str:
    with pytest.raises(runner.RunnerError) as refused:
        runner.Model(folder)
    return str(refused.value)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """What is said of a manifest that was changed by who knows the format."""
    path = folder / "manifest.json"
    says = json.loads(path.read_text(encoding="utf-8"))
    change(says)
    path.write_text(json.dumps(says), encoding="utf-8")
    runner.sign(folder)
    return refuse(folder)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert "nowhere cannot be opened: No such file or directory" in refuse(tmp_path / "nowhere")
    assert "SHA256SUMS" in refuse(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "programs/steps-1.txt"])
def test_every_file_is_missed_cut_short_and_noticed_when_it_is_changed(changed: Copy, name: str) -> None:
    path = changed() / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{name} is not the file that was written" in refuse(
        changed_folder := path.parents[name.count("/")]
    )
    path.write_bytes(bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]]))
    assert f"{name} is not the file that was written" in refuse(changed_folder)
    path.unlink()
    assert f"{name} cannot be opened" in refuse(changed_folder)


def test_weights_that_are_cut_short_are_noticed_without_their_checksum(changed: Copy) -> None:
    folder = changed()
    path = folder / "weights.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        runner.sign(folder)
        assert "weights.safetensors" in refuse(folder)
    path.write_bytes(b"\xff" * 7 + b"\x7f" + whole[8:])  # a head that is longer than numbers count
    runner.sign(folder)
    assert "weights.safetensors is cut short" in refuse(folder)


def set_at(says: dict[str, Any], *path: Any, to: Any) -> None:
    for step in path[:-1]:
        says = says[step]
    says[path[-1]] = to


MANIFESTS = {
    "another format": (("format",), 2, "has format 2"),
    "other kernels": (("schemas",), "0123", "export the model again"),
    "a file outside": (("programs", 0, "file"), "../../etc/passwd", "../../etc/passwd"),
    "an absolute file": (("programs", 0, "file"), "/etc/passwd", "is no name of a file in the folder"),
    "a file that is not listed": (("programs", 0, "file"), "SHA256SUMS", "is not listed"),
    "memory beyond count": (("cache", 0, "sizes"), [1 << 40, 1 << 40, 4, 4], "larger than memory can be"),
    "memory beyond the machine": (
        ("cache", 0, "sizes"),
        [1 << 40, 1 << 18, 1, 1],
        "manifest.json: cache: 0.keys",
    ),
    "a size below zero": (("cache", 0, "sizes"), [1, -2, 40, 16], "must be from 1"),
    "an unknown dtype": (("cache", 0, "dtype"), "F31", "F31"),
    "an entry that is not there": (("programs", 0, "returned"), [99], "must be from 0 to"),
    "an unknown tensor": (("programs", 0, "constants"), ["nothing"], "has no nothing"),
    "an unknown argument": (("programs", 0, "arguments"), ["inputs_embeds"], "inputs_embeds"),
    "an unknown number": (("programs", 2, "numbers"), [{"kind": "moon"}], "'moon' is no kind of number"),
    "lengths without a program": (("prompts",), [[1, 1, 0]], "no program for some lengths"),
    "lengths that overlap": (("steps",), [[1, 5, 0], [5, 39, 0]], "not one behind the other"),
    "a length beyond numbers": (("longest",), 1 << 80, "must be a whole number"),
    "a stop beyond the vocabulary": (("generation", "stop"), [1 << 33], "generation: stop"),
    "a temperature of none": (("generation", "temperature"), 0, "temperature must be above 0"),
    "operators that are not listed": (("operators",), [], "does not list among operators"),
    "a list for a number": (("vocabulary",), [], "vocabulary must be"),
    "tensors turned round": (("transposed",), {"model.norm.weight": [0, 0]}, "model.norm.weight"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_hostile_manifests(changed: Copy, name: str) -> None:
    path, value, words = MANIFESTS[name]
    assert words in rewritten(changed(), lambda says: set_at(says, *path, to=value))


def test_a_file_that_is_a_link_to_outside(changed: Copy, tmp_path: Path) -> None:
    folder, outside = changed(), tmp_path / "outside.txt"
    path = folder / "programs/steps-1.txt"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    assert "programs/steps-1.txt lies outside of the folder" in refuse(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 1, "format": 1}',
        "[" * 100_000,
        '{"format": "\\ud800"',
        '{"format": 1e999}',
        "{} {}",
        '{"a": tru}',
        "\x00",
    ],
)
def test_manifests_that_are_no_json(changed: Copy, text: str) -> None:
    folder = changed()
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    runner.sign(folder)
    assert "manifest.json" in refuse(folder)


PROGRAMS = {
    "a slot that is not there": "slots 2 0 20\nalias 4000 0 1 1 1 -> 19\nreturn 19",
    "a slot below zero": "slots 2 0 20\nsize -4 0 3\nreturn 3",
    "more constants than slots": "slots 0 0 1\nreturn 0",
    "slots beyond memory": "slots 2 0 9000000000000000000\nreturn 0",
    "an unknown operator": "slots 2 0 100\nop aten::nothing default 0 -> 90\nreturn 90",
    "an operator that opens files": "slots 2 0 100\nop aten::from_file default 1 0 s 4:/etc -> 90\nreturn 90",
    "lists in lists": "slots 2 0 100\nop aten::cat default 1 0 " + "[ 1 " * 5000 + "-> 90\nreturn 90",
    "a text cut short": "slots 2 0 100\nop aten::from_file default 1 0 s 40000000:a -> 90\nreturn 90",
    "another format": "PK\x03\x04",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_programs(changed: Copy, name: str) -> None:
    folder = changed()
    (folder / "programs/steps-1.txt").write_text(PROGRAMS[name], encoding="utf-8")
    runner.sign(folder)
    assert "programs/steps-1.txt" in refuse(folder)


def test_a_program_of_other_results_fails_when_it_runs(changed: Copy) -> None:
    folder = changed()
    for path in (folder / "programs").glob("steps-*.txt"):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        path.write_text(f"{first}\nreturn\n", encoding="utf-8")
    runner.sign(folder)
    opened = runner.Model(folder)
    opened.prefill([5, 6, 7])
    opened.next()
    for words in ("BAD_FOLDER: programs/steps-.* stopped for 1 tokens behind 3", "FAILED: .* reset"):
        with pytest.raises(runner.RunnerError, match=words):
            opened.next()
    opened.close()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_exchanged_crash_nothing(seed: int, changed: Copy) -> None:
    library = runner.folder_of_kernels() / runner.LIBRARY
    script = "import sys; from fuzz import folders; folders.main(*sys.argv[1:])"
    done = processes.python(script, "run", str(library), str(changed()), str(seed), "400")
    assert done.returncode == 0, done.stderr
    refused, ran = map(int, done.stdout.split())
    assert refused > 100 and ran > 10
