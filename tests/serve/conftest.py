"""What is skipped where the servers' packages are not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from serve.server import Server, chat_model, served

#: Of the extra `serve`.
PACKAGES = ("fastapi", "uvicorn", "openai")


@pytest.fixture(scope="session")
def needs_serving() -> None:
    """Skip without the packages of ``transformers serve``."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[serve]'")


@pytest.fixture(scope="module")
def server(needs_serving: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``transformers serve``, by `run`, for the tests of a file."""
    folder = tmp_path_factory.mktemp("served")
    with served(chat_model(folder), folder) as found:
        yield found
