"""Every way is tried at levels 1 and 2; what a test serves is left as it was after it."""

from __future__ import annotations

import sys
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


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers keeps copies of remote code: one place a run, for it is imported as a package."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.setattr(sys, "path", [*sys.path])
        yield
