"""The model whose steps are recorded: compared as all that they reach is, and not held by them.

It holds its steps. Were it held in turn, its memory would come back only when Python looks through all memory
for garbage, which it may not do before the next model is loaded; without us ``del model`` is enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Where a model keeps its steps. Copies and pickles leave it out.
STEPS = "_liteboost_steps"
_MISSING = object()


class Owner:
    """What ``model`` is, and has as attributes, when this is made."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._type, self._own = weakref.ref(model), type(model), id(vars(model))
        self._saved = self._attributes(model)

    @staticmethod
    def _attributes(model: torch.nn.Module) -> dict[str, Any]:
        return {name: value for name, value in dict.items(vars(model)) if name != STEPS}

    def is_there(self) -> bool:
        """Whether it is alive, and its attributes are in the dict that they were in."""
        model = self._model()
        return model is not None and id(vars(model)) == self._own

    def changes(self, is_same: Callable[[Any, Any], bool]) -> Iterator[str]:
        """What was exchanged, each in words."""
        model = self._model()
        if model is None or type(model) is not self._type or not self.is_there():
            yield f"the class or the dict of a {self._type.__name__}"
            return
        now = self._attributes(model)
        if list(now) != list(self._saved):
            yield f"the attributes or keys {sorted(map(str, now.keys() ^ self._saved.keys()))[:4]}"
        else:
            yield from (name for name, value in self._saved.items() if not is_same(now[name], value))

    def give_back(self) -> None:
        """Give it the attributes that it had."""
        model = self._model()
        if model is None:
            return
        now = self._attributes(model)
        if now.keys() != self._saved.keys() or any(
            now[name] is not value for name, value in self._saved.items()
        ):
            own = vars(model)
            steps = own.get(STEPS, _MISSING)
            dict.clear(own)
            dict.update(own, self._saved if steps is _MISSING else {**self._saved, STEPS: steps})
