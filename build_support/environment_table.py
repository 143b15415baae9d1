"""The table of ``docs/environment.md``, from ``liteboost_adaptor/config.py``."""

from __future__ import annotations

from liteboost_adaptor import config


def markdown() -> str:
    """The body of ``docs/environment.md``: one row for each variable."""
    defaults = config.Settings()
    lines = ["| variable | default | values | effect |", "|---|---|---|---|"]
    for variable in config.VARIABLES:
        default = getattr(defaults, variable.field)
        if isinstance(default, bool):
            shown = "`1`" if default else "`0`"
        elif variable.name == "LITEBOOST_TP":
            shown = "`auto`"
        else:
            shown = f"`{default}`" if default not in ((), "", None) else "unset"
        allowed = variable.allowed.replace("|", "\\|")
        lines.append(f"| `{variable.name}` | {shown} | {allowed} | {variable.effect} |")
    return "\n".join(lines) + "\n"
