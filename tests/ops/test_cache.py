"""`liteboost::kv_append` against a copy of each row alone: every layout, and all that is not written."""

from __future__ import annotations

import pytest
import torch
from support.compare import DTYPES, assert_refused, same_bits
from torch import Tensor

from liteboost_adaptor.ops.cache import kv_append as reference

op = torch.ops.liteboost.kv_append
FUNCTIONS = pytest.mark.parametrize("function", [op, reference], ids=["op", "reference"])


def heads_first(blocks: int, heads: int, size: int, dim: int) -> Tensor:
    return torch.randn(blocks, heads, size, dim)


def places_first(blocks: int, heads: int, size: int, dim: int) -> Tensor:
    return torch.randn(blocks, size, heads, dim).transpose(1, 2)


def part(blocks: int, heads: int, size: int, dim: int) -> Tensor:
    """The first places of a larger buffer, off its start, with channels between the heads."""
    return torch.randn(blocks + 1, heads + 2, size + 5, dim + 3)[1:, 1:-1, :size, 2:-1]


LAYOUTS = [heads_first, places_first, part]


def write(cache: Tensor, added: Tensor, slots: Tensor) -> None:
    for batch, row in enumerate(slots.tolist()):
        for token, slot in enumerate(row):
            cache[slot // cache.shape[2], :, slot % cache.shape[2]] = added[batch, :, token]


def whole(cache: Tensor) -> Tensor:
    """All of the memory behind it."""
    return torch.tensor([], dtype=cache.dtype).set_(cache.untyped_storage())


def check(function, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Both caches, and what of their memory they do not show, are as after a copy of each row."""
    wanted = []
    for cache, added in ((keys, key), (values, value)):
        memory = whole(cache).clone()
        write(memory.as_strided(cache.shape, cache.stride(), cache.storage_offset()), added, slots)
        wanted.append(memory)
    before = [each.clone() for each in (key, value, slots)]
    assert function(keys, values, key, value, slots) is None
    assert same_bits(whole(keys), wanted[0]) and same_bits(whole(values), wanted[1])
    assert all(map(torch.equal, (key, value, slots), before))


def unlike(below: int, batch: int, length: int) -> Tensor:
    return torch.randperm(below)[: batch * length].reshape(batch, length)


@FUNCTIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (7, 129), (1, 16)])
def test_every_layout(function, layout, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    keys, values = (layout(3, 2, 10, size).to(dtype) for size in (dim, value_dim))
    key, value = (places_first(2, 2, 5, size).to(dtype) for size in (dim, value_dim))
    check(function, keys, values, key, value, unlike(30, 2, 5))
    check(function, keys, values, key[:1, :, :1], value[:1, :, :1], torch.tensor([[29]]))


@FUNCTIONS
def test_views_of_new_tokens(function) -> None:
    fused = torch.randn(2, 5, 3 * 4 * 16).view(2, 5, 12, 16).transpose(1, 2)
    rows = torch.randn(2, 4, 16, 5).mT  # channels apart
    for key, value in (
        (fused[:, :4], fused[:, 8:]),
        (rows, rows),
        (fused[:1, :4].expand(2, -1, -1, -1), rows),
    ):
        for layout in LAYOUTS:
            check(function, layout(2, 4, 8, 16), layout(2, 4, 8, 16), key, value, unlike(16, 2, 5))
    keys, values = heads_first(2, 4, 8, 16), places_first(2, 4, 8, 16)
    check(function, keys, values, fused[:, :4], rows, torch.arange(20).view(2, 10)[:, ::2] % 16)


@FUNCTIONS
def test_a_step_appends_to_each_sequence(function) -> None:
    """A block a sequence: what an eager cache concatenates."""
    keys, values = heads_first(3, 2, 12, 16), places_first(3, 2, 12, 16)
    seen = [torch.empty(3, 2, 0, 16), torch.empty(3, 2, 0, 16)]
    for length in (4, 1, 1, 2):
        added = [torch.randn(3, 2, length, 16) for _ in seen]
        start = seen[0].shape[2]
        slots = torch.arange(3)[:, None] * 12 + torch.arange(start, start + length)
        function(keys, values, *added, slots)
        seen = [torch.cat(pair, dim=2) for pair in zip(seen, added, strict=True)]
        assert torch.equal(keys[:, :, : start + length], seen[0])
        assert torch.equal(values[:, :, : start + length], seen[1])


@FUNCTIONS
def test_both_halves_in_one_allocation(function) -> None:
    both = torch.randn(2, 3, 2, 8, 16)
    check_together = both.clone()
    key, value, slots = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16), unlike(24, 1, 4)
    write(check_together[0], key, slots)
    write(check_together[1], value, slots)
    function(both[0], both[1], key, value, slots)
    assert torch.equal(both, check_together)
    side_by_side = torch.zeros(3, 2, 8, 32)
    function(side_by_side[..., :16], side_by_side[..., 16:], key, value, slots)
    block, place = slots // 8, slots % 8
    assert torch.equal(
        side_by_side.transpose(1, 2)[block, place], torch.cat((key, value), -1).transpose(1, 2)
    )


@FUNCTIONS
@pytest.mark.parametrize(
    ("blocks", "heads", "size", "dim", "batch", "length"),
    [
        (2, 3, 4, 8, 0, 3),
        (2, 3, 4, 8, 2, 0),
        (2, 0, 4, 8, 1, 3),
        (2, 3, 4, 0, 1, 3),
        (0, 3, 4, 8, 1, 0),
        (2, 3, 0, 8, 1, 0),
    ],
)
def test_nothing_to_write(
    function, blocks: int, heads: int, size: int, dim: int, batch: int, length: int
) -> None:
    keys, values = heads_first(blocks, heads, size, dim), heads_first(blocks, heads, size, 5)
    key, value = heads_first(batch, heads, length, dim), heads_first(batch, heads, length, 5)
    slots = torch.arange(batch * length).view(batch, length)
    check(function, keys, values, key, value, slots)


def test_result_does_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    key, value, slots = torch.randn(2, 4, 300, 64), torch.randn(2, 4, 300, 64), unlike(700, 2, 300)
    try:
        torch.set_num_threads(3)
        for layout in LAYOUTS:
            check(op, layout(7, 4, 100, 64), layout(7, 4, 100, 64), key, value, slots)
    finally:
        torch.set_num_threads(before)


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    cache = [places_first(2, 3, 8, 16).to(dtype) for _ in range(2)]
    return *cache, *(torch.randn(2, 3, 4, 16).to(dtype) for _ in range(2)), unlike(16, 2, 4)


@FUNCTIONS
def test_versions_are_counted_up(function) -> None:
    keys, values, key, value, slots = arguments()
    before = [each._version for each in (keys, values, key, value, slots)]
    with torch.no_grad():
        function(keys, values, key, value, slots)
    versions = [each._version for each in (keys, values, key, value, slots)]
    assert versions[0] > before[0] and versions[1] > before[1] and versions[2:] == before[2:]


def test_backward_that_needs_what_was_overwritten_says_so() -> None:
    keys, values, key, value, slots = arguments()
    weight = torch.ones((), requires_grad=True)
    loss = (keys * weight).sum()
    op(keys, values, key, value, slots)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@FUNCTIONS
def test_inference_tensors_are_written_to_in_inference_mode_alone(function) -> None:
    with torch.inference_mode():
        inside = arguments()
        check(function, *inside)
    normal = arguments()
    version = normal[0]._version
    with torch.inference_mode():
        check(function, *normal)
    assert normal[0]._version > version
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        function(*inside[:2], *arguments()[2:])


@FUNCTIONS
@pytest.mark.parametrize("slot", [-1, 16, 2**40, -(2**63)])
def test_slots_outside_the_cache_are_refused_before_anything_is_written(function, slot: int) -> None:
    keys, values, key, value, slots = arguments()
    slots[1, 3] = slot
    before = keys.clone(), values.clone()
    words = (
        rf"liteboost::kv_append: slots must be 0 \.\. 15, below .* of keys \[2, 3, 8, 16\], got {slot}; pass"
    )
    with pytest.raises(IndexError, match=words):
        function(keys, values, key, value, slots)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_slots_are_not_looked_at_without_values() -> None:
    """As the last step of a trace: nothing is known of them."""
    assert op(*(each.to("meta") for each in arguments())) is None


K, N, S = torch.ones(2, 3, 8, 16), torch.ones(2, 3, 4, 16), torch.arange(8).view(2, 4)
V, M = K.clone(), N.clone()
BAD = [
    ((K[0], V, N, M, S), ValueError, r"keys must have shape \[blocks, .*got \[3, 8, 16\]"),
    ((K, V[0], N, M, S), ValueError, r"values must have shape \[blocks, .*got \[3, 8, 16\]"),
    ((K, V, N[0], M, S), ValueError, r"key must have shape \[batch, kv_heads, .*got \[3, 4, 16\]"),
    ((K, V, N, M[0], S), ValueError, r"value must have shape \[batch, kv_heads, .*got \[3, 4, 16\]"),
    ((K, V[:1], N, M, S), ValueError, r"values must have the blocks, .* of keys \[2, 3, 8, 16\], got \[1, "),
    (
        (K, V, N[:, :2], M, S),
        ValueError,
        r"key must have kv_heads = 3 and head_dim = 16 .*got \[2, 2, 4, 16\]",
    ),
    (
        (K, V, N[..., :8], M, S),
        ValueError,
        r"key must have kv_heads = 3 and head_dim = 16 .*got \[2, 3, 4, 8\]",
    ),
    ((K, V, N, M[:, :, :3], S), ValueError, r"value must have the batch, .* of key \[2, 3, 4, 16\], got"),
    ((K, V, N, M[..., :8], S), ValueError, r"value must have value_dim = 16 .*got \[2, 3, 4, 8\]"),
    ((K, V, N, M, S[0]), ValueError, r"slots must have shape \[batch, q_len\] = \[2, 4\], got \[4\]"),
    ((K, V, N, M, S.T), ValueError, r"slots must have shape \[batch, q_len\] = \[2, 4\], got \[4, 2\]"),
    ((K.char(), V, N, M, S), TypeError, "keys must be float32, bfloat16 or float16, got"),
    ((K, V.half(), N, M, S), TypeError, r"values must have the dtype of keys \(float32\), got float16"),
    ((K, V, N.half(), M, S), TypeError, r"key must have the dtype of keys \(float32\), got float16"),
    ((K, V, N, M.half(), S), TypeError, r"value must have the dtype of keys \(float32\), got float16"),
    ((K, V, N, M, S.int()), TypeError, "slots must be int64, got"),
    ((K, V, N, M, S.to("meta")), ValueError, r"slots must be on the device of keys \(cpu\), got meta"),
    (
        (torch.ones(2, 3, 16, 8).mT, V, N, M, S),
        ValueError,
        r"keys must have stride 1 in dimension 3, got strides \[384, 128, 1, 8\]",
    ),
    (
        (K, V[:1].expand(2, -1, -1, -1), N, M, S),
        ValueError,
        "values must have memory for each element, got stride 0",
    ),
    ((K, K, N, M, S), ValueError, "values must have memory of their own, got that of keys"),
    ((K, V, K[:, :, 4:], M, S), ValueError, "key must not lie in the memory of the cache, got a view"),
    ((K, V, N, K[:, :, 4:], S), ValueError, "value must not lie in the memory of the cache, got a view"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD, ids=[bad[2][:34] for bad in BAD])
def test_bad_arguments(arguments: tuple, error: type[Exception], text: str) -> None:
    assert_refused((op, reference), arguments, error, f"liteboost::kv_append: {text}")


@pytest.mark.parametrize("number", range(4))
def test_gradient_is_refused(number: int) -> None:
    given = list(arguments())
    given[number] = given[number].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="liteboost::kv_append: has no backward"):
        op(*given)
    with torch.no_grad():
        op(*given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    keys, values, key, value, slots = arguments(dtype)
    torch.library.opcheck(op, (keys, values, key, value, slots))
    torch.library.opcheck(op, (keys.contiguous(), part(2, 3, 8, 16).to(dtype), key, value, slots))
    torch.library.opcheck(op, (keys, values, key[:, :, :0], value[:, :, :0], slots[:, :0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(layout, dynamic: bool) -> None:
    def step(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
        op(keys, values, key * 2, value, slots)
        return keys.sum() + values.transpose(1, 2).sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (4, 2):
        keys, values = layout(2, 3, 8, 16), layout(2, 3, 8, 16)
        key, value = torch.randn(2, 3, length, 16), torch.randn(2, 3, length, 16)
        slots = unlike(16, 2, length)
        wanted = keys.clone(), values.clone()
        write(wanted[0], key * 2, slots)
        write(wanted[1], value, slots)
        with torch.no_grad():
            total = compiled(keys, values, key, value, slots)
        assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])
        torch.testing.assert_close(total, wanted[0].sum() + wanted[1].sum(), rtol=1e-4, atol=1e-4)
