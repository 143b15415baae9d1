"""What a user sees when an aclnn operator fails: its reference at first use, an error that names it later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cann_sim.environment import environment
from cann_sim.faults import failing
from npu.simulator.programs import output

from liteboost_adaptor import native_npu

pytestmark = pytest.mark.usefixtures("no_grad")

ops = torch.ops.liteboost


@pytest.fixture(autouse=True)
def nothing_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_npu.load().loaded
    ops._npu_forget_verdicts()
    ops._npu_forget_counts()
    yield
    ops._npu_forget_verdicts()


def arguments() -> tuple[torch.Tensor, torch.Tensor, float]:
    return torch.randn(3, 64), torch.rand(64), 1e-6


def on_npu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return ops.rms_norm(x.npu(), weight.npu(), eps).cpu()


@pytest.mark.parametrize("fault", ["aclnnRmsNorm:561002", "aclnnRmsNorm@2:361001"])
def test_an_operator_that_fails_at_first_use_is_refused_and_the_result_is_right(fault: str) -> None:
    given = arguments()
    with failing(fault):
        found = on_npu(*given)
    torch.testing.assert_close(found, ops.rms_norm(*given))
    (op, reason, n), *others = native_npu.calls()
    assert (op, n, others) == ("rms_norm", 1, [])
    assert "aclnnRmsNorm" in reason


def test_an_error_code_later_is_an_error_that_names_the_operator_and_the_next_call_is_right() -> None:
    given = arguments()
    on_npu(*given)
    with failing("aclnnRmsNorm:561002"), pytest.raises(RuntimeError, match=r"aclnnRmsNorm.*561002"):
        on_npu(*given)
    torch.testing.assert_close(on_npu(*given), ops.rms_norm(*given))


BROKEN = """
import torch, torch_npu
import liteboost_adaptor
from liteboost_adaptor import native_npu
status = native_npu.load()
found = native_npu.operators().values()
print(status.backend if status else "no NPU", not any(each["available"] for each in found))
"""


def test_broken_operator_libraries_leave_no_operator_available() -> None:
    """Nothing of ours runs then; what torch_npu itself does with such a CANN is torch_npu's error."""
    assert output(BROKEN, environment(broken=True))[-1] == "aclnn True"
