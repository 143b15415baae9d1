"""Every way is tried at levels 1 and 2; what a test serves is left as it was after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import state


@pytest.fixture(params=[1, 2], ids=["level 1", "level 2"])
def level(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(autouse=True)
def served_on_request() -> Iterator[None]:
    state.pristine()
    yield
    state.pristine()
