"""Every way is tried at levels 1 and 2; what a test serves is left as it was after it."""

from __future__ import annotations

import pytest
from support.state import served_on_request

__all__ = ["level", "served_on_request"]  # the latter applies by being here


@pytest.fixture(params=[1, 2], ids=["level 1", "level 2"])
def level(request: pytest.FixtureRequest) -> int:
    return request.param
