"""Level 2: cache layers append in place, and nobody can tell but by the clock and the memory."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from support import tiny_models
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import liteboost_adaptor
from liteboost_adaptor.kv_cache import bind, buffers
from liteboost_adaptor.kv_cache import layers as cache_layers
from liteboost_adaptor.report import CallCounter

WINDOW = 8


@pytest.fixture(autouse=True)
def _restored():
    with torch.no_grad():
        yield
    bind.restore_all()


def served(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    bind.appending(None, CallCounter())(cache)
    return cache


def states(count: int, seed: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, count, 5, generator=generator, **options) for _ in range(2))


def kept(layer: Any, name: str = "keys") -> torch.Tensor:
    """What a layer keeps, as it lies in its memory: who reads the attribute gets a tensor of its own."""
    return vars(layer)[name]


def address(layer: Any) -> int:
    """Where the memory of what a layer keeps begins; to ask the storage for it would be a write."""
    return torch._C._data_address(kept(layer))


def layer_kinds() -> list[Any]:
    return [DynamicLayer, lambda: DynamicSlidingWindowLayer(WINDOW)]


@pytest.mark.parametrize("make", layer_kinds(), ids=["full", "sliding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_returned_and_kept_is_what_the_original_returns_and_keeps(make: Any, dtype: torch.dtype):
    ours, theirs = make(), make()
    served(ours)
    assert type(ours) is type(theirs)
    for step, count in enumerate([5, 1, 1, 1, 3, *[1] * 300, 40, 1]):
        new = states(count, step, dtype=dtype)
        for found, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(kept(ours), theirs.keys) and torch.equal(kept(ours, "values"), theirs.values)
        if step % 50 == 7:
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


@pytest.mark.parametrize("make", layer_kinds(), ids=["full", "sliding"])
def test_what_is_kept_is_not_copied_for_a_token(make: Any):
    layer = make()
    served(layer)
    layer.update(*states(600, 0))
    moved, before = 0, address(layer)
    for step in range(600):
        layer.update(*states(1, step))
        moved += address(layer) != before
        before = address(layer)
    # 601 positions have room for 300 more, and those 901 for 450; a window is moved once in 128 tokens.
    assert moved <= (3 if make is DynamicLayer else 6)


@pytest.mark.parametrize("make", layer_kinds(), ids=["full", "sliding"])
def test_memory_is_that_of_what_is_kept_and_half_as_much_again(make: Any):
    layer = make()
    served(layer)
    layer.update(*states(5000, 0))
    assert kept(layer).untyped_storage().nbytes() == 2 * 3 * 5000 * 5 * 4, "a prompt has no room of its own"
    for step in range(3):
        layer.update(*states(1, step))
    least = kept(layer).shape[2] + 1
    assert kept(layer).untyped_storage().nbytes() <= 2 * 3 * 5 * 4 * (least + max(128, least // 2))
    if make is DynamicLayer:
        layer.crop(-4900)
        layer.update(*states(1, 1))
        assert kept(layer).untyped_storage().nbytes() <= 2 * 3 * 5 * 4 * 2 * (104 + 128)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
def test_exchanged_tensors_leave_no_memory_behind(change: str):
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(2000, step))
    room = weakref.ref(vars(layer)[buffers.BUFFERS]["keys"])
    getattr(layer, change)(torch.tensor([1, 0]))
    assert room() is None
    for step in range(3):  # as beam search goes on: nothing is kept twice
        layer.update(*states(1, step))
        getattr(layer, change)(torch.tensor([1, 0]))
        assert not any(
            isinstance(room, buffers.KVBuffer) for room in vars(layer).get(buffers.BUFFERS, {}).values()
        )


def test_versions_of_tensors_handed_out_do_not_count_later_tokens():
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(4, step))
    keys = layer.keys
    expected = keys.sum((0, 1, 2))
    with torch.enable_grad():
        weight = torch.ones(5, requires_grad=True)
        product = (keys * weight).sum()
        with torch.no_grad():
            layer.update(*states(1, 9))
        product.backward()
        layer.keys[:, :, 0] = weight  # no view made without gradients
    assert torch.allclose(weight.grad, expected)


def test_nothing_of_other_memory_is_behind_what_is_kept():
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(4, step))
    whole = torch.empty(0).set_(kept(layer).untyped_storage())
    assert whole.numel() > kept(layer).numel() and whole.isfinite().all()
    assert whole.count_nonzero() == kept(layer).numel()


def test_tensors_without_elements_keep_their_length():
    for shape in ((0, 3, 4, 5), (2, 3, 4, 0)):
        ours, theirs = DynamicLayer(), DynamicLayer()
        served(ours)
        for layer in (ours, theirs):
            for count in (4, 1, 1):
                new = torch.zeros(*shape[:2], count, shape[3])
                layer.update(new, new)
        assert ours.keys.shape == theirs.keys.shape


def test_a_layer_with_the_memory_of_another_writes_into_its_own():
    first = DynamicLayer()
    served(first)
    for step in range(3):
        first.update(*states(4, step))
    second = object.__new__(type(first))
    vars(second).update(vars(first))
    a, b = states(1, 7), states(1, 8)
    one, other = first.update(*a)[0], second.update(*b)[0]
    assert torch.equal(one[:, :, 12:], a[0]) and torch.equal(other[:, :, 12:], b[0])


class Unhashable(DynamicLayer):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None


def test_layers_without_a_hash_are_served_and_restored():
    one, other = Unhashable(), Unhashable()
    served(one, other)
    assert cache_layers.served(one) is not None and cache_layers.served(other) is not None
    bind.restore_all()
    assert cache_layers.served(one) is None and cache_layers.served(other) is None


def test_what_somebody_set_on_the_class_since_is_left_and_said(monkeypatch: pytest.MonkeyPatch):
    layer, before = DynamicLayer(), dict(vars(DynamicLayer))
    served(layer)
    monkeypatch.setattr(DynamicLayer, "update", theirs := lambda self, *states: states)
    left = bind.restore_all()
    assert left == ["DynamicLayer.update was patched by someone else since; theirs is left"]
    assert DynamicLayer.update is theirs
    monkeypatch.undo()
    DynamicLayer.update = before["update"]
    assert dict(vars(DynamicLayer)) == before


def test_undo_gives_classes_what_they_had():
    before = [dict(vars(cls)) for cls in (DynamicLayer, DynamicSlidingWindowLayer)]
    served(DynamicLayer(), DynamicSlidingWindowLayer(WINDOW))
    assert "keys" in vars(DynamicLayer)
    assert bind.restore_all() == []
    assert [dict(vars(cls)) for cls in (DynamicLayer, DynamicSlidingWindowLayer)] == before


def test_layers_of_a_class_that_nobody_asked_for_run_the_original():
    served(DynamicLayer())
    layer = DynamicLayer()
    layer.update(*states(5, 0))
    layer.update(*states(1, 1))
    assert layer.keys is kept(layer) and not any(name.startswith("_liteboost") for name in vars(layer))
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_a_later_patch_of_what_else_a_layer_does_acts(monkeypatch: pytest.MonkeyPatch):
    layer = DynamicLayer()
    served(layer)
    monkeypatch.setattr(DynamicLayer, "reset", lambda self: "theirs")
    assert layer.reset() == "theirs"


def test_generate_appends_in_place_and_counts_it():
    model = tiny_models.build("llama")
    inputs = torch.arange(6).view(1, 6) % model.config.vocab_size
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    liteboost_adaptor.apply(model, level=1)
    plain = model.generate(inputs, **options)
    assert type(plain.past_key_values.layers[0]) is DynamicLayer
    liteboost_adaptor.apply(model, level=2)
    before = next(row for row in liteboost_adaptor.status().rules if row.id == "cache.append").calls
    found = model.generate(inputs, **options)
    row = next(row for row in liteboost_adaptor.status().rules if row.id == "cache.append")
    assert torch.equal(found.sequences, plain.sequences)
    assert row.state == "applied" and row.calls - before == 12 * 2 * model.config.num_hidden_layers
    assert liteboost_adaptor.status().caches_bytes > 0
    for ours, theirs in zip(found.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert kept(ours).untyped_storage().nbytes() > kept(ours).nbytes
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)


def test_a_cropped_layer_goes_on_in_its_memory_if_nobody_else_sees_it():
    ours, theirs = DynamicLayer(), DynamicLayer()
    served(ours)
    for layer in (ours, theirs):
        layer.update(*states(20, 0))
        layer.update(*states(1, 0))
    memory = address(ours)
    for step in range(5):
        for layer in (ours, theirs):
            layer.update(*states(4, step))
            layer.crop(-3)
            layer.update(*states(2, step + 10))
        assert torch.equal(kept(ours), theirs.keys)
    assert address(ours) == memory


@pytest.mark.parametrize("holder", ["tensor", "kept", "view", "layer", "storage", "storage object"])
def test_what_somebody_holds_is_never_written_again(holder: str):
    layer = DynamicLayer()
    served(layer)
    for step in range(3):
        layer.update(*states(20, step))
    other = DynamicLayer()
    other.__dict__.update(layer.__dict__)
    held = {
        "tensor": lambda layer, _: layer.keys,
        "kept": lambda layer, _: kept(layer),
        "view": lambda layer, _: kept(layer)[:, 1:, 15:],
        "layer": lambda _, other: kept(other),
        "storage": lambda layer, _: torch.empty(0).set_(kept(layer).untyped_storage(), 0, (900,), (1,)),
        "storage object": lambda layer, _: kept(layer).untyped_storage(),
    }[holder](layer, other)
    del other
    expected = held.clone()
    layer.crop(-10)
    layer.update(*states(5, 1))
    assert list(held) == list(expected) if holder == "storage object" else torch.equal(held, expected)


def test_layers_that_share_what_they_keep_go_different_ways():
    first, second = DynamicLayer(), DynamicLayer()
    served(first, second)
    first.update(*states(20, 0))
    second.update(*states(1, 0))
    second.keys, second.values = first.keys, first.values
    copied = copy.copy(first)
    a, b, c = states(1, 1), states(1, 2), states(1, 3)
    ends = [layer.update(*new)[0][:, :, 20:] for layer, new in ((first, a), (second, b), (copied, c))]
    assert all(torch.equal(end, new[0]) for end, new in zip(ends, (a, b, c), strict=True))
    assert torch.equal(first.keys[:, :, 20:], a[0]) and torch.equal(second.keys[:, :, 20:], b[0])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
def test_copies_are_the_originals_and_hold_what_is_kept_only(copied: Any):
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(20, 0))
    other = copied(layer)
    assert type(other) is DynamicLayer and buffers.BUFFERS not in vars(other)
    assert other.keys.untyped_storage().nbytes() == other.keys.nbytes
    assert torch.equal(other.keys, layer.keys)
    other.update(*states(1, 1))
    layer.update(*states(1, 2))
    assert torch.equal(layer.keys[:, :, :20], other.keys[:, :, :20])
    assert not torch.equal(layer.keys, other.keys)


def test_a_saved_cache_is_as_large_as_the_originals():
    sizes = []
    for serve in (False, True):
        layer = DynamicLayer()
        if serve:
            served(layer)
        layer.update(*states(20, 0))
        file = io.BytesIO()
        torch.save(layer, file)
        sizes.append(file.tell())
    assert abs(sizes[0] - sizes[1]) < 200


def test_recorded_windows_and_their_crops():
    ours, theirs = (DynamicSlidingWindowLayer(WINDOW) for _ in range(2))
    if not hasattr(ours, "activate_past_recording"):
        pytest.skip("this transformers does not record windows")
    served(ours)
    for layer in (ours, theirs):
        layer.activate_past_recording()
        layer.update(*states(11, 0))
        layer.crop(0)
    for step in range(30):
        new = states(4, step)
        for found, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(found, expected)
        for layer in (ours, theirs):
            layer.crop(-(step % 4))
        assert torch.equal(ours.keys, theirs.keys)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([1])),
        lambda layer: layer.crop(-7),
        lambda layer: layer.offload(),
        lambda layer: layer.reset(),
        lambda layer: setattr(layer, "keys", layer.keys.flip(2)),
        lambda layer: layer.keys.mul_(2),
    ],
    ids=["reorder", "repeat", "select", "crop", "offload", "reset", "assign", "write"],
)
def test_what_others_do_to_a_layer_is_seen(change: Any):
    ours, theirs = DynamicLayer(), DynamicLayer()
    served(ours)
    for layer in (ours, theirs):
        layer.update(*states(20, 0))
        change(layer)
    batch = 2 if ours.keys is None else ours.keys.shape[0]
    for step in range(3):
        new = [tensor[:1].expand(batch, -1, -1, -1) for tensor in states(2, step)]
        for found, expected in zip(ours.update(*new), theirs.update(*new), strict=True):
            assert torch.equal(found, expected)


def test_layers_that_keep_something_else_let_go_of_their_memory():
    for change in (lambda layer: layer.reset(), lambda layer: setattr(layer, "keys", layer.keys + 1)):
        layer = DynamicLayer()
        served(layer)
        layer.update(*states(20, 0))
        layer.update(*states(1, 0))
        assert buffers.BUFFERS in vars(layer)
        change(layer)
        assert "keys" not in vars(layer).get(buffers.BUFFERS, {})


def test_inference_mode_and_no_grad_may_take_turns():
    ours, theirs = DynamicLayer(), DynamicLayer()
    served(ours)
    for number, (fills, reads) in enumerate([(True, True), (True, False), (False, True), (False, False)]):
        for token in range(4):
            for layer in (ours, theirs):
                with torch.inference_mode() if fills ^ (token == 1) else torch.no_grad():
                    layer.update(*states(1, 10 * number + token))
        assert buffers.BUFFERS in vars(ours)
        with torch.inference_mode() if reads else torch.no_grad():  # where it is read has no say
            assert ours.keys.is_inference() == theirs.keys.is_inference() == fills
    assert torch.equal(ours.keys, theirs.keys)


def test_in_grad_mode_gradients_flow_as_in_the_original():
    gradients = []
    for serve in (False, True):
        layer = DynamicLayer()
        if serve:
            served(layer)
        layer.update(*states(5, 0))
        with torch.enable_grad():
            keys, values = (tensor.requires_grad_() for tensor in states(2, 1))
            layer.update(keys, values)
            (layer.keys * layer.values).sum().backward()
        gradients.append(keys.grad)
    assert torch.equal(*gradients)


def test_a_layer_that_is_not_served_gets_nothing_of_ours():
    layer = DynamicLayer()
    served(layer)
    with torch.enable_grad():
        layer.update(*states(5, 0))
    assert buffers.BUFFERS not in vars(layer)


@pytest.mark.parametrize(
    "fault",
    [
        lambda new: (new[0].double(), new[1].double()),
        lambda new: (new[0][:1], new[1][:1]),
        lambda new: (new[0][..., :4], new[1]),
        lambda new: (new[0][0], new[1][0]),
    ],
    ids=["dtype", "batch", "head size", "dimensions"],
)
def test_what_does_not_fit_ends_as_in_the_original(fault: Any):
    def outcome(layer: Any) -> Any:
        layer.update(*states(5, 0))
        try:
            return [part.dtype for part in layer.update(*fault(states(2, 1)))]
        except RuntimeError as error:
            return str(error)

    ours = DynamicLayer()
    served(ours)
    assert outcome(ours) == outcome(DynamicLayer())


def test_restored_layers_are_what_they_were():
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(5, 0))
    layer.update(*states(1, 0))
    held = layer.keys
    bind.restore_all()
    assert type(layer) is DynamicLayer and layer.keys is held and layer.values.is_contiguous()
    plain = DynamicLayer()
    plain.update(*states(5, 0))
    assert vars(layer).keys() == vars(plain).keys()


def test_undo_leaves_nothing_of_ours_on_the_layers_of_living_caches():
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=2)
    inputs = torch.arange(6).view(1, 6)
    cache = model(inputs, past_key_values=DynamicCache(config=model.config)).past_key_values
    assert all(cache_layers.served(layer) and type(layer) is DynamicLayer for layer in cache.layers)
    liteboost_adaptor.undo()
    assert not any(cache_layers.served(layer) for layer in cache.layers)
    assert not any(name.startswith("_liteboost") for layer in cache.layers for name in vars(layer))


def test_a_patch_that_comes_later_acts(monkeypatch: pytest.MonkeyPatch):
    layer = DynamicLayer()
    served(layer)
    layer.update(*states(5, 0))
    monkeypatch.setattr(DynamicLayer, "update", lambda self, keys, values: "theirs")
    assert layer.update(*states(1, 1)) == "theirs"


@pytest.mark.parametrize("name", ["update", "keys", "__getstate__"])
def test_what_of_ours_somebody_puts_back_after_an_undo_is_known(name: str):
    """Who patched a class after us found ours there, and puts that back, whenever they are done."""
    served(DynamicLayer())
    bind.restore_all()
    before = dict(vars(DynamicLayer))
    served(DynamicLayer())
    found = vars(DynamicLayer)[name]
    setattr(DynamicLayer, name, lambda self, *states: states)
    assert len(bind.restore_all()) == 1
    setattr(DynamicLayer, name, found)
    ours, theirs = DynamicLayer(), DynamicSlidingWindowLayer(1000)
    served(ours)
    for step, count in enumerate([5, 1, 1]):
        ours.update(*states(count, step))
        theirs.update(*states(count, step))
    assert cache_layers.served(ours) is not None
    assert ours.__dict__[buffers.BUFFERS] and vars(DynamicLayer)["update"] is not before["update"]
    assert torch.equal(ours.keys, theirs.keys) and ours.keys.is_contiguous()
    assert bind.restore_all() == []
    assert dict(vars(DynamicLayer)) == before
