"""What a user sees when an aclnn operator fails: its reference, or its name once it had been launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from cann_sim.environment import environment
from cann_sim.faults import failing
from npu.simulator.programs import output
from support.npu_ops import covering

from liteboost_adaptor import native_npu
from liteboost_adaptor.selftest.case import kinds_of, ops_with_cases
from liteboost_adaptor.selftest.compare import compare

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


def test_what_phase_one_refuses_later_the_reference_computes() -> None:
    given = arguments()
    on_npu(*given)
    ops._npu_forget_counts()
    with failing("aclnnRmsNorm:561002"):
        found = [on_npu(*given) for _ in range(2)]
    for each in found:
        torch.testing.assert_close(each, ops.rms_norm(*given))
    ((op, reason, n),) = native_npu.calls()
    assert (op, n) == ("rms_norm", 2)
    assert "aclnnRmsNorm refuses its arguments with status 561002" in reason
    on_npu(*given)
    assert ("rms_norm", "", 1) in native_npu.calls()


def test_an_error_of_a_launch_later_names_the_operator_and_the_next_call_is_right() -> None:
    given = arguments()
    on_npu(*given)
    with failing("aclnnRmsNorm@2:361001"), pytest.raises(RuntimeError, match=r"aclnnRmsNorm"):
        on_npu(*given)
    torch.testing.assert_close(on_npu(*given), ops.rms_norm(*given))


#: Ops whose operators torch_npu calls for references, too; and those that have none in this release, or, as
#: `linear_w4a8`, in CANN.
NOT_FUSED = {"activation", "linear", "experts_combine", "quantize_kv", "_npu_softcap_attention"} | {
    *("causal_conv1d", "causal_conv1d_update", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
    *("quantize_w4", "quantize_w8"),  # while a model is loaded, on the host
    *("head_linear", "linear_w4a8"),
}
#: Operators that torch_npu does not call for what references are made of.
FUSED = (
    "AddRmsNorm ApplyRotaryPosEmb DynamicQuant FusedInferAttentionScore* GeGluV3 "
    "GemmaRmsNorm GroupedMatmulV4 LayerNorm MoeGatingTopK MoeGatingTopKSoftmaxV2 MoeInitRoutingV2 "
    "MoeInitRoutingV3 QuantMatmulV* "
    "RainFusionAttention RmsNorm RotaryPositionEmbedding ScatterPaKvCache SwiGlu "
    "WeightQuantBatchMatmul*"
).split()


def in_bf16(op: str) -> list[str]:
    return [kind for kind in kinds_of(op) if kind.startswith("bf16") and not kind.endswith(" long")]


@pytest.mark.parametrize(
    "choose", [covering, pytest.param(list, marks=pytest.mark.full)], ids=["some", "all"]
)
@pytest.mark.parametrize("op", ops_with_cases())
def test_every_op_computes_what_its_operator_refuses(
    op: str, choose: Callable[[list[str]], list[str]]
) -> None:
    refusing = [f"aclnn{name}:561002" for name in FUSED]
    served = False
    for kind in choose(in_bf16(op)):
        with failing(*refusing):
            figures = compare(op, kind, "npu").figures
        assert figures and all(figure.passed for figure in figures), (kind, figures)
        served |= any("refuses its arguments with status 561002" in figure.fallback for figure in figures)
    assert served or op in NOT_FUSED, f"{op} called none of the operators that refuse"


def test_rows_of_integers_are_multiplied_and_made_without_their_operators() -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 64).bfloat16().npu() for _ in range(2))
    weight, scales = torch.randint(-127, 128, (32, 64), dtype=torch.int8).npu(), torch.rand(32).npu() / 127
    bias = torch.randn(32).bfloat16().npu()

    def run() -> list[torch.Tensor]:
        integers, row_scales, sums = ops._npu_add_rms_norm_int8(x, residual, x[0], 1e-6)
        product = ops._npu_linear_int8(integers, row_scales, weight, scales, bias, torch.bfloat16)
        return [product.cpu(), sums.cpu()]

    # First uses, also of what makes integers where the norm does not.
    ops.linear_w8a8(x, weight, scales, bias), ops.add_rms_norm(x, residual, x[0], 1e-6)
    ops._npu_quantize_kv(x)
    expected = run()
    with failing("aclnnAddRmsNormDynamicQuant:561002", "aclnnQuantMatmulV*:561002"):
        found = run()
    for result, exact in zip(found, expected, strict=True):
        # The norm is rounded to bf16 before it becomes integers, so some are the other neighbour.
        assert (result - exact).abs().max() <= 0.02 * exact.abs().max()
    reasons = {op for op, reason, _ in native_npu.calls() if "561002" in reason}
    assert reasons == {"add_rms_norm", "linear_w8a8"}


BROKEN = """
import torch, torch_npu
import liteboost_adaptor
from liteboost_adaptor import native_npu
status = native_npu.load()
found = native_npu.operators().values()
print(status.backend if status else "no NPU", not any(each["available"] for each in found))
"""


@pytest.mark.skipif(
    version("torch_npu") == "2.9.0",
    reason="torch_npu 2.9.0 asks libopapi.so while it is imported, and raises",
)
def test_broken_operator_libraries_leave_no_operator_available() -> None:
    """Nothing of ours runs then; what torch_npu itself does with such a CANN is torch_npu's error."""
    assert output(BROKEN, environment(broken=True))[-1] == "aclnn True"
