"""What a script of everyday use is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """One script.

    Attributes:
        model: The name of its model in ``models``.
        run: Loads the model of a folder and uses it; returns numbers by which two runs are compared: tokens,
            or values of results.
        words: What it does, for the table.
    """

    model: str
    run: Callable[[Path], Iterable[float]]
    words: str


def tokens(ids: Any) -> list[float]:
    """The tokens of a tensor, as `Script.run` returns them."""
    return [float(each) for each in ids.flatten().tolist()]


def numbers_of(text: str) -> list[float]:
    """The words of a text (see `inputs.tokenizer`), as `Script.run` returns them."""
    return [float(each) for each in re.findall(r"w(\d+)", text)]
