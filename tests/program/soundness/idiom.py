"""What a program is composed of: a few lines that a user might write around a model, and the list of all."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import textwrap
from dataclasses import dataclass

#: Places in a model: behind the head, before the first layer, around an MLP of the first layer.
LOGITS, EMBEDDED, LAYER = "logits", "embedded", "layer"
SITES = (LOGITS, EMBEDDED, LAYER)
#: Those where ``ids`` and ``cache`` are at hand.
OUTER = (LOGITS, EMBEDDED)
#: Models with rotary embedding, and with RMSNorm.
ROTARY = ("llama", "qwen3", "mistral")
WITH_RMS_NORM = (*ROTARY, "own")


@dataclass(frozen=True)
class Idiom:
    """Source text for the places of a program.

    In every text ``@n`` is a number of its own, ``@v`` a float and ``@i`` a small integer of the program.

    Attributes:
        name: Unique.
        theme: The file it is in.
        module: At the top of the module that holds the model.
        init: In ``__init__`` of the module that has `forward`, as ``self``.
        forward: There, with the tensor ``x`` to be changed (at `OUTER` also ``ids``, ``cache``, ``kwargs``).
        between: Before one step, with ``model`` and ``user``.
        back: Before a later step, to take `between` back.
        each: Before every step.
        after: Behind every step; ``user.out`` is what the model has returned, or ``None``.
        wrap: Body of a function that calls a step by ``inner()`` from `between`'s step to that of `back`.
        end: After the last step.
        sites: Where `forward` may be.
        bases: Models it is for; all, where empty.
        raises: Whether steps may raise without us, too.
        concurrent: Whether steps run side by side, so that their order is nobody's to compare.
    """

    name: str
    theme: str
    module: str = ""
    init: str = ""
    forward: str = ""
    between: str = ""
    back: str = ""
    each: str = ""
    after: str = ""
    wrap: str = ""
    end: str = ""
    sites: tuple[str, ...] = SITES
    bases: tuple[str, ...] = ()
    raises: bool = False
    concurrent: bool = False


class Theme:
    """The idioms of one file."""

    def __init__(self, name: str) -> None:
        self.name = name.rpartition(".")[-1]
        self.idioms: list[Idiom] = []

    def add(
        self,
        name: str,
        *,
        sites: tuple[str, ...] = SITES,
        bases: tuple[str, ...] = (),
        raises: bool = False,
        concurrent: bool = False,
        **texts: str,
    ) -> None:
        """One more; ``texts`` are those of `Idiom`."""
        clean = {place: textwrap.dedent(text).strip("\n") for place, text in texts.items()}
        kinds = {"sites": sites, "bases": bases, "raises": raises, "concurrent": concurrent}
        self.idioms.append(Idiom(name, self.name, **clean, **kinds))


@functools.cache
def catalogue() -> dict[str, Idiom]:
    """All idioms by name."""
    from . import idioms

    found: dict[str, Idiom] = {}
    for entry in pkgutil.iter_modules(idioms.__path__):
        for idiom in importlib.import_module(f"{idioms.__name__}.{entry.name}").THEME.idioms:
            if idiom.name in found:
                raise ValueError(f"two idioms are called {idiom.name}")
            found[idiom.name] = idiom
    return found
