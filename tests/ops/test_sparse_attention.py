"""`liteboost::block_sparse_attention` against float64: lists, sizes, layouts, memory, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.attention_cases import DTYPES, FLOOR, NAN, double, eager, make, one_thread
from support.processes import python_json
from torch import Tensor

from liteboost_adaptor.ops.sparse_attention import block_sparse_attention as reference

__all__ = ["one_thread"]  # applies by being here

sparse = torch.ops.liteboost.block_sparse_attention

# batch, heads, kv heads, q_len, kv_len, head_dim, value_dim, queries in a block, keys in a block
SHAPES = [
    (1, 4, 4, 128, 256, 64, 64, 64, 128),
    (2, 8, 2, 70, 70, 80, 80, 32, 16),
    (1, 4, 1, 130, 300, 64, 96, 128, 64),
    (2, 4, 2, 63, 129, 17, 9, 5, 7),
    (1, 2, 1, 300, 700, 128, 128, 100, 300),
    (1, 6, 2, 3, 33, 16, 16, 1, 1),
    (1, 2, 2, 40, 20, 32, 32, 16, 16),
]


def lists(chosen: Tensor, spare: int = 0) -> tuple[Tensor, Tensor]:
    """The tables of what is True in ``[batch * query blocks, heads, key blocks]``."""
    blocks = chosen.shape[-1]
    numbers = torch.where(chosen, torch.arange(blocks), blocks).sort(-1).values
    numbers = numbers.masked_fill(numbers == blocks, -1)
    counts = chosen.sum(-1)
    return torch.nn.functional.pad(numbers[..., : int(counts.max())], (0, spare), value=-1), counts


def choose(shape: tuple[int, ...], share: float, heads: int) -> Tensor:
    """``[batch * query blocks, heads, key blocks]``, True with probability ``share``."""
    batch, _, _, q_len, kv_len, _, _, rows, columns = shape
    return torch.rand(batch * -(-q_len // rows), heads, -(-kv_len // columns)) < share


def mask_of(chosen: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same as a mask ``[batch, heads, q_len, kv_len]``."""
    batch, heads, _, q_len, kv_len, _, _, rows, columns = shape
    mask = chosen.unflatten(0, (batch, -1)).transpose(1, 2)
    mask = mask.repeat_interleave(heads // mask.shape[1], 1)
    return mask.repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :q_len, :kv_len]


def check(states: tuple[Tensor, ...], chosen: Tensor, shape: tuple[int, ...], is_causal: bool) -> Tensor:
    """Shape, dtype, layout, each element's error, and the whole's against that of the eager code."""
    scaling, blocks = shape[5] ** -0.5, list(shape[7:])
    result = sparse(*states, *lists(chosen), blocks, scaling, is_causal)
    mask = mask_of(chosen, shape)
    exact = eager(*map(double, states), mask, scaling, is_causal)
    query, _, value = states
    assert result.shape == (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    assert result.dtype == query.dtype and result.is_contiguous()
    error = (result.double() - exact).abs()
    largest = value.double().abs().max()
    assert (error <= torch.finfo(query.dtype).eps * (exact.abs() + largest) + 2e-6 * largest).all()
    original = eager(*states, mask, scaling, is_causal).double() - exact
    assert error.norm() <= 1.5 * original.norm() + FLOOR[query.dtype] * exact.norm() + 1e-30
    plain = reference(*map(double, states), *lists(chosen, 2), blocks, scaling, is_causal)
    torch.testing.assert_close(plain, exact, rtol=1e-10, atol=1e-10)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.7, 1.0])
def test_lists(isa: str, dtype: torch.dtype, is_causal: bool, share: float) -> None:
    for shape in SHAPES:
        for heads in dict.fromkeys(shape[1:3]):
            check(make(*shape[:7], dtype), choose(shape, share, heads), shape, is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_all_blocks_are_dense_attention(isa: str, dtype: torch.dtype, shared: bool) -> None:
    for shape in SHAPES[:5]:
        states = make(*shape[:7], dtype)
        every = lists(choose(shape, 2.0, shape[2] if shared else shape[1]))
        for is_causal in (False, True):
            result = sparse(*states, *every, list(shape[7:]), 0.1, is_causal)
            dense = torch.ops.liteboost.attention(*states, None, 0.1, is_causal)
            unit = torch.finfo(dtype).eps
            torch.testing.assert_close(result, dense, rtol=8 * unit, atol=4 * unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_chosen_is_not_read(isa: str, dtype: torch.dtype) -> None:
    for shape in SHAPES[:5]:
        query, key, value = make(*shape[:7], dtype)
        chosen = choose(shape, 0.5, shape[2])
        chosen[..., -1] = chosen[..., 0] = False  # by nobody
        expected = check((query, key, value), chosen, shape, False)
        block = shape[8]
        last = (shape[4] - 1) // block * block
        for states in (key, value):
            states[:, :, :block] = states[:, :, last:] = NAN
        found = sparse(query, key, value, *lists(chosen), list(shape[7:]), shape[5] ** -0.5)
        assert torch.equal(found, expected)


def test_lists_that_choose_nothing(isa: str) -> None:
    shape = SHAPES[0]
    states = make(*shape[:7], torch.float32)
    chosen = choose(shape, 0.6, shape[1])
    chosen[1, 2] = False
    result = check(states, chosen, shape, False)
    assert not result[0, 64:, 2].any() and result[0, :64, 2].any()
    nothing = lists(torch.zeros_like(chosen))
    assert nothing[0].shape[-1] == 0
    for function in (sparse, reference):
        assert not function(*states, *nothing, [64, 128], 0.125).any()


def test_rows_before_every_chosen_key_are_zero(isa: str) -> None:
    shape = (1, 2, 1, 200, 200, 32, 32, 64, 32)
    states = make(*shape[:7], torch.float32)
    chosen = torch.zeros(4, 2, 7, dtype=torch.bool)
    chosen[:, :, 3] = True  # keys 96 to 127
    result = check(states, chosen, shape, True)
    assert not result[0, :96].any() and result[0, 96:].any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(isa: str, dtype: torch.dtype) -> None:
    shape = (2, 8, 2, 90, 90, 64, 64, 32, 32)
    states = make(*shape[:7], dtype)
    tables = lists(choose(shape, 0.5, 8))
    expected = sparse(*states, *tables, [32, 32], 0.125, True)

    def amid_nan(tensor: Tensor) -> Tensor:
        """At an odd offset in a larger tensor; what lies around it spoils all if it is read."""
        spoiler = NAN if tensor.is_floating_point() else 2**40
        room = torch.full([size + 3 for size in tensor.shape], spoiler, dtype=tensor.dtype)
        return room[tuple(slice(1, -2) for _ in tensor.shape)].copy_(tensor)

    views = (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        amid_nan,
    )
    for view in views:
        found = sparse(*map(view, states), *map(view, tables), [32, 32], 0.125, True)
        torch.testing.assert_close(found, expected)


def test_every_number_of_threads() -> None:
    shape = (2, 8, 2, 300, 300, 64, 64, 64, 64)
    states = make(*shape[:7], torch.float32)
    tables = lists(choose(shape, 0.5, 2))
    expected = sparse(*states, *tables, [64, 64], 0.125, True)
    for threads in (2, 5):
        torch.set_num_threads(threads)  # one_thread takes it back
        assert torch.equal(sparse(*states, *tables, [64, 64], 0.125, True), expected)


def test_empty_sizes() -> None:
    for shape in (
        (1, 4, 2, 3, 0, 8, 8, 2, 2),
        (1, 4, 2, 0, 3, 8, 8, 2, 2),
        (0, 4, 2, 3, 3, 8, 8, 2, 2),
        (1, 0, 0, 3, 3, 8, 8, 2, 2),
        (1, 4, 2, 3, 3, 8, 0, 2, 2),
        (1, 4, 2, 3, 3, 0, 8, 2, 2),
    ):
        states = make(*shape[:7], torch.float32)
        chosen = choose(shape, 2.0, shape[1])
        tables = torch.arange(chosen.shape[-1]).expand(chosen.shape), chosen.sum(-1)
        found, plain = (function(*states, *tables, [2, 2], 1.0) for function in (sparse, reference))
        torch.testing.assert_close(found, plain)


# How much memory one call takes for what it does: the peak of what it holds beside its inputs.
PEAK = """
import json, torch
from liteboost_adaptor import native
from liteboost_adaptor.ops.block_selection import select_blocks
native.load()
torch.set_num_threads(2)
def dense(states):
    torch.ops.liteboost.attention(states, states, states, None, 0.25, True)
def sparse(states):
    tables = select_blocks(states, states, 0.75)
    torch.ops.liteboost.block_sparse_attention(states, states, states, *tables, [128, 128], 0.25, True)
def peak(attend, length):
    states = torch.randn(1, 2, length, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(states)
    held = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
peak(dense, 512)
lengths = 2048, 4096, 8192, 16384
print(json.dumps([[peak(attend, length) for length in lengths] for attend in (dense, sparse)]))
"""


def test_memory_is_linear(native_only: None) -> None:
    """Dense, and sparse with its selection, as the allocator counts it: no scores, no mask, no copies."""
    for peaks in python_json(PEAK, is_forked=True):
        assert all(after <= 2.2 * before for before, after in itertools.pairwise(peaks)), peaks
        assert peaks[-1] < 8 * 2 * 16384 * 16 * 4  # of some tensors of states; the scores take 2 GiB


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    shape = (2, 4, 2, 9, 12, 16, 8, 4, 5)
    states = make(*shape[:7], dtype)
    for heads in (4, 2):
        tables = lists(choose(shape, 0.6, heads))
        torch.library.opcheck(sparse, (*states, *tables, [4, 5], 0.25), {"is_causal": heads == 2})


def test_compiles_with_dynamic_lengths() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def run(query: Tensor, key: Tensor, value: Tensor, idx: Tensor, counts: Tensor) -> Tensor:
        return sparse(query, key, value, idx, counts, [4, 4], 0.25, True).flatten(2)

    for q_len, kv_len in ((5, 9), (6, 20), (13, 14)):
        shape = (1, 4, 2, q_len, kv_len, 16, 16, 4, 4)
        states = make(*shape[:7], torch.float32)
        tables = lists(choose(shape, 0.7, 4))
        torch.testing.assert_close(
            run(*states, *tables), sparse(*states, *tables, [4, 4], 0.25, True).flatten(2)
        )


INTS = torch.int64
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"query": torch.zeros(4, 3, 8)},
        ValueError,
        "query must have shape [batch, num_heads, q_len, head_dim]",
    ),
    ({"key": torch.zeros(1, 2, 5, 4)}, ValueError, "key must have the head_dim of query = 8, got 4"),
    ({"value": torch.zeros(1, 2, 5, 8).half()}, TypeError, "value must have the dtype of query"),
    ({"block_shape": [2]}, ValueError, "block_shape must be two numbers from 1 to 2147483647"),
    ({"block_shape": [2, 0]}, ValueError, "of queries and of keys, got [2, 0]; usual is [128, 128]"),
    ({"block_shape": [2**31, 2]}, ValueError, "block_shape must be two numbers"),
    (
        {"select_idx": torch.zeros(1, 4, 1, dtype=INTS)},
        ValueError,
        "select_idx must have shape [batch * query blocks, num_heads or num_kv_heads, key blocks] = "
        "[2, 4 or 2, any], got [1, 4, 1]; pass a list for each block of queries and head",
    ),
    ({"select_idx": torch.zeros(2, 3, 1, dtype=INTS)}, ValueError, "got [2, 3, 1]"),
    ({"select_idx": torch.zeros(2, 4, dtype=INTS)}, ValueError, "select_idx must have shape"),
    (
        {"select_num_idx": torch.zeros(2, 2, dtype=INTS)},
        ValueError,
        "select_num_idx must have the first two sizes of select_idx = [2, 4], got [2, 2]",
    ),
    ({"select_idx": torch.zeros(2, 4, 1).int()}, TypeError, "select_idx must be int64, got"),
    ({"select_num_idx": torch.zeros(2, 4)}, TypeError, "select_num_idx must be int64, got"),
    (
        {"select_num_idx": torch.full((2, 4), 2)},
        IndexError,
        "select_num_idx must be 0 .. 1, the length of the lists, got",
    ),
    ({"select_num_idx": torch.full((2, 4), -1)}, IndexError, "select_num_idx must be 0 .. 1"),
    (
        {"select_idx": torch.full((2, 4, 1), 3)},
        IndexError,
        "select_idx must be ascending, 0 .. 2, below the blocks of keys, got 3 behind -1",
    ),
    ({"select_idx": torch.full((2, 4, 1), -1)}, IndexError, "got -1 behind -1"),
    (
        {"select_idx": torch.ones(2, 4, 2, dtype=INTS), "select_num_idx": torch.full((2, 4), 2)},
        IndexError,
        "got 1 behind 1",
    ),
    ({"scaling": NAN}, ValueError, "scaling must be finite, got nan"),
    ({"key": torch.zeros(1, 2, 5, 8, device="meta")}, ValueError, "key must be on the device of query"),
    (
        {"select_idx": torch.zeros(2, 4, 1, dtype=INTS, device="meta")},
        ValueError,
        "select_idx must be on the device of query",
    ),
]


@pytest.mark.parametrize("wrong, error, text", ERRORS, ids=[str(i) for i in range(len(ERRORS))])
@pytest.mark.parametrize("function", [sparse, reference], ids=["op", "reference"])
def test_errors(function: Any, wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 4, 3, 8),
        "key": torch.zeros(1, 2, 5, 8),
        "value": torch.zeros(1, 2, 5, 8),
        "select_idx": torch.zeros(2, 4, 1, dtype=INTS),
        "select_num_idx": torch.ones(2, 4, dtype=INTS),
        "block_shape": [2, 2],
        "scaling": 1.0,
    }
    with pytest.raises(error) as caught:
        function(**{**arguments, **wrong})
    assert text in str(caught.value) and "liteboost::block_sparse_attention: " in str(caught.value)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_gradients_are_refused(which: str) -> None:
    states = dict(zip(("query", "key", "value"), make(1, 2, 2, 4, 4, 4, 4, torch.float32), strict=True))
    tables = {"select_idx": torch.zeros(1, 2, 1, dtype=INTS), "select_num_idx": torch.ones(1, 2, dtype=INTS)}
    states[which].requires_grad_()
    with pytest.raises(RuntimeError, match=r"attention: has no backward, but .* requires grad"):
        sparse(**states, **tables, block_shape=[4, 4], scaling=1.0)
    with torch.no_grad():
        assert sparse(**states, **tables, block_shape=[4, 4], scaling=1.0).isfinite().all()


def test_float64_is_refused(native_only: None) -> None:
    tables = torch.zeros(1, 2, 1, dtype=INTS), torch.ones(1, 2, dtype=INTS)
    with pytest.raises(TypeError, match="query must be float32, bfloat16 or float16, got"):
        sparse(*make(1, 2, 2, 3, 3, 4, 4, torch.float64), *tables, [4, 4], 1.0)
