"""Attributes and mapping entries we set outside of models, on one undo stack."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import wrapt

_MISSING = object()


class UndoStack:
    """Remembers how to take back each change, and takes them back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], str]] = []
        self._lock = threading.RLock()

    def set_attribute(self, module: str, path: str, make: Callable[[Any], Any]) -> None:
        """Replace attribute ``path`` of ``module`` (``Class.method`` or ``function``) by ``make(original)``.

        An inherited attribute is removed at undo, not copied into the class that inherited it.
        """
        parent, attribute, original = wrapt.resolve_path(module, path)
        own = vars(parent).get(attribute, _MISSING)
        new = make(original)
        wrapt.apply_patch(parent, attribute, new)
        label = f"{module}.{path}"

        def undo() -> str:
            if vars(parent).get(attribute, _MISSING) is not new:
                return f"{label} was patched by someone else since; theirs is left"
            if own is _MISSING:
                delattr(parent, attribute)
            else:
                setattr(parent, attribute, own)
            return ""

        self._push(undo)

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any, label: str) -> None:
        """Set ``mapping[key]``; undo restores the former value, or removes the key."""
        former = mapping.get(key, _MISSING)
        mapping[key] = value

        def undo() -> str:
            if mapping.get(key, _MISSING) is not value:
                return f"{label} was changed by someone else since; theirs is left"
            if former is _MISSING:
                del mapping[key]
            else:
                mapping[key] = former
            return ""

        self._push(undo)

    def add_kernels(self, namespace: str, key: str, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Register Python ``kernels`` (by operator, ``op`` or ``op.overload``) for a dispatch key.

        Undo takes them out of the dispatcher again; a kernel that one of them stood before serves again.
        """
        import torch

        from .. import python_kernels

        ours = {f"{namespace}/{operator}/{key}" for operator in kernels}
        python_kernels.own.update(ours)
        library = torch.library.Library(namespace, "IMPL")
        # The default is another one before torch 2.13, and older ones do not ask.
        asks = "allow_override" in inspect.signature(library.impl).parameters
        over: dict[str, Any] = {"allow_override": True} if asks else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for operator, kernel in kernels.items():
                library.impl(operator, kernel, key, **over)

        def undo() -> str:
            library._destroy()
            python_kernels.own.difference_update(ours)
            return ""

        self._push(undo)

    def add_undo(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the rest is taken back: for what others keep of it."""

        def quiet() -> str:
            undo()
            return ""

        self._push(quiet)

    def _push(self, undo: Callable[[], str]) -> None:
        with self._lock:
            self._undo.append(undo)

    def __len__(self) -> int:
        return len(self._undo)

    def undo_all(self) -> list[str]:
        """Take back everything, last first. Returns a sentence for each place that was not ours any more."""
        with self._lock:
            left = [undo() for undo in reversed(self._undo)]
            self._undo.clear()
        return [sentence for sentence in dict.fromkeys(left) if sentence]
