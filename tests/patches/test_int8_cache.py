"""Level 2 with kv8: layers keep integers, and whoever reads them gets the values that these stand for."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import liteboost_adaptor
from liteboost_adaptor.kv_cache import bind, buffers, int8_layers
from liteboost_adaptor.kv_cache.int8_tensor import Int8KVTensor
from liteboost_adaptor.ops.int8_attention import dequantized, quantize_kv
from liteboost_adaptor.report import CallCounter

WINDOW, DIM = 8, 12
caller = torch.nn.Identity()


@pytest.fixture(autouse=True)
def _restored():
    int8_layers.want(caller)
    with torch.no_grad():
        yield
    int8_layers.want_no_longer(caller)
    bind.restore_all()


def served(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    bind.appending(None, CallCounter())(cache, caller)
    return cache


def rounded(states: torch.Tensor) -> torch.Tensor:
    return dequantized(quantize_kv(states), states.dtype)


def states(count: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, count, DIM, generator=generator).to(dtype) for _ in range(2))


def kept(layer: Any, name: str = "keys") -> Any:
    """What a layer keeps, by the rows of integers: who reads the attribute gets the values."""
    return int8_layers.kept(vars(layer), name)


def same(found: Any, expected: torch.Tensor) -> bool:
    """Rows of integers with the values expected, read as anybody reads them."""
    assert type(found) is Int8KVTensor and found.shape == expected.shape and found.dtype == expected.dtype
    return torch.equal(found + 0, expected) and torch.equal(found.dequantized_kv(), expected)


KINDS = [DynamicLayer, lambda: DynamicSlidingWindowLayer(WINDOW)]


@pytest.mark.parametrize("make", KINDS, ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_is_the_originals_with_rounded_states(make: Any, dtype: torch.dtype) -> None:
    ours, theirs = make(), make()
    served(ours)
    assert isinstance(ours, type(theirs))
    for step, count in enumerate([5, 1, 1, 1, 3, *[1] * 200, 40, 1]):
        new = states(count, step, dtype)
        expected = theirs.update(*map(rounded, new))
        for found, wanted in zip(ours.update(*new), expected, strict=True):
            assert same(found, wanted)
        assert same(kept(ours), theirs.keys) and same(kept(ours, "values"), theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_is_a_byte_a_value_and_four_a_row(dtype: torch.dtype) -> None:
    ours, theirs = DynamicLayer(), DynamicLayer()
    served(ours)
    new = tuple(torch.randn(1, 8, 4096, 128).to(dtype) for _ in range(2))
    ours.update(*new)
    theirs.update(*new)
    kept = vars(ours)["keys"]
    assert kept.dtype == torch.int8 and kept.untyped_storage().nbytes() == 8 * 4096 * (128 + 4)
    assert kept.nbytes / theirs.keys.nbytes == pytest.approx(
        0.516 if dtype == torch.bfloat16 else 0.258, abs=1e-3
    )
    for _ in range(3):
        ours.update(*(state[:, :, :1] for state in new))
    assert vars(ours)["keys"].untyped_storage().nbytes() <= 8 * 132 * (4099 + 4099 // 2 + 1)


@pytest.mark.parametrize("make", KINDS, ids=["full", "sliding"])
def test_what_is_kept_is_not_copied_for_a_token(make: Any) -> None:
    layer = make()
    served(layer)
    layer.update(*states(600, 0))
    moved, before = 0, 0
    for step in range(600):
        layer.update(*states(1, step))
        address = torch._C._data_address(vars(layer)["keys"])  # data_ptr() would be a write
        moved += address != before
        before = address
    assert moved <= (4 if make is DynamicLayer else 7)


VIEWS = {
    "narrow": lambda states: states.narrow(2, 3, 4).zero_(),
    "slice": lambda states: states[:, 1:, -2:].mul_(2),
    "select": lambda states: states.select(0, 1).neg_(),
    "split": lambda states: states.split(3, dim=2)[1].fill_(0.5),
    "chunk": lambda states: states.chunk(2, dim=1)[0].zero_(),
    "unbind": lambda states: states.unbind(0)[1].copy_(torch.ones(3, 10, DIM)),
    "head": lambda states: states[0, 2].zero_(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_a_view_is_written_to_the_rows(view: str) -> None:
    layer, new = DynamicLayer(), states(10, 0)
    served(layer)
    layer.update(*new)
    expected = rounded(new[0])
    VIEWS[view](expected)
    VIEWS[view](kept(layer))
    assert same(kept(layer), rounded(expected)) and not torch.equal(kept(layer) + 0, rounded(new[0]))
    assert torch.equal(kept(layer, "values") + 0, rounded(new[1]))


CHANGES = {
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "crop": lambda layer: layer.crop(-7),
    "offload": lambda layer: layer.offload(),
    "prefetch": lambda layer: layer.prefetch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_transformers_does_to_a_layer_keeps_integers(change: str) -> None:
    ours, theirs = DynamicLayer(), DynamicLayer()
    served(ours)
    for step in range(3):
        new = states(10, step)
        ours.update(*new)
        theirs.update(*map(rounded, new))
    for layer in (ours, theirs):
        CHANGES[change](layer)
    assert vars(ours)["keys"].dtype == torch.int8
    assert same(kept(ours), theirs.keys) and same(kept(ours, "values"), theirs.values)
    batch = theirs.keys.shape[0]
    new = tuple(state[:1].expand(batch, -1, -1, -1) for state in states(2, 9))
    for found, expected in zip(ours.update(*new), theirs.update(*map(rounded, new)), strict=True):
        assert same(found, expected)


def test_recorded_windows_and_their_crops() -> None:
    ours, theirs = (DynamicSlidingWindowLayer(WINDOW) for _ in range(2))
    if not hasattr(ours, "activate_past_recording"):
        pytest.skip("this transformers does not record windows")
    served(ours)
    for layer in (ours, theirs):
        layer.activate_past_recording()
    for step in range(30):
        new = states(4, step)
        for found, expected in zip(ours.update(*new), theirs.update(*map(rounded, new)), strict=True):
            assert same(found, expected)
        for layer in (ours, theirs):
            layer.crop(-(step % 4))
        assert same(kept(ours), theirs.keys)


def test_a_layer_that_is_reset_begins_anew() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(4, 0))
    layer.reset()
    assert layer.get_seq_length() == 0
    new = states(3, 1, torch.bfloat16)  # of another dtype
    assert same(layer.update(*new)[0], rounded(new[0])) and same(kept(layer), rounded(new[0]))


READS = {
    "sum": lambda keys: keys.sum(2),
    "product": lambda keys: keys @ keys.mT,
    "heads repeated": lambda keys: keys[:, :, None].expand(2, 3, 2, 9, DIM).reshape(2, 6, 9, DIM),
    "channels": lambda keys: keys[..., 3:5],
    "mask": lambda keys: keys[keys > 0],
    "concatenated": lambda keys: torch.cat([keys, keys[:, :, :2]], dim=2),
    "stacked": lambda keys: torch.stack([keys, keys]),
    "dtype": lambda keys: keys.to(torch.float64),
    "number": lambda keys: torch.tensor(keys[0, 1, 2, 3].item()),
    "numpy": lambda keys: torch.from_numpy(keys.float().mul(1).numpy()),
    "slice": lambda keys: keys[:, 1:, 2:-1] * 1,
    "one": lambda keys: keys[0, -1] + 0,
    "index_select": lambda keys: keys.index_select(1, torch.tensor([2, 0])) + 0,
    "columns": lambda keys: keys.index_select(3, torch.tensor([2, 0])),
    "repeated columns": lambda keys: keys.repeat_interleave(2, dim=-1),
    "clone": lambda keys: keys.clone() + 0,
    "chunks": lambda keys: torch.cat(keys.chunk(2, dim=3), dim=2),
    "transposed": lambda keys: keys.transpose(1, 2).contiguous(),
    "attention": lambda keys: torch.nn.functional.scaled_dot_product_attention(keys, keys, keys),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_anybody_reads_the_values(read: str, dtype: torch.dtype) -> None:
    layer = DynamicLayer()
    served(layer)
    new = states(9, 0, dtype)
    layer.update(*new)
    found, expected = READS[read](kept(layer)), READS[read](rounded(new[0]))
    assert type(found) is torch.Tensor and torch.equal(found, expected)
    assert type(layer.keys) is torch.Tensor and torch.equal(READS[read](layer.keys), expected)


def test_one_row_at_an_odd_address_is_read() -> None:
    rows = quantize_kv(torch.randn(1, 1, 9, 5))
    for row in range(9):
        one = Int8KVTensor(rows, torch.float32)[:, :, row : row + 1]
        assert torch.equal(one + 0, dequantized(rows, torch.float32)[:, :, row : row + 1])


def test_reading_values_is_counted() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(9, 0))
    before = sum(int8_layers.counter.fallbacks.values())
    kept(layer)[:, :, 1:].clone()  # whole rows
    assert sum(int8_layers.counter.fallbacks.values()) == before
    kept(layer).sum()
    assert sum(int8_layers.counter.fallbacks.values()) == before + 1
    assert "values read by aten.sum.default" in int8_layers.counter.fallbacks


def test_what_is_written_to_values_is_kept() -> None:
    layer = DynamicLayer()
    served(layer)
    new = states(9, 0)
    layer.update(*new)
    expected = rounded(rounded(new[0]).mul_(2))
    kept(layer).mul_(2)
    assert same(kept(layer), expected)
    kept(layer).zero_()
    assert not (kept(layer) != 0).any()
    assert same(kept(layer, "values"), rounded(new[1]))


@pytest.mark.parametrize(
    "index",
    [
        ...,
        0,
        slice(None),
        (slice(None), 0),
        (..., slice(2, 5), slice(None)),
        (0, 1, 3),
        (..., 4),
        (..., slice(3)),
    ],
    ids=str,
)
def test_what_is_assigned_to_a_part_is_kept(index: Any) -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(9, 0))
    before = kept(layer).clone().dequantized_kv()
    expected = before.clone()
    expected[index] = 2 * before[index]
    kept(layer)[index] = 2 * before[index]
    assert same(kept(layer), rounded(expected))
    expected = kept(layer).clone().dequantized_kv()
    expected[index] = 0
    kept(layer)[index] = 0
    assert same(kept(layer), rounded(expected))


def test_values_that_somebody_puts_there_are_kept_until_more_come() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(9, 0))
    other = torch.randn(2, 3, 5, DIM)
    layer.keys, layer.values = other, other.clone()
    assert layer.keys is other
    new = states(1, 1)
    keys, _ = layer.update(*new)
    assert same(keys, torch.cat([rounded(other), rounded(new[0])], dim=2))


def test_two_layers_that_share_what_they_keep_go_different_ways() -> None:
    first, second = DynamicLayer(), DynamicLayer()
    served(first, second)
    first.update(*states(20, 0))
    second.update(*states(1, 0))
    second.keys, second.values = first.keys, first.values
    a, b = states(1, 1), states(1, 2)
    ends = [layer.update(*new)[0][:, :, 20:] for layer, new in ((first, a), (second, b))]
    assert same(ends[0], rounded(a[0])) and same(ends[1], rounded(b[0]))


def test_what_somebody_holds_is_never_written_again() -> None:
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(20, step))
    held = kept(layer)
    expected = held.dequantized_kv()
    layer.crop(-10)
    layer.update(*states(5, 1))
    assert same(held, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_copies_keep_integers_and_are_the_originals(copied: Any) -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(20, 0))
    expected = kept(layer).dequantized_kv()
    other = copied(layer)
    assert (
        type(other) is DynamicLayer
        and buffers.BUFFERS not in vars(other)
        and same(vars(other)["keys"], expected)
    )
    served(other)  # as when the model goes on with it
    new, mine = states(1, 1), states(1, 2)
    assert same(other.update(*new)[0], torch.cat([expected, rounded(new[0])], dim=2))
    assert same(layer.update(*mine)[0], torch.cat([expected, rounded(mine[0])], dim=2))


def test_a_copy_goes_on_where_nothing_is_served() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(20, 0))
    other, new = copy.deepcopy(layer), states(1, 1)
    found = other.update(*new)[0]
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.cat([kept(layer).dequantized_kv(), new[0]], dim=2))


def test_pickles_hold_values() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(20, 0))
    other = pickle.loads(pickle.dumps(layer))
    assert type(other) is DynamicLayer and type(other.keys) is torch.Tensor
    assert torch.equal(other.keys, layer.keys)
    assert not any(name.startswith("_liteboost") for name in vars(other))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).values, layer.values)


def test_undo_gives_values_back() -> None:
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(20, 0))
    expected = kept(layer).dequantized_kv()
    bind.restore_all()
    assert type(layer) is DynamicLayer and type(layer.keys) is torch.Tensor
    assert torch.equal(layer.keys, expected)
    assert not any(name.startswith("_liteboost") for name in vars(layer))


def test_in_grad_mode_the_original_runs() -> None:
    layer = DynamicLayer()
    served(layer)
    first, second, third = (states(4, seed) for seed in range(3))
    layer.update(*first)
    with torch.enable_grad():
        keys, _ = layer.update(second[0].requires_grad_(), second[1])
    assert type(keys) is torch.Tensor and keys.requires_grad
    expected = torch.cat([rounded(first[0]), second[0].detach()], dim=2)
    assert torch.equal(keys, expected) and int8_layers.counter.fallbacks["grad mode"]
    keys, _ = layer.update(*third)
    assert same(keys, torch.cat([rounded(expected), rounded(third[0])], dim=2))


def test_a_cache_that_another_model_has_begun_becomes_one_of_integers() -> None:
    layer, new = DynamicLayer(), states(20, 0)
    cache = DynamicCache()
    cache.layers = [layer]
    receiver = bind.appending(None, CallCounter())
    receiver(cache, None)
    layer.update(*new)
    assert torch.equal(layer.keys, new[0])
    receiver(cache, caller)
    one = states(1, 1)
    assert same(layer.update(*one)[0], torch.cat([rounded(new[0]), rounded(one[0])], dim=2))
    receiver(cache, None)  # and stays one
    other = states(1, 2)
    assert type(layer.update(*other)[0]) is Int8KVTensor


def test_layers_that_cannot_say_why() -> None:
    class Own(DynamicLayer):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            self.keys, self.values = key_states, value_states
            return key_states, value_states

    own, new = Own(), states(3, 0)
    cache = served(own)
    assert type(own) is Own and own.update(*new)[0] is new[0]
    served(own)
    static = StaticCache(config=_config(), max_cache_len=8)
    bind.appending(None, CallCounter())(static, caller)
    assert all(type(layer).__name__.startswith("Static") for layer in static.layers)
    rows = [row for row in liteboost_adaptor.status().rules if row.id == int8_layers.RULE]
    refused = {target: row.reason for row in rows for target in row.where if row.state == "refused"}
    assert all(reason == "it does not append to what it keeps" for reason in refused.values())
    assert any("Own" in target for target in refused) and any("StaticLayer" in target for target in refused)
    assert cache.layers == [own]


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=2)
