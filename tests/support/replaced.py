"""Somebody else's patch: another object where a watch looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from liteboost_adaptor import watch


@contextmanager
def replaced(place: watch.Place, value: Any) -> Iterator[None]:
    """Somebody sets the attribute; afterwards it is as it was, also where it was inherited."""
    space = vars(place.space) if isinstance(place.space, type) else place.space
    was_there, former = place.name in space, space.get(place.name)
    _set(place, value)
    try:
        yield
    finally:
        if was_there:
            _set(place, former)
        elif isinstance(place.space, type):
            delattr(place.space, place.name)
        else:
            del place.space[place.name]


def _set(place: watch.Place, value: Any) -> None:
    if isinstance(place.space, type):
        setattr(place.space, place.name, value)
    else:
        place.space[place.name] = value
