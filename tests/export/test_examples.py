"""The programs in examples/offline do what the guide says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import runner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, kernels = tmp_path_factory.mktemp("examples"), runner.folder_of_kernels()
    for name, compiler in {"continue.c": "cc", "best.cpp": "c++"}.items():
        path = shutil.which(compiler)
        if path is None:
            pytest.skip(f"needs {compiler}")
        source = ROOT / "examples" / "offline" / name
        flags = ["-Wall", "-Wextra", "-Werror", "-I", ROOT / "kernels" / "runner", f"-L{kernels}"]
        links = ["-lliteboost_run", f"-Wl,-rpath,{kernels}", "-Wl,--allow-shlib-undefined"]
        subprocess.run([path, *flags, source, *links, "-o", made / source.stem], check=True)
    return made


def test_c(compiled: Path, windowed: tuple[torch.nn.Module, Path]) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 5)
    done = subprocess.run(
        [compiled / "continue", folder, "6", *map(str, prompt)], capture_output=True, text=True, check=True
    )
    assert list(map(int, done.stdout.split())) == runner.generated(model, prompt, 6)
    words = [compiled / "continue", "/nowhere", "6", "5"]
    wrong = subprocess.run(words, capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and "/nowhere cannot be opened" in wrong.stderr


def test_cpp(compiled: Path, windowed: tuple[torch.nn.Module, Path]) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 5)
    done = subprocess.run(
        [compiled / "best", folder, *map(str, prompt)], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    with torch.no_grad():
        found = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).topk(5)
    assert [int(row[0]) for row in rows] == found.indices.tolist()
    assert torch.allclose(torch.tensor([float(row[1]) for row in rows]), found.values, rtol=1e-4)
