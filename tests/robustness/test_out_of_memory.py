"""Memory or threads that are refused end in an exception, and the next generation is right."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from robustness.out_of_memory import CASES, PRODUCT
from support import tiny_models
from support.tiny_sizes import Sizes

import liteboost_adaptor
from liteboost_adaptor import memory
from liteboost_adaptor.huggingface import huge_pages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("refused_allocations.cpp")
#: What the original raises where memory is short, and what Python and C++ do.
ALLOWED = ("right", "RuntimeError", "MemoryError")


@pytest.fixture(scope="session")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that refuses allocations."""
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("address ranges are read from /proc")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("refusing") / "refused_allocations.so"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(made), "-ldl"],
        check=True,
        capture_output=True,
    )
    return made


def run(library: Path, spec: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """The records of `out_of_memory`."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LITEBOOST_")},
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "robustness.out_of_memory", json.dumps(spec)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(records: list[dict[str, Any]]) -> Counter[str]:
    """How the refused generations ended; fails where one crashed or was wrong, or the next was."""
    wrong = [
        record
        for record in records
        if record["status"] or not record["refused"].startswith(ALLOWED) or record["then"] != "right"
    ]
    assert not wrong, json.dumps(wrong[:5], indent=1)
    return Counter(record["refused"].partition(":")[0] for record in records)


def test_generations_that_are_refused_memory(native_only: None, refusing: Path) -> None:
    found = check(
        run(
            refusing,
            [
                ("recorded", "allocations", 6),
                ("wide", "address space", 14),
                ("wide", "allocations", 60),  # some of them are made where memory is freed
                ("w8a16", "allocations", 4),
            ],
        )
    )
    # Both happened: what was never refused proves nothing.
    assert found["RuntimeError"] and found["MemoryError"] and found["right"], found


def test_threads_that_do_not_start(native_only: None, refusing: Path) -> None:
    records = run(refusing, [(PRODUCT, "threads", 6)])
    check(records)
    assert any("cannot start 32 threads" in record["refused"] for record in records), records


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_every_case(native_only: None, refusing: Path, case: str) -> None:
    found = check(run(refusing, [(case, "address space", 60), (case, "allocations", 200)]))
    assert found["RuntimeError"] and found["MemoryError"], found


def test_huge_pages_that_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build(
        "llama", sizes=Sizes(head_dim=64, heads=16, kv_heads=8, hidden=1024, exact=True)
    )
    inputs = tiny_models.example_inputs(model)
    expected = tiny_models.generate(model, inputs, 3)
    original, asked = huge_pages._mapped, []

    def mapped(nbytes: int) -> tuple[huge_pages._Memory, int]:
        asked.append(nbytes)
        if len(asked) > 2:
            raise OSError(12, "Cannot allocate memory")
        return original(nbytes)

    monkeypatch.setattr(huge_pages, "_kernel_has_them", lambda: True)
    monkeypatch.setattr(huge_pages, "_mapped", mapped)
    liteboost_adaptor.apply(model, level=2)
    assert len(asked) == 3
    assert torch.equal(tiny_models.generate(model, inputs, 3), expected)
    status = liteboost_adaptor.status().to_json()
    assert "some weights stay where they are" in status


def test_a_limited_address_space_counts_as_memory() -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), limits[1]))
        assert memory.available_bytes() <= 300 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
