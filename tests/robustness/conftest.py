"""Models are served when a test says so, and left as they were after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import state


@pytest.fixture(autouse=True)
def served_on_request() -> Iterator[None]:
    state.pristine()
    yield
    state.pristine()
