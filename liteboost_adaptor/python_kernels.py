"""Which kernels of ``aten`` were registered from Python: who has one would not be asked by a fused op.

`torch.library` lists them as a set. Its size says little: one kernel may come while another goes, and with
the first of two libraries that goes torch forgets the kernel of the other, too. So every registration is
counted, and whether a kernel that was ever seen is still there is asked of the dispatcher.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

#: Dispatch keys under which a kernel of ``aten`` acts on what our ops would compute.
_KEYS = frozenset(
    key + device for key in ("", "Autograd", "Autocast") for device in ("CPU", "PrivateUse1")
) | {
    "Autograd",
    "ADInplaceOrView",
    "BackendSelect",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}
#: Kernels that this package registers, as ``torch.library`` names them: ``aten/op/key``.
own: set[str] = set()
#: The namespace of every kernel that is registered, and an empty one for each time that counting begins. Who
#: compares its length and that of torch's set (`count`) sees every change.
registered: list[str] = []
#: Kernels that somebody has registered and may have taken back since.
_seen: set[str] = set()
#: Those whose names say that they act on nothing that our ops would compute: torch itself registers hundreds.
_idle: set[str] = set()


def counting(impl: Callable[..., None]) -> Callable[..., None]:
    """``torch.library.Library.impl``, each call of which is counted; with what was registered before."""

    @functools.wraps(impl)
    def counted(self: torch.library.Library, *args: Any, **kwargs: Any) -> None:
        impl(self, *args, **kwargs)
        _seen.update({entry for entry in self._op_impls if _acts(entry)} - own)
        registered.append(self.ns)

    _seen.update(_of_living_libraries())
    registered.append("")  # what came and went since the last time was not counted
    return counted


def count() -> tuple[int, int]:
    """Is another number after each change of what is registered."""
    return len(torch.library._impls), len(registered)


def someone_elses() -> str:
    """Why torch's own kernels may not be what runs, or an empty string."""
    kernels = torch.library._impls
    for entry in _seen.difference(kernels):
        if _is_there(entry):
            kernels.add(entry)  # as torch would have it, had no other library gone
        else:
            _seen.discard(entry)
    for entry in kernels - own - _idle:
        if _acts(entry):
            _seen.add(entry)
            return f"a kernel of aten::{entry.split('/', 2)[1]} was registered by someone else"
        _idle.add(entry)
    return ""


def _acts(entry: str) -> bool:
    return entry.startswith("aten/") and entry.split("/", 2)[2] in _KEYS


def _is_there(entry: str) -> bool:
    """Whether the dispatcher's kernel has no signature in C++."""
    _, operator, key = entry.split("/", 2)
    lines = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
    return any(line.startswith(f"{key}: ") and ":: (none)" in line for line in lines)


def _of_living_libraries() -> set[str]:
    """What the libraries that there are have registered, which torch's set may have forgotten.

    A library is known by what it has torch do when it goes; nothing else lists them.
    """
    entries: set[str] = set()
    for info in list(getattr(weakref.finalize, "_registry", {}).values()):
        library = info.weakref()
        if isinstance(library, torch.library.Library):
            entries |= {entry for entry in library._op_impls if _acts(entry)}
    return entries - own
