"""Post-import hooks that catch, record and never raise.

A hook that raises breaks the user's first import of the module with a misleading message, and lets the
second succeed unpatched (measured); so whatever goes wrong here becomes a *failed* row of the status.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import wrapt


def after_import(module: str, action: Callable[[ModuleType], None]) -> None:
    """Run ``action(module)`` once ``module`` is imported; at once if it already is."""

    def hook(imported: ModuleType) -> None:
        try:
            action(imported)
        except Exception as fault:  # noqa: BLE001 - recorded; see the module
            from ..report import FAILED, Outcome, report

            report.add(Outcome(f"hook.{module}", FAILED, module, f"{type(fault).__name__}: {fault}"))

    wrapt.register_post_import_hook(hook, module)
