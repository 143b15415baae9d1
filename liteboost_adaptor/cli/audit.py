"""``python -m liteboost_adaptor audit``: what another transformers has that the catalogue does not know."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import tables
from .status import console_for

if TYPE_CHECKING:
    from ..audit.drift import Drift
    from ..audit.packages import Place


def audit(
    transformers: Annotated[
        list[str] | None,
        typer.Option("--transformers", metavar="VERSION", help="A release, fetched by pip; may be repeated."),
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(
            "--path", metavar="FOLDER", help="An unpacked transformers or a wheel; may be repeated."
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="FOLDER", help="Keep fetched releases there; else they are removed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Add what was proved to the rule files, and note the rest in the record as seen."
        ),
    ] = False,
) -> None:
    """Find the targets of the rules in a transformers.

    Their bodies are compared with what is known. Without VERSION and FOLDER the installed one is scanned.
    Exit status 0 when every body is in the catalogue or was seen before, 1 when one is new or changed, or, in
    a version not older than the baseline, gone.
    """
    from ..audit import drift, packages, record
    from ..config import settings
    from ..engine import catalogue

    rules, faults = catalogue.load(settings().patch_path)
    if faults:
        raise faults[0]
    known = record.load()
    found = []
    for source in _sources(transformers or [], path or [], cache):
        with source as place:
            scan = packages.scan(place)
        found.append(drift.compare(scan, rules, known))
        if write:
            known.note(scan)
            _write(found[-1])
    if write:
        record.save(known)
    _show(found, as_json)
    raise typer.Exit(int(any(each.found for each in found)))


def _sources(
    versions: list[str], paths: list[Path], cache: Path | None
) -> Iterator[contextlib.AbstractContextManager[Place]]:
    from ..audit import packages

    for version in versions:
        yield packages.fetched(version, cache)
    for path in paths:
        yield packages.unpacked(path)
    if not versions and not paths:
        yield contextlib.nullcontext(packages.Place("as installed"))


def _write(found: Drift) -> None:
    from ..audit import rule_files

    for proposal in found.proposals:
        rule_files.write(proposal)


def _show(found: list[Drift], as_json: bool) -> None:
    if as_json:
        result = {"drift": any(each.found for each in found), "versions": [each.to_dict() for each in found]}
        typer.echo(json.dumps(result, indent=2))
        return
    console = console_for(sys.stdout)
    console.print(tables.audit_table([each.to_dict() for each in found]))
    for each in found:
        for proposal in each.proposals:
            console.print(proposal.toml, markup=False, highlight=False, soft_wrap=True)
