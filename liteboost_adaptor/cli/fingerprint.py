"""``fingerprint TARGET``: the digest a rule lists for a body."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from typing import Annotated, Any

import typer


def fingerprint(
    target: Annotated[str, typer.Argument(help="module:function, or module:Class for its forward")],
    attribute: Annotated[str, typer.Option(help="the method of a class")] = "forward",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print the digest and the operations of a body, for a rule."""
    from ..engine.fingerprint import Opaque, behind_wrapper
    from ..engine.fingerprint import fingerprint as compute

    found = _resolve(target)
    owner = found if isinstance(found, type) else None
    function, wrapper = (found, "") if owner else behind_wrapper(found)
    try:
        result = compute(getattr(found, attribute) if owner else function, owner)
    except (Opaque, AttributeError) as fault:
        raise typer.BadParameter(
            f"{target} cannot be fingerprinted: {fault}. Name a plain Python function or a class with "
            f"a method {attribute}."
        ) from fault
    operations = sorted(result.operations)
    if as_json:
        text = json.dumps(
            {"target": target, "digest": result.digest, "wrapper": wrapper, "operations": operations}
        )
    else:
        text = f'bodies = ["{result.digest}"]\n'
        text += f'wrappers = ["{wrapper}"]\n' if wrapper else ""
        text += f"operations = {json.dumps(operations)}"
    sys.stdout.write(text + "\n")


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    if not name:
        raise typer.BadParameter(f"{target!r} names no function. Write module:function or module:Class.")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as fault:
        raise typer.BadParameter(f"{target!r} does not resolve ({fault}). Correct the name.") from fault
