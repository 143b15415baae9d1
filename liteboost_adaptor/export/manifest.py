"""What a folder says of itself: ``manifest.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoint.files import NAMES
from ..errors import ExportError
from .lengths import Table, Tables
from .recorded import Number, Recorded

#: Of folders; a runner reads its own.
FORMAT = 1
FILE, WEIGHTS, CHECKSUMS = "manifest.json", "weights.safetensors", "SHA256SUMS"
_PROGRAMS = "programs"
#: Whose operators a runner calls (``kernels/runner/session.cpp``).
_RUN = ("aten", "liteboost")


def manifest(
    made: Tables,
    constants: Mapping[int, list[str]],
    orders: Mapping[str, list[int]],
    about: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest, and name -> text of the programs' files.

    Args:
        constants: `id` of a program -> names of what it holds.
        orders: Of tensors that a program holds transposed: see `constants.Constants`.
        about: What made it, of which model.
    """
    entries = _entries(made)
    places = {name: at for at, name in enumerate(entries)}
    programs: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    tables: dict[str, list[list[int]]] = {}
    for kind, table in (("prompts", made.prompts), ("steps", made.steps)):
        tables[kind] = [[first, last, len(programs) + index] for first, last, index in table.ranges]
        for index, program in enumerate(table.programs):
            file = f"{_PROGRAMS}/{kind}-{index}.txt"
            files[file] = program.text + "\n"
            programs.append(
                {
                    "file": file,
                    "constants": constants[id(program)],
                    "arguments": program.arguments,
                    "kept": [places[name] for name in program.kept],
                    "appended": [places[name] for name in program.appended],
                    "numbers": [
                        _number(table, index, at, number, places) for at, number in enumerate(program.numbers)
                    ],
                    "results": program.results,
                    "logits": program.logits,
                    "returned": [places[name] for name in program.returned],
                }
            )
    text = {
        "format": FORMAT,
        **about,
        "longest": made.longest,
        "operators": sorted(_operators(files.values())),
        "generation": generation,
        "transposed": orders,
        "cache": list(entries.values()),
        "programs": programs,
        **tables,
    }
    return text, files


def _all(made: Tables) -> list[Recorded]:
    return [*made.prompts.programs, *made.steps.programs]


def _entries(made: Tables) -> dict[str, dict[str, Any]]:
    """The tensors that a cache keeps; ``dim``: along which they grow in memory for the longest, or -1."""
    dims = {name: dim for program in _all(made) for name, dim in program.appended.items()}
    dtypes: dict[str, torch.dtype] = {}
    for program in _all(made):
        dtypes |= program.returned
    entries = {}
    for name, dtype in dtypes.items():
        sizes = list(made.last[name])
        dim = dims.get(name, -1)
        if dim >= 0:
            sizes[dim] = made.longest
        entries[name] = {"name": name, "dtype": NAMES[dtype], "dim": dim, "sizes": sizes}
    return entries


def _number(table: Table, index: int, at: int, number: Number, places: Mapping[str, int]) -> dict[str, Any]:
    match number.kind:
        case "number":
            way, value = table.kept_number(index, at, number)
            return {"kind": way, "add": value} if way == "seen" else {"kind": way, "value": value}
        case "input":
            return {"kind": "argument", "argument": number.name, "dim": number.dim}
        case "capacity":
            return {"kind": "capacity"}
    return {"kind": "length", "entry": places[number.name], "dim": number.dim}


def _operators(texts: Iterable[str]) -> set[str]:
    words = (line.split(" ", 3) for text in texts for line in text.splitlines())
    called = {f"{word[1]}.{word[2]}" for word in words if word[0] == "op"}
    others = sorted(name for name in called if name.split("::")[0] not in _RUN)
    if others:
        raise ExportError(
            f"it calls {', '.join(others)}, and a runner has the operators of {' and '.join(_RUN)}; "
            "export it without what brings them, and a model that ranks share from one process"
        )
    return called


def as_text(value: Mapping[str, Any]) -> str:
    """As a file holds it."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
