"""Cache operators of the simulator against plain indexing and float64, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from npu.simulator.calls import randn, refused, run, started
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16]
PLAIN = [None, None, None]  # no compression


def nz_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows [tokens, heads * dim] out of a cache [blocks, heads * dim / 16, size, 16]."""
    size = cache.shape[2]
    return torch.stack([cache[s // size, :, s % size, :].flatten() for s in slots.tolist()])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_scatter_pa_kv_cache(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    key, value = (torch.randint(-9, 9, (5, 2, d)).to(dtype) for d in (64, 32))
    slots = torch.tensor([0, 17, 31, 4, 16], dtype=slot_dtype)
    caches = torch.zeros(3, 16, 2, 64, dtype=dtype), torch.zeros(3, 16, 2, 32, dtype=dtype)
    rest = *PLAIN, "Norm", "None", [1, 1], [0, 0]
    out = run("aclnnScatterPaKvCache", key, caches[0], slots, value, caches[1], *rest)
    for got, rows in ((out[1], key), (out[4], value)):
        want = torch.zeros_like(got).view(48, 2, -1)
        want[slots.long()] = rows
        assert torch.equal(got.view(want.shape), want)

    width = 32 // key.element_size()
    caches = [torch.zeros(3, 2 * d // width, 16, width, dtype=dtype) for d in (64, 32)]
    rest = *PLAIN, "PA_NZ", None, None, None
    out = run("aclnnScatterPaKvCache", key, caches[0], slots, value, caches[1], *rest)
    for got, rows in ((out[1], key), (out[4], value)):
        assert torch.equal(nz_rows(got, slots), rows.flatten(1))
        assert (got != 0).sum() == (rows != 0).sum()  # nothing else was written


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.int8, torch.int32])
def test_inplace_scatter_update(dtype: torch.dtype) -> None:
    data = torch.zeros(4, 2, 9, 3, dtype=dtype)
    updates = torch.randint(1, 9, (4, 2, 2, 3)).to(dtype)
    begins = torch.tensor([0, 7, 3, 1])
    got = run("aclnnInplaceScatterUpdate", data, begins, updates, -2)[0]
    want = data.clone()
    for row, begin in enumerate(begins.tolist()):
        want[row, :, begin : begin + 2] = updates[row]
    assert torch.equal(got, want)
    pairs = torch.tensor([[3, 5], [0, 1]], dtype=torch.int32)
    got = run("aclnnInplaceScatterUpdate", data, pairs, updates[:2], 2)[0]
    assert torch.equal(got[3, :, 5:7], updates[0]) and torch.equal(got[0, :, 1:3], updates[1])
    assert not got[1:3].any()
    transposed = torch.zeros(4, 9, 2, 3, dtype=dtype).transpose(1, 2)  # any strides
    assert torch.equal(run("aclnnInplaceScatterUpdate", transposed, begins, updates, -2)[0], want)


def test_scatter_nd_update_and_index_put() -> None:
    data, updates = torch.zeros(4, 5, 6), randn(3, 6)
    at = torch.tensor([[0, 1], [3, 4], [2, 0]])
    want = data.clone()
    want[at[:, 0], at[:, 1]] = updates
    assert torch.equal(run("aclnnScatterNdUpdate", data, at, updates)[0], want)
    indices = [at[:, 0].contiguous(), at[:, 1].contiguous()]
    assert torch.equal(run("aclnnIndexPutImpl", data, indices, updates, False, False)[0], want)
    assert torch.equal(run("aclnnIndexPutImpl", want, indices, updates, True, False)[0], 2 * want)


def test_nothing_is_scattered_where_a_tensor_is_empty() -> None:
    data, nowhere = torch.ones(4), torch.empty(0, dtype=torch.int64)
    for release in ("8.5.0", "9.0.0", "9.1.0"):  # and shapes that do not fit
        got = run("aclnnScatterNdUpdate", data, nowhere, torch.zeros(2), release=release)[0]
        assert torch.equal(got, data)
    refused("aclnnScatterNdUpdate", data, nowhere, torch.zeros(2).half(), message="updates is Half")


# ---- what is refused ---------------------------------------------------------------------------
def test_scatter_refuses() -> None:
    op = "aclnnScatterPaKvCache"
    key, cache, slots = torch.zeros(2, 2, 32).half(), torch.zeros(3, 16, 2, 32).half(), torch.tensor([0, 1])
    rest = *PLAIN, "Norm", "None", [1, 1], [0, 0]

    def answer(places: list[int]) -> str:
        return started().call(op, key, cache, torch.tensor(places), key, cache.clone(), *rest)["message"]

    assert "-1 is not documented as padding" in answer([0, -1])
    assert "a slot is not in 0..47" in answer([0, 48])
    assert "a slot is written twice" in answer([5, 5])
    refused(op, key.float(), cache.float(), slots, key.float(), cache.float(), *rest, message="key is Float")
    refused(op, key, cache.bfloat16(), slots, key, cache, *rest, message="keyCacheRef is BFloat16")
    refused(op, key, cache.transpose(0, 1), slots, key, cache, *rest, message="keyCacheRef is not contiguous")
    narrow = cache[:, :, :1].contiguous()
    refused(op, key, narrow, slots, key, cache, *rest, message="[blocks, block size, 2, 32]")
    fewer = cache[:1].clone()
    refused(op, key, cache, slots, key, fewer, *rest, message="blocks and their size must be the same")
    refused(op, key, cache, slots[:1], key, cache, *rest, message="slotMapping has shape [1]")
    other = *PLAIN, "Other", None, None, None
    refused(op, key, cache, slots, key, cache, *other, message='cacheMode is "Other"')
    refused(op, key, cache, slots, None, cache, *rest, message="value is null", code=161001)


def test_other_refusals() -> None:
    data, updates, at = torch.zeros(4, 2, 9, 3), torch.zeros(4, 2, 2, 3), torch.tensor([0, 1, 2, 3])
    op = "aclnnInplaceScatterUpdate"
    refused(op, data, at, updates.half(), -2, message="updates is Half, data is Float")
    refused(op, data, at, updates, 0, message="it must not be 0")
    refused(op, data, at.float(), updates, -2, message="indices is Float")
    refused(op, data, at, updates[:, :1], -2, message="they may differ in the first axis and in axis -2")
    refused(op, data, at, updates, -2, message="not supported on Ascend310P3", soc="310P")
    assert "is not in data" in started().call(op, data, at + 6, updates, -2)["message"]
    refused("aclnnScatterNdUpdate", data, at.view(2, 2), updates, message="updates has shape [4, 2, 2, 3]")
    half = updates.half()
    refused("aclnnIndexPutImpl", data, [at], half, False, False, message="values is Half, selfRef is Float")
    pair = torch.zeros(4, 2, dtype=torch.complex64)
    refused("aclnnIndexPutImpl", pair, [at], pair, False, False, message="selfRef is ComplexFloat")
