"""A folder, the runner and torch's libraries in a root where there is nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import runner

pytestmark = pytest.mark.full

OURS = ("liteboost-run", "libliteboost_run.so", "_C.so")
#: There is no /proc in it, by which libraries are found beside a program.
PLACES = {"LD_LIBRARY_PATH": "/run"}
#: In a small process: what is started by a large one counts as large as that.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
#: Bytes beside the weights.
MOST = 150_000_000


def libraries(path: Path) -> list[Path]:
    """What ``path`` is linked with, all the way down."""
    listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    return [Path(found) for found in re.findall(r"(?:=> )?(/\S+) \(", listed)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("root")
    here, torchs = runner.folder_of_kernels(), Path(torch.__file__).parent / "lib"
    (made / "run").mkdir()
    for name in OURS:
        shutil.copy(here / name, made / "run")
    for name in ("libtorch_cpu.so", "libc10.so", "libgomp.so.1"):
        shutil.copy(torchs / name, made / "run")
    for path in libraries(here / "liteboost-run"):
        if torchs not in path.parents and here not in path.parents:  # the system's
            (made / path.relative_to("/").parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, made / path.relative_to("/"))
    return made


def program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def run_in(root: Path, *arguments: str, given: str) -> tuple[str, int]:
    """What it prints, and its peak memory in bytes."""
    inside = [program("chroot"), str(root), "/run/liteboost-run", *arguments]
    command = inside if os.geteuid() == 0 else [program("unshare"), "--map-root-user", *inside]
    measured = [sys.executable, "-I", "-S", "-c", MEASURE, *command]
    done = subprocess.run(measured, input=given, capture_output=True, text=True, env=PLACES, check=True)
    return done.stdout, int(done.stderr.split()[-1]) * 1024


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_linked_with_python(name: str) -> None:
    names = [path.name for path in libraries(runner.folder_of_kernels() / name)]
    assert "libtorch_cpu.so" in names
    assert not [each for each in names if "python" in each]


def test_it_runs_where_there_is_no_python(root: Path, windowed: tuple[torch.nn.Module, Path]) -> None:
    model, folder = windowed
    shutil.copytree(folder, root / "model")
    prompt = runner.prompt(model, 17)
    words = ("--ids", "-", "--ignore-stop", "--max-new", "20", "--threads", "1")
    said, peak = run_in(root, "/model", *words, given=" ".join(map(str, prompt)))
    assert list(map(int, said.split())) == runner.generated(model, prompt, 20)
    assert not [path for path in root.rglob("*") if "python" in path.name]
    weights = (folder / "weights.safetensors").stat().st_size
    assert peak <= weights + MOST, peak
