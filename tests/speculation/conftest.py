"""Models are served when a test says so, and left as they were after it."""

import pytest
from support.state import served_on_request

from liteboost_adaptor.huggingface.speculation import pace

__all__ = ["served_on_request"]  # applies by being here


@pytest.fixture(autouse=True)
def as_of_a_large_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these models take so little that candidates would hardly be checked."""
    monkeypatch.setattr(pace, "HOST_SECONDS", 0.0)
