"""``generate_batch`` looks for garbage among what it has made, not among all that the process holds.

transformers collects garbage twice at the end of each call, to let go of the cache: 0.2 s each time with
the modules of torch and transformers in memory, as long as a dozen tokens take.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..engine.swap import MARKER

#: Where transformers has the method.
MODULE, METHOD = (
    "transformers.generation.continuous_batching.continuous_api",
    "ContinuousMixin.generate_batch",
)


def is_collected() -> bool:
    """Whether this transformers has the method, and it has been imported: models that generate bring it."""
    return hasattr(getattr(sys.modules.get(MODULE), "ContinuousMixin", None), "generate_batch")


def of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """``generate_batch``; of a bound model, while what was there before it is not looked at."""

    @functools.wraps(original)
    def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with set_aside() if hasattr(type(self), MARKER) else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return generate_batch


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """In the block `gc.collect` looks at nothing that exists now; behind it at everything, as before."""
    if gc.get_freeze_count():  # by somebody else, and to take that back would be his to do
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
