"""Block-sparse attention on the NPU: as one aclnn operator where it is documented, else as the reference."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.attention_cases import double
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tables(rows: int, heads: int, blocks: int) -> tuple[Tensor, Tensor]:
    chosen = torch.rand(rows, heads, blocks) < 0.5
    chosen[..., 0] = True
    chosen[0, 0] = False  # a block that chooses none gives zeros
    numbers = torch.where(chosen, torch.arange(blocks), blocks).sort(-1).values
    return numbers.masked_fill(numbers == blocks, -1), chosen.sum(-1)


def arguments(dtype: torch.dtype, heads: int = 4, choosing: int = 4, **changed: object) -> dict[str, object]:
    torch.manual_seed(0)
    select_idx, select_num_idx = tables(2 * 2, choosing, 3)
    return {
        "query": torch.randn(2, 200, heads, 64).to(dtype).transpose(1, 2),
        "key": torch.randn(2, 2, 300, 64).to(dtype),
        "value": torch.randn(2, 2, 300, 64).to(dtype),
        "select_idx": select_idx,
        "select_num_idx": select_num_idx,
        "block_shape": [128, 128],
        "scaling": 0.125,
    } | changed


def exact(form: dict[str, object]) -> Tensor:
    doubled = {name: double(value) for name, value in form.items()}
    return npu_ops.ops()["block_sparse_attention"].reference(**doubled)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("choosing", [4, 2], ids=["heads", "groups"])
def test_is_one_operator(dtype: torch.dtype, choosing: int) -> None:
    form = arguments(dtype, choosing=choosing)
    found = npu_ops.run("block_sparse_attention", **form)
    assert found.reasons == [] and found.launches.count("RainFusionAttention") == 1
    (out,) = found.results
    assert out.dtype == dtype and out.is_contiguous() and not out[0, :128, 0].any()
    wanted = exact(form)
    assert (out.double() - wanted).norm() <= torch.finfo(dtype).eps * wanted.norm()


REFUSED = {
    "causality inside the blocks": {"is_causal": True},
    "values of another size than keys": {"value": torch.randn(2, 2, 300, 32).half()},
    "no elements": {
        "select_idx": torch.zeros(4, 4, 0, dtype=torch.int64),
        "select_num_idx": torch.zeros(4, 4, dtype=torch.int64),
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_operator_is_not_documented_for(reason: str) -> None:
    form = arguments(torch.float16, **REFUSED[reason])
    found = npu_ops.run("block_sparse_attention", **form)
    assert found.reasons == [reason] and "RainFusionAttention" not in found.launches
    torch.testing.assert_close(found.results[0].double(), exact(form), rtol=2e-3, atol=1e-3)


def test_groups_that_do_not_divide_128_and_fp32() -> None:
    form = arguments(torch.float16, heads=6, choosing=6)
    found = npu_ops.run("block_sparse_attention", **form)
    assert found.reasons == ["a group of heads that does not divide 128"]
    form = arguments(torch.float32)
    found = npu_ops.run("block_sparse_attention", **form)
    assert found.reasons == ["in fp32"]
    torch.testing.assert_close(found.results[0].double(), exact(form), rtol=1e-4, atol=1e-5)
