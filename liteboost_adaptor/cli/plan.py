"""``python -m liteboost_adaptor plan``: how a model would be divided over processes, by its configuration."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

_TITLES = {
    "sum": "layers whose outputs are added",
    "sum_output": "groups of experts whose outputs are added",
    "embedding": "embedding, added",
    "head": "head, put together",
    "norm": "norms over all heads, sums of squares added",
}
#: Modules of which it is said why they stay whole; further ones are counted.
_NAMED = 8


def plan(
    model: Annotated[
        str, typer.Argument(help="folder of a model, or its name on the hub; only config.json is read")
    ],
    tp: Annotated[int, typer.Option("--tp", min=2, help="number of processes")],
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON: the figures, and the plan itself")
    ] = False,
) -> None:
    """Say what each of so many processes would hold and exchange, or why it cannot be so many."""
    from ..parallel import layout
    from ..parallel.summary import summary

    built = _on_meta(model)
    found = layout.of(built)
    how = found.plan(tp)
    figures = summary(built, how) | {"world_sizes": found.world_sizes()}
    if as_json:
        sys.stdout.write(json.dumps(figures | {"plan": json.loads(how.to_json())}) + "\n")
    else:
        sys.stdout.write(_text(how, figures))


def _on_meta(name: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    except (OSError, ValueError) as fault:
        raise typer.BadParameter(f"{name} cannot be read: {str(fault).splitlines()[0]}") from fault


def _text(how: Any, figures: dict[str, Any]) -> str:
    weights = figures["weights"]
    lines = [
        f"{how.model} over {how.world_size} processes",
        f"  weights a process: {_bytes(max(weights))} of {_bytes(figures['all_weights'])}, "
        f"{_bytes(figures['repeated'])} of them the same in every process",
        f"  exchanged a token: {_bytes(figures['exchanged'])} from each process, in "
        f"{sum(figures['exchanges'].values())} exchanges",
    ]
    lines += [f"    {count} {_TITLES[role]}" for role, count in figures["exchanges"].items()]
    lines.append(f"  numbers of processes that work: {', '.join(map(str, figures['world_sizes']))}")
    if how.whole:
        lines.append("  recognised, and whole in every process:")
        lines += [f"    {name}: {reason}" for name, reason in list(how.whole.items())[:_NAMED]]
        if len(how.whole) > _NAMED:
            lines.append(f"    and {len(how.whole) - _NAMED} more")
    return "\n".join(lines) + "\n"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
