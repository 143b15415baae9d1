"""Attention of MLA on an NPU: keys of 192 and values of 128."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu.ops.test_attention_npu import TOLERANCE, check

from liteboost_adaptor import native_npu

HEADS = 3


def states(q_len: int, kv_len: int, dtype: torch.dtype, sizes: tuple[int, int] = (192, 128)) -> list[Any]:
    key_size, value_size = sizes
    return [
        torch.randn(2, length, HEADS, size, dtype=dtype).transpose(1, 2)
        for length, size in ((q_len, key_size), (kv_len, key_size), (kv_len, value_size))
    ]


@pytest.mark.parametrize("case", ["plain", "causal", "mask"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 9), (5, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operator_serves_values_of_128_beside_keys_of_192(
    dtype: torch.dtype, q_len: int, kv_len: int, case: str
) -> None:
    mask = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    mask[0, ..., :2] = False
    options = [mask if case == "mask" else None, 0.07, case == "causal", 0, 0.0, None]
    check([*states(q_len, kv_len, dtype), *options], cached=True)
    assert native_npu.calls() == [("attention", "", 1)]


def test_other_sizes_and_what_is_added_to_the_logits_are_left_to_the_reference() -> None:
    plain = [None, 0.07, False, 0, 0.0, None]
    check([*states(1, 9, torch.bfloat16, (96, 64)), *plain], cached=True)
    check([*states(1, 9, torch.float32), *plain], cached=True)
    bias = torch.randn(2, 1, 1, 9, dtype=torch.bfloat16)
    check([*states(1, 9, torch.bfloat16), bias, *plain[1:]], cached=True)
    assert {reason for _, reason, _ in native_npu.calls()} == {
        "values of another size than keys",
        "values of another size than keys in fp32",
        "a float mask with values of another size than keys",
    }


def test_a_part_of_the_keys_is_served_as_well() -> None:
    query, key, value = states(1, 9, torch.bfloat16)
    arguments = (None, 0.07, False, 0.0)
    out, lse = torch.ops.liteboost.attention_part(*(x.npu() for x in (query, key, value)), *arguments)
    double = [x.double() for x in (query, key, value)]
    expected = torch.ops.liteboost_reference.attention_part(*double, *arguments)
    for found, wanted in zip((out, lse), expected, strict=True):
        assert (found.cpu().double() - wanted).abs().max() <= TOLERANCE[torch.bfloat16]
    assert native_npu.calls() == [("attention_part", "", 1)]
