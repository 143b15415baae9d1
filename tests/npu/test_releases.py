"""Calls that releases and SoCs differ in are on their operators in each: the ops' tests, run there again."""

from __future__ import annotations

from pathlib import Path

import pytest
from npu.launching import simulated

OPS = Path(__file__).parent / "ops"
#: Integer weights with and without bias, masks over a cache of floats and of integers, packed tokens, sinks.
MODULES = (
    "test_quantized_linear_npu.py",
    "test_attention_cache_npu.py",
    "test_attention_masks_npu.py",
    "test_int8_attention_npu.py",
    "test_paged_attention_npu.py",
)
full = pytest.mark.full


@pytest.mark.parametrize(
    ("soc", "release"),
    [
        ("910B", "8.5.0"),
        pytest.param("910C", "9.0.0", marks=full),
        pytest.param("910B", "9.0.0", marks=full),
        pytest.param("910C", "8.5.0", marks=full),
        pytest.param("910C", "9.1.0", marks=full),
    ],
)
def test_in_other_releases(soc: str, release: str, tmp_path: Path) -> None:
    files = [OPS / name for name in MODULES]
    options = ("--soc", soc, "--release", release, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    lines = simulated(*options, *files, XDG_CACHE_HOME=str(tmp_path))
    assert " passed" in lines[-1] and "failed" not in lines[-1], "\n".join(lines)


@full
@pytest.mark.parametrize("release", ["8.1.RC1", "8.5.0"])
def test_steps_are_captured_in_other_releases(release: str, tmp_path: Path) -> None:
    """Before CANN 8.5 keys and values are appended by two operators."""
    options = ("--release", release, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
    file = OPS.parent / "test_captured_steps.py"
    lines = simulated(*options, file, "-k", "another_batch or padded_batch", XDG_CACHE_HOME=str(tmp_path))
    assert " passed" in lines[-1] and "failed" not in lines[-1], "\n".join(lines)
