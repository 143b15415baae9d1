"""What is skipped where Ray is not installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session")
def needs_ray() -> None:
    """Skip without the packages of the extra `ray`."""
    missing = [name for name in ("ray", "fastapi", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[ray]'")
