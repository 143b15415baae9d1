"""`head_linear` as an aclnn operator: values, launches, layouts."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.compare import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_launch_for_parts_of_a_weight(dtype: torch.dtype, batch: int) -> None:
    # Of numbers that do not cancel, the error of a sum is a part of it.
    weight = torch.rand(4, 160, 96).to(dtype) / 10
    x = torch.rand(batch, 4, 1, 64).to(dtype)
    found = npu_ops.check("head_linear", x=x, weight=weight[:, :64].mT)
    assert found.launches == ["Matmul"]
    x = torch.rand(batch, 1, 4, 96).to(dtype).transpose(1, 2)
    found = npu_ops.check("head_linear", x=x, weight=weight[:, 64:])
    assert found.launches == ["Matmul"]


def test_without_elements_the_reference_runs() -> None:
    found = npu_ops.run("head_linear", x=torch.empty(0, 3, 1, 4), weight=torch.randn(3, 5, 4))
    assert found.reasons == ["no elements"]
