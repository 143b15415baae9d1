"""The files of a new op, made from templates, and the lists that name it."""

from __future__ import annotations

import keyword
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from ..errors import LiteBoostError

#: The checkout, where the package is used from one.
ROOT = Path(__file__).resolve().parents[2]
#: Below the root of a checkout: a file for each that is written, in the same folders, and `lists.toml`.
TEMPLATES = Path("build_support") / "new_op"
SUFFIX = ".template"
#: Stands for the op in the names of the templates.
PLACEHOLDER = "OP"
#: Letters of a name; with more of them lines of the templates would be too long.
LONGEST = 28
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


class NewOpError(LiteBoostError, ValueError):
    """A new op cannot be begun: its name, a file that is there already, or no checkout to write to."""


@dataclass(frozen=True)
class Change:
    """A file to write, or to write anew.

    Attributes:
        path: Below the root of the checkout.
        text: All that it is to hold.
        is_new: Whether there is no such file yet.
    """

    path: Path
    text: str
    is_new: bool


def plan(name: str, root: Path) -> list[Change]:
    """All that a new op changes in the checkout at ``root``; nothing is written.

    Raises:
        NewOpError: ``root`` is no checkout, ``name`` cannot be an op's or is one's already, a file is there
            already, or a list of ops does not look as `lists.toml` says.
    """
    if not (root / TEMPLATES).is_dir():
        raise NewOpError(
            f"new-op writes into a checkout of this project, and there is no {TEMPLATES} in {root}: this "
            "package is installed without its sources. Clone the project, `make setup` there, and run "
            ".venv/bin/python -m liteboost_adaptor new-op in the clone; or write an op outside of the "
            "package, as examples/custom_op does."
        )
    _check_name(name, root)
    title = name.replace("_", " ").capitalize()
    words = {
        "op": name,
        "Op": "".join(word.capitalize() for word in name.split("_")),
        "title": title,
        "underline": "-" * len(title),
    }
    return [*_new_files(root, words), *_longer_lists(root, words)]


def _check_name(name: str, root: Path) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or len(name) > LONGEST:
        raise NewOpError(
            f"NAME must be words of small letters and digits joined by underscores, such as leaky_relu, at "
            f"most {LONGEST} letters long and no keyword of Python; found {name!r}. Choose another."
        )
    defined = re.compile(rf'm\.def\(\s*"{name}\(')
    sources = sorted((root / "kernels").glob("*/*.cpp"))
    taken = [file for file in sources if defined.search(file.read_text(encoding="utf-8"))]
    taken += [folder for folder in (root / "kernels").glob("*/") if folder.name == name]
    if taken:
        raise NewOpError(
            f"NAME must be new, and {taken[0].relative_to(root)} has a {name}. Choose another name, or add "
            "an overload there by hand."
        )


def _new_files(root: Path, words: dict[str, str]) -> list[Change]:
    changes = []
    for template in sorted((root / TEMPLATES).rglob(f"*{SUFFIX}")):
        target = str(template.relative_to(root / TEMPLATES)).removesuffix(SUFFIX)
        path = Path(target.replace(PLACEHOLDER, words["op"]))
        text = Template(template.read_text(encoding="utf-8")).substitute(words)
        changes.append(Change(path, text, is_new=True))
    if there := [str(change.path) for change in changes if (root / change.path).exists()]:
        raise NewOpError(
            f"new-op {words['op']} would overwrite {', '.join(there)}. Move that away, or choose another "
            "name; nothing was written."
        )
    return changes


def _longer_lists(root: Path, words: dict[str, str]) -> list[Change]:
    texts: dict[Path, str] = {}
    lists = tomllib.loads((root / TEMPLATES / "lists.toml").read_text(encoding="utf-8"))
    for entry in lists["entry"]:
        path = Path(entry["file"])
        before = texts[path] if path in texts else (root / path).read_text(encoding="utf-8")
        added, place = Template(entry["text"]).substitute(words), _place(entry, before, words)
        if "among" in entry and added in before.splitlines(keepends=True):
            raise NewOpError(
                f"NAME must be new, and {path} names {words['op']} already. Choose another name; nothing was "
                "written."
            )
        if place is None:
            raise NewOpError(
                f"new-op adds a line to {path}, and nothing there looks like the list that it knows from "
                f"{TEMPLATES / 'lists.toml'}. Make the two agree; nothing was written."
            )
        texts[path] = before[:place] + added + before[place:]
    return [Change(path, text, is_new=False) for path, text in texts.items()]


def _place(entry: dict[str, Any], text: str, words: dict[str, str]) -> int | None:
    """Where in ``text`` an entry of `lists.toml` belongs; None where the list is not found."""
    way = next(way for way in ("behind", "before", "among") if way in entry)
    found = list(re.finditer(entry[way], text, re.MULTILINE))
    if not found:
        return None
    if way == "before":
        return found[0].start()
    own = Template(entry.get("by", "$op")).substitute(words)
    later = [match.start() for match in found if way == "among" and match[1] > own]
    return later[0] if later else found[-1].end()


def write(changes: list[Change], root: Path) -> None:
    """Write all of ``changes``, or, where one cannot be written, none.

    Raises:
        NewOpError: A file cannot be written.
    """
    made: list[Path] = []  # to be removed again, the last first
    try:
        for change in changes:
            _stage(root / change.path, change.text, made)
    except OSError as fault:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        raise NewOpError(
            f"new-op cannot write to the checkout: {fault}. Make {root} writable; nothing was written."
        ) from fault
    for change in changes:
        os.replace(_staged(root / change.path), root / change.path)


def _staged(path: Path) -> Path:
    """Where a file lies until all are written."""
    return path.with_name(f".{path.name}.new-op")


def _stage(path: Path, text: str, made: list[Path]) -> None:
    for folder in reversed([path.parent, *path.parent.parents]):
        if not folder.exists():
            folder.mkdir()
            made.append(folder)
    made.append(_staged(path))
    _staged(path).write_text(text, encoding="utf-8")
