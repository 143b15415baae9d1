"""`liteboost::attention` against float64: masks, sizes, plans, odd numbers, at every instruction set."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import (
    DTYPES,
    FLOOR,
    MASKS,
    NAN,
    SHAPES,
    check,
    eager,
    make,
    make_mask,
    make_sinks,
    one_thread,
)
from torch import Tensor

from liteboost_adaptor.ops.attention import attention as reference

__all__ = ["one_thread"]  # applies by being here

attention = torch.ops.liteboost.attention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(isa: str, dtype: torch.dtype, kind: str) -> None:
    for shape in SHAPES:
        batch, heads, _, q_len, kv_len, dim, _ = shape
        options = dict(MASKS[kind])
        mask = options.pop("mask", None)
        if mask is not None:
            mask = make_mask(mask, batch, heads, q_len, kv_len, dtype)
        if sinks := options.pop("sinks", ""):
            options["sinks"] = make_sinks(sinks, batch, heads, q_len, dtype)
        check(*make(*shape, dtype), mask, dim**-0.5, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [0, 1, 7, 63, 64, 65, 129, 1000])
def test_lengths(isa: str, dtype: torch.dtype, kv_len: int) -> None:
    for q_len in (0, 1, 2, 7, 63, 129) if kv_len < 1000 else (1, 65):
        # Where q_len > kv_len the first queries see nothing.
        check(*make(1, 2, 1, q_len, kv_len, 16, 16, dtype), None, 0.2, is_causal=True)
        check(*make(1, 2, 1, q_len, kv_len, 16, 16, dtype), None, 0.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 5, 15, 16, 31, 64, 72, 80, 96, 100, 128, 130, 256, 512])
def test_head_sizes(isa: str, dtype: torch.dtype, dim: int) -> None:
    for value_dim in {dim, 33, 129}:
        for q_len in (1, 11):
            check(*make(1, 2, 1, q_len, 77, dim, value_dim, dtype), None, dim**-0.5, is_causal=True)


def test_no_channels() -> None:
    query, key, value = make(1, 2, 1, 3, 5, 0, 4, torch.float32)
    torch.testing.assert_close(
        attention(query, key, value, None, 1.0), value.mean(2)[:, None, [0, 0]].expand(1, 3, 2, 4)
    )
    assert attention(*make(1, 2, 1, 3, 5, 4, 0, torch.float32), None, 1.0).shape == (1, 3, 2, 0)
    assert attention(*make(0, 2, 1, 3, 5, 4, 4, torch.float32), None, 1.0).shape == (0, 3, 2, 4)
    assert attention(*make(1, 0, 0, 3, 5, 4, 4, torch.float32), None, 1.0).shape == (1, 3, 0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2), (100, 1)], ids=str)
def test_grouped_heads(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    for q_len in (1, 2, 3, 5, 8, 17) if heads[0] < 100 else (1, 3):
        check(*make(1, *heads, q_len, 100, 16, 16, dtype), None, 0.2, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_keys_are_zero(isa: str, dtype: torch.dtype) -> None:
    for q_len, kv_len in ((1, 100), (90, 150)):
        query, key, value = make(2, 4, 2, q_len, kv_len, 64, 64, dtype)
        shown = torch.ones(2, 1, q_len, kv_len, dtype=torch.bool)
        shown[1, :, : q_len // 2 + 1] = False
        for mask in (shown, torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, -torch.inf)):
            for sinks in (None, torch.randn(4)):
                result = check(query, key, value, mask, 0.125, sinks=sinks)
                assert not result[1, : q_len // 2 + 1].any() and result[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_masked_by_the_lowest_number_are_means(isa: str, dtype: torch.dtype) -> None:
    for q_len in (1, 40):
        query, key, value = make(1, 4, 2, q_len, 200, 64, 64, dtype)
        # The lowest fp16 is not low enough to swallow a logit, so a mask for fp16 has to be fp32.
        low = torch.float32 if dtype == torch.float16 else dtype
        mask = torch.full((1, 1, q_len, 200), torch.finfo(low).min, dtype=low)
        mean = value.double().mean(2).repeat_interleave(2, 1)[:, None].expand(1, q_len, 4, 64)
        check(query, key, value, mask, 0.125, exact=mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-4, 30.0, -3.0])
def test_scaled_inputs(isa: str, dtype: torch.dtype, scale: float) -> None:
    for shape in SHAPES[:5]:
        query, key, value = make(*shape, dtype)
        query = (query.float() * abs(scale)).to(dtype)
        scaling = shape[5] ** -0.5 * (1 if scale > 0 else -1)
        result = attention(query, key, value, None, scaling)
        exact = eager(query.double(), key.double(), value.double(), None, scaling)
        original = eager(query, key, value, None, scaling).double() - exact
        error = (result.double() - exact).norm()
        # Errors of large fp32 logits come from the order of their sums.
        assert error <= 1.5 * original.norm() + (FLOOR[dtype] + 2e-7 * max(scale, 1)) * exact.norm()
    query, key, value = make(1, 2, 2, 30, 40, 64, 64, dtype)
    assert not attention(query, key, value, None, 0.0).sub(value.mean(2)[:, None]).abs().gt(0.01).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_skipped_blocks(isa: str, native_only: None, dtype: torch.dtype) -> None:
    """A causal mask given as a tensor leaves whole blocks out; values there may even be NaN."""
    query, key, value = make(1, 2, 1, 300, 900, 64, 64, dtype)
    ages = torch.arange(300)[:, None] + 600 - torch.arange(900)
    mask = (ages >= 0) & (ages < 70)
    expected = check(query, key, value, mask[None, None], 0.125)
    value[:, :, :256] = NAN  # a block of keys that no query sees
    assert torch.equal(attention(query, key, value, mask[None, None], 0.125), expected)
    causal = attention(query, key, value, None, 0.125, is_causal=True, sliding_window=70)
    torch.testing.assert_close(causal, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_a_number_stays_in_its_row(isa: str, dtype: torch.dtype) -> None:
    for q_len in (2, 20):
        query, key, value = make(1, 2, 2, q_len, 40, 32, 32, dtype)
        query[0, 1, 1, 3] = NAN
        result = attention(query, key, value, None, 0.2)
        assert result[0, 1, 1].isnan().all()
        assert result.isnan().sum() == 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_len", [1, 8, 17, 40, 129, 300])
def test_rows_of_nan_alone(isa: str, dtype: torch.dtype, kv_len: int) -> None:
    """A maximum over lanes may lose a NaN to the -inf of hidden keys; that is no row without keys."""
    for q_len in (1, 3, 20):
        query, key, value = make(1, 2, 1, q_len, kv_len, 32, 32, dtype)
        query[:, 0] = NAN
        first = torch.arange(kv_len).eq(0).expand(1, 1, 1, -1)
        for form in (
            (None, 0.2),
            (first, 0.2),
            (None, 0.2, True),
            (None, 0.2, True, 1),
            (first, 0.2, True, 5),
        ):
            expected = reference(query, key, value, *form)
            found = attention(query, key, value, *form)
            assert torch.equal(found.isnan(), expected.isnan()) and not found[:, :, 1].isnan().any()
            assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("argument", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("number", [NAN, float("inf")], ids=str)
def test_what_a_mask_hides_is_nan_where_it_is_in_torch(
    isa: str, dtype: torch.dtype, argument: int, number: float
) -> None:
    for q_len in (1, 3, 20):
        arguments = make(2, 4, 4, q_len, 40, 32, 32, dtype)
        arguments[argument][:, 1, 0] = number  # a key that is hidden in the first row of the batch
        mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
        mask[0, ..., :2] = False
        found = attention(*arguments, mask, 0.2)
        wanted = F.scaled_dot_product_attention(*arguments, attn_mask=mask, scale=0.2).transpose(1, 2)
        assert found.isnan().any() and torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 2), (16, 8)], ids=str)
def test_every_plan(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Numbers of threads lead to other cuts of queries and keys, which must not show."""
    before = torch.get_num_threads()
    try:
        for q_len, kv_len in ((1, 5000), (3, 2100), (17, 1500), (200, 300)):
            states = make(1, *heads, q_len, kv_len, 32, 32, dtype)
            mask = torch.rand(1, 1, q_len, kv_len) > 0.5
            mask[..., 256:2000] = False
            mask[:, :, -1] = False
            for options in (
                {"mask": None, "is_causal": True, "sinks": torch.randn(heads[0])},
                {"mask": None, "sinks": torch.randn(1, q_len, heads[0]).transpose(1, 2)},
                {"mask": None, "is_causal": True, "sliding_window": 1030},
                {"mask": mask},
            ):
                expected = check(*states, options.pop("mask"), 0.2, **options)
                for threads in (1, 3, 8):
                    torch.set_num_threads(threads)
                    # Every plan is held to the float64 bound. Beside each other, fp32 sums over thousands of
                    # keys in another order differ by more than their last bits; bf16 rounds that away.
                    result = check(*states, mask if not options else None, 0.2, **options)
                    relative, absolute = (16, 8) if dtype == torch.float32 else (4, 1)
                    unit = torch.finfo(dtype).eps
                    torch.testing.assert_close(result, expected, rtol=relative * unit, atol=absolute * unit)
                torch.set_num_threads(before)
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_threads() -> None:
    states = make(1, 4, 2, 50, 2000, 32, 32, torch.float32)
    expected = attention(*states, None, 0.2)
    results: list[Tensor] = []

    def work() -> None:
        results.append(attention(*states, None, 0.2))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected)


def test_decode_agrees_with_prefill(isa: str) -> None:
    query, key, value = make(1, 8, 4, 200, 200, 64, 64, torch.float32)
    whole = attention(query, key, value, None, 0.125, is_causal=True)
    for end in (1, 65, 200):
        last = attention(
            query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], None, 0.125, is_causal=True
        )
        torch.testing.assert_close(last[:, 0], whole[:, end - 1], rtol=1e-5, atol=1e-6)
