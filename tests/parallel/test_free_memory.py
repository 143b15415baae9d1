"""Whether a model fits unsharded: what is free on the host or in its control group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liteboost_adaptor.parallel.data import memory

GB = 10**9


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group of 8 GB, of which 5 are used, 1 of it by files that can go; the host has 100."""
    for name, text in {
        "max": str(8 * GB),
        "current": str(5 * GB),
        "stat": f"anon 1\ninactive_file {GB}",
    }.items():
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_host_memory", lambda: 100 * GB)
    return tmp_path


def test_the_least_of_host_and_group_counts(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory() == 4 * GB
    (group / "memory.max").write_text("max\n")
    assert memory.free_memory() == 100 * GB
    (group / "memory.current").unlink()
    assert memory.free_memory() == 100 * GB
    monkeypatch.setattr(memory, "_host_memory", lambda: None)
    assert memory.free_memory() is None


def test_the_host_says_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory._host_memory() < 1 << 50
    monkeypatch.setattr(memory, "Path", lambda name: Path(f"/no/such{name}"))
    assert memory._host_memory() is None


@pytest.mark.parametrize(
    ("processes", "says"), [(1, ""), (2, "whole it takes up to 6.0 GB, and this host has 4.0 GB left")]
)
@pytest.mark.usefixtures("group")
def test_every_process_of_the_host_holds_the_whole(
    processes: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(25, 10**7, bias=False, device="meta")  # 1 GB
    model.again = model.weight  # is one tensor
    monkeypatch.setattr(memory.config, "local_size", lambda: processes)
    assert memory.why_does_not_fit(model, SimpleNamespace(world_size=3)) == says
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert memory.why_does_not_fit(model, SimpleNamespace(world_size=3)) == ""
