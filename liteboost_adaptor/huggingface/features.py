"""What is done to a bound model beside the classes of its modules, in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..config import Settings
from ..kv_cache import int8_bind
from ..report import Listed
from . import batch_invariant, caching_allocator, huge_pages, loading, sparse_attention, speculation, steps
from .weights import weights


def _nothing(model: torch.nn.Module, settings: Settings) -> None:
    pass


def _no_rows(settings: Settings) -> Iterator[Listed]:
    return iter(())


def _not_asked_for(model: torch.nn.Module, settings: Settings) -> str:
    return ""


@dataclass(frozen=True)
class Feature:
    """One of them.

    Attributes:
        unbind: Takes back what ``bind`` did to a model or its parts; to one that was never bound, nothing.
        bind: Told of every model that is bound, with its settings; decides whether to act.
        rows: Its rows of the status.
        asked: What somebody asked for explicitly for a model, as the subject of a sentence, or an empty
            string: without the compiled kernels it is an error, where the rest leaves the model alone.
        rule: Its id in the status, by which it can be disabled, or an empty string.
    """

    unbind: Callable[[torch.nn.Module], None]
    bind: Callable[[torch.nn.Module, Settings], None] = _nothing
    rows: Callable[[Settings], Iterator[Listed]] = _no_rows
    asked: Callable[[torch.nn.Module, Settings], str] = _not_asked_for
    rule: str = ""


#: In the order in which models are bound: weights are cast before they are moved.
FEATURES = (
    Feature(weights.unbind, weights.bind),
    Feature(
        sparse_attention.unbind,
        sparse_attention.bind,
        sparse_attention.rows,
        sparse_attention.asked,
        sparse_attention.RULE,
    ),
    Feature(int8_bind.unbind, int8_bind.bind, int8_bind.rows, int8_bind.asked, int8_bind.RULE),
    Feature(
        batch_invariant.unbind,
        batch_invariant.bind,
        batch_invariant.rows,
        batch_invariant.asked,
        batch_invariant.RULE,
    ),
    Feature(huge_pages.unbind, huge_pages.bind, huge_pages.rows, rule=huge_pages.RULE),
    Feature(
        caching_allocator.unbind,
        caching_allocator.bind,
        caching_allocator.rows,
        rule=caching_allocator.RULE,
    ),
    Feature(steps.unbind, rows=steps.rows, rule=steps.RULE),
    Feature(speculation.unbind, speculation.bind, speculation.rows, rule=speculation.RULE),
    Feature(loading.unbind, rows=loading.rows, rule=loading.RULE),
)


def bind(model: torch.nn.Module, settings: Settings) -> None:
    """All of them, for ``model``."""
    for feature in FEATURES:
        feature.bind(model, settings)


def unbind(model: torch.nn.Module) -> None:
    """Take back all of them."""
    for feature in FEATURES:
        feature.unbind(model)


def rows(settings: Settings) -> Iterator[Listed]:
    """The rows of all of them."""
    for feature in FEATURES:
        yield from feature.rows(settings)


def asked(model: torch.nn.Module, settings: Settings) -> list[str]:
    """What was asked for explicitly for ``model``."""
    return [what for feature in FEATURES if (what := feature.asked(model, settings))]
