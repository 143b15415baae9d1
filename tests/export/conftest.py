"""Models that are exported once for the tests of a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.export.folder import export_model

LONGEST = 40


def _model() -> torch.nn.Module:
    model = tiny_models.build("mistral")
    liteboost_adaptor.apply(model, level=2)
    return model


@pytest.fixture(scope="session")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "mistral"
    export_model(_model(), None, folder, LONGEST)
    return folder


@pytest.fixture(scope="module")
def windowed(_folder: Path) -> Iterator[tuple[torch.nn.Module, Path]]:
    """A model with layers that see a window of 8, and its folder."""
    yield _model(), _folder
    liteboost_adaptor.undo()


@pytest.fixture
def changed(windowed: tuple[torch.nn.Module, Path], tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy of the folder, to be damaged."""

    def copy() -> Path:
        return Path(shutil.copytree(windowed[1], tmp_path / "copy", dirs_exist_ok=True))

    return copy
