"""The real torch_npu wheel on a machine without CANN; tests/unit/test_environment.py has a stand-in."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox import NO_COMPILER, Sandbox

from liteboost_adaptor.environment import ascend

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def torch_npu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch_npu 2.13.0 (44 MB are fetched)."""
    folder = tmp_path_factory.mktemp("torch_npu")
    if ascend.cann_fault() is None:
        pytest.skip("CANN is installed here, and this is about a machine without")
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "torch_npu==2.13.0"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"torch_npu 2.13.0 cannot be fetched: {done.stderr.strip()}")
    (wheel,) = folder.glob("torch_npu-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_program_runs_and_says_why_without_npu(
    torch_npu: Path, sources: Path, sandbox: Callable[..., Sandbox]
) -> None:
    box = sandbox("torch_npu")
    (box.site_packages / "torch_npu.pth").write_text(f"{torch_npu}\n")
    assert box.pip_install(sources, **NO_COMPILER).returncode == 0
    alone = box.run("-c", "import torch")
    assert alone.returncode != 0 and "torch_npu" in alone.stderr
    code = "import liteboost_adaptor, torch; from transformers.models.llama import modeling_llama"
    ours = box.run("-c", code)
    assert ours.returncode == 0, ours.stderr
    assert ours.stderr.count("CANN cannot be loaded") == 1 and "torch_npu 2.13.0" in ours.stderr
    doctor = box.run("-m", "liteboost_adaptor", "doctor")
    assert doctor.returncode == 0 and "CANN cannot be loaded" in " ".join(doctor.stdout.split())
