"""A weight that several processes share: what this one reads of it and rounds, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .experts import Experts
from .rounding import Quantized
from .schemes import Scheme


@dataclass(frozen=True)
class Part:
    """What is rounded while a model is loaded, where another process keeps the rest.

    Attributes:
        read: What is read; of a linear layer one expert.
        scheme: It is rounded to.
        kept: What is kept of the result.
        kept_scheme: Of that: groups may be smaller.
        cut: From what is rounded to what is kept.
    """

    read: Experts
    scheme: Scheme
    kept: Experts
    kept_scheme: Scheme
    cut: Callable[[Quantized], Quantized]
