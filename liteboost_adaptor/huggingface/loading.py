"""What `from_pretrained` prepares for models of all kinds, made when the first of them asks for it.

Since 5.0 the first load of a process builds the names by which checkpoints of every architecture are
converted, a thousand regular expressions. A model asks for those of its own kind, or for none.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..config import Settings
from ..engine.undo_stack import UndoStack
from ..report import DISABLED, IDLE, CallCounter, Listed, report

RULE, TITLE = "load.patterns", "Names of checkpoints are compiled for the architecture that is loaded"
_MAPPING, _BUILD = "transformers.conversion_mapping", "_build_checkpoint_conversion_mapping"
_LOADING = "transformers.core_model_loading"


class Pattern:
    """A regular expression that is compiled when something is asked of it, and then does as it does."""

    __slots__ = ("_compiled", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._compiled: re.Pattern[str] | None = None

    def __getattr__(self, name: str) -> Any:
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = re.compile(self._text)
        return getattr(compiled, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pattern:
        return self  # as of a compiled one

    def __copy__(self) -> Pattern:
        return self

    def __reduce__(self) -> Any:
        return re.compile, (self._text,)


class _Expressions(types.ModuleType):
    """Module ``re`` for the one that loads models: compiles later what is built for all of them."""

    def __init__(self, counter: CallCounter) -> None:
        super().__init__("re")
        self._counter, self._thread = counter, threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: Any, flags: int = 0) -> Any:
        if type(pattern) is not str or flags or not getattr(self._thread, "is_building", False):
            return re.compile(pattern, flags)
        self._counter.count_served()
        return Pattern(pattern)

    def building(self, build: Callable[[], Any]) -> Callable[[], Any]:
        """``build``, whose patterns are compiled later."""

        @functools.wraps(build)
        def built() -> Any:
            self._thread.is_building = True
            try:
                return build()
            finally:
                self._thread.is_building = False

        return built


def install(stack: UndoStack, settings: Settings) -> None:
    """Compile later, where transformers builds them all and ``settings`` let us."""
    mapping, loading = sys.modules.get(_MAPPING), sys.modules.get(_LOADING)
    if _turned_off(settings) or type(getattr(mapping, _BUILD, None)) is not types.FunctionType:
        return
    if getattr(loading, "re", None) is not re:  # somebody else's
        return
    expressions = _Expressions(report.counter(RULE))
    stack.set_attribute(_LOADING, "re", lambda original: expressions)
    stack.set_attribute(_MAPPING, _BUILD, expressions.building)


def _turned_off(settings: Settings) -> str:
    """What of ``settings`` turns it off, or an empty string."""
    found = next((glob for glob in settings.disable if fnmatch.fnmatchcase(RULE, glob)), "")
    return f"turned off by LITEBOOST_DISABLE={found}" if found else ""


def unbind(model: torch.nn.Module) -> None:
    """Nothing was done to ``model``."""


def rows(settings: Settings) -> Iterator[Listed]:
    """Its row of the status: a call for each pattern. No part of a model is bound by it."""
    if RULE in report.counters:
        reason = _turned_off(settings)
        yield Listed(RULE, TITLE, DISABLED if reason else IDLE, reason)
