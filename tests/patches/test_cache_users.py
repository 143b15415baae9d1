"""Users keep, save, edit and exchange what a cache holds while a model decodes: all as without the package.

Two copies of a model, one of them served, see the same calls and the same user. What the user saved is
compared at every step, and so are the logits.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from support import tiny_models
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import liteboost_adaptor
from liteboost_adaptor.kv_cache import bind
from liteboost_adaptor.program import step

#: A window of 8 tokens in every second layer of "gemma2"; none in "llama".
FAMILIES = ("llama", "gemma2")


class User:
    """Decodes with one model, and does things to its caches on the way.

    Attributes:
        saved: Tensors that were taken out of caches.
        seen: What is to be compared.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.saved, self.seen, self.count = model, [], [], 0
        self.batch = 2
        self.cache = DynamicCache(config=model.config)
        self.other = DynamicCache(config=model.config)
        self.decode(self.cache, 6)
        self.decode(self.other, 6)
        self.tokens(2)

    @property
    def layer(self) -> Any:
        return self.cache.layers[self.count % len(self.cache.layers)]

    def decode(self, cache: Any, length: int) -> None:
        """One call with ``length`` tokens behind what is in ``cache``."""
        start = cache.get_seq_length()
        ids = torch.arange(start, start + length).mul(7).add(3) % self.model.config.vocab_size
        ids = ids.expand(self.batch, -1)
        with torch.no_grad():
            result = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        self.seen.append(result.logits)

    def tokens(self, count: int) -> None:
        for _ in range(count):
            start = self.cache.get_seq_length()
            ids = torch.full((self.batch, 1), (start * 7 + 3) % self.model.config.vocab_size)
            with torch.no_grad():
                self.seen.append(self.model(input_ids=ids, past_key_values=self.cache).logits)

    def look(self) -> None:
        """What was saved, as it is now."""
        self.seen += [tensor.clone() for tensor in self.saved]


def _saves(user: User) -> None:
    user.saved += [user.layer.keys, user.layer.values]


def _saves_all(user: User) -> None:
    for keys, values, *_ in user.cache:
        user.saved += [keys, values]


def _saves_part(user: User) -> None:
    user.saved.append(user.layer.keys[:, 1:, 2:])


def _writes(user: User) -> None:
    user.layer.keys[:, :, 0] = 0.25
    user.layer.values.mul_(1.5)


def _writes_below_autograd(user: User) -> None:
    user.layer.values.data.mul_(0.5)


def _writes_to_saved(user: User) -> None:
    if user.saved:
        user.saved[user.count % len(user.saved)].neg_()


def _writes_transposed(user: User) -> None:
    user.layer.keys.transpose(1, 2)[:, 1].fill_(0.5)


def _writes_by_numpy(user: User) -> None:
    user.layer.values.numpy()[..., 0, :] = 0.125


def _views(user: User) -> None:
    if not isinstance(user.layer, DynamicSlidingWindowLayer):  # a view of a window in the original
        user.seen.append(user.layer.keys.view(1, -1).sum())
        user.layer.keys.view(-1)[:3] = 0.5


def _is_the_same_object(user: User) -> None:
    assert user.layer.keys is user.layer.keys
    assert type(user.layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _saves_to_safetensors(user: User) -> None:
    read = load(save({"keys": user.layer.keys.contiguous(), "values": user.layer.values.contiguous()}))
    user.seen += [read["keys"], read["values"]]


def _saves_to_file(user: User) -> None:
    file = io.BytesIO()
    torch.save((user.layer.keys, user.layer.values), file)
    file.seek(0)
    user.seen += torch.load(file)


def _pickles(user: User) -> None:
    user.cache.layers[0] = pickle.loads(pickle.dumps(user.cache.layers[0]))


def _copies_deeply(user: User) -> None:
    user.cache = copy.deepcopy(user.cache)


def _copies_a_layer(user: User) -> None:
    other = copy.copy(user.layer)
    user.saved.append(other.keys)
    other.keys.add_(0.125)


def _crops(user: User) -> None:
    if user.cache.get_seq_length() < 8:  # a window may be cropped before it is full
        user.cache.crop(-1)


def _reorders(user: User) -> None:
    user.cache.reorder_cache(torch.arange(user.batch).flip(0))


def _repeats_rows(user: User) -> None:
    if user.batch < 8:
        user.cache.batch_repeat_interleave(2)
        user.batch *= 2


def _selects_rows(user: User) -> None:
    user.cache.batch_select_indices(torch.tensor([1, 0]))
    user.batch = 2


def _saves_as_kept(user: User) -> None:
    user.saved += [vars(user.layer)["keys"], vars(user.layer)["values"][:, :, 1:]]


def _writes_as_kept(user: User) -> None:
    vars(user.layer)["keys"].mul_(0.75)
    vars(user.layer)["values"][:, :, -2:] = 0.25


def _assigns(user: User) -> None:
    user.layer.keys = user.layer.keys * 0.5


def _assigns_saved(user: User) -> None:
    layer = user.cache.layers[0]
    held = layer.keys
    user.tokens(1)
    layer.keys = torch.cat([held, layer.keys[:, :, -1:]], dim=2)[:, :, -layer.keys.shape[2] :]


def _swaps_layers(user: User) -> None:
    user.other = copy.deepcopy(user.cache)
    user.tokens(1)
    user.decode(user.other, 1)
    user.cache.layers[0], user.other.layers[0] = user.other.layers[0], user.cache.layers[0]


def _shares_a_prefix(user: User) -> None:
    user.other = copy.deepcopy(user.cache)
    for mine, theirs in zip(user.cache.layers, user.other.layers, strict=True):
        theirs.keys, theirs.values = mine.keys, mine.values
    user.decode(user.other, 1)
    user.other.layers[0].keys.mul_(2)
    user.decode(user.other, 2)


def _reads_in_inference_mode(user: User) -> None:
    with torch.inference_mode():
        user.seen.append(user.layer.keys.sum())


def _appends_alone(user: User) -> None:
    cache = DynamicCache()
    new = torch.ones_like(user.layer.keys[:, :, -1:])
    for _ in range(3):
        keys, _ = cache.update(user.layer.keys, user.layer.values, 0)
        user.saved.append(keys)
        cache.update(new, new, 0)
    keys.zero_()


ACTS: list[Callable[[User], None]] = [
    _saves,
    _saves_all,
    _saves_part,
    _writes,
    _writes_below_autograd,
    _writes_to_saved,
    _writes_transposed,
    _writes_by_numpy,
    _views,
    _is_the_same_object,
    _saves_to_safetensors,
    _saves_to_file,
    _pickles,
    _copies_deeply,
    _copies_a_layer,
    _crops,
    _reorders,
    _repeats_rows,
    _selects_rows,
    _saves_as_kept,
    _writes_as_kept,
    _assigns,
    _assigns_saved,
    _swaps_layers,
    _shares_a_prefix,
    _reads_in_inference_mode,
    _appends_alone,
]
NAMES = [act.__name__ for act in ACTS]
#: Without those that look behind the attributes.
OF_INTEGERS = [name for name in NAMES if not name.endswith("_as_kept")]


def outcome(model: torch.nn.Module, names: tuple[str, ...], tokens: int) -> list[torch.Tensor]:
    user = User(model)
    acts = {act.__name__: act for act in ACTS}
    for name in names:
        acts[name](user)
        user.look()
        user.tokens(tokens)
        user.count += 1
        user.look()
    for layer in user.cache.layers:
        user.seen += [layer.keys, layer.values]
    return user.seen


def compare(models: Any, names: tuple[str, ...], tokens: int) -> None:
    original, ours, tolerance = models
    expected, found = outcome(original, names, tokens), outcome(ours, names, tokens)
    assert len(expected) == len(found)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape and one.dtype == other.dtype, (names, at)
        distance = (one - other).norm() / other.norm().clamp_min(1e-3)
        assert distance <= tolerance, (names, at, float(distance))


def _pair(family: str, **options: Any) -> Iterator[Any]:
    original = tiny_models.build(family).eval()
    ours = copy.deepcopy(original)
    tolerance = 1e-3
    liteboost_adaptor.apply(ours, **options)
    if "quant" in options:
        tolerance = 0.1  # keys and values of eight bits
    liteboost_adaptor.undo(original)
    yield original, ours, tolerance
    liteboost_adaptor.undo(ours)
    bind.restore_all()


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _pair(request.param, level=2)


@pytest.fixture(scope="module", params=FAMILIES)
def integers(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from _pair(request.param, level=2, quant="kv8")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as soon as they may be."""
    monkeypatch.setattr(step, "RECORDED_AT", 3)


@pytest.mark.parametrize("act", NAMES)
def test_each_act_while_decoding(models: Any, act: str) -> None:
    compare(models, ("_saves", act, "_writes", act), 2)


@pytest.mark.parametrize("act", OF_INTEGERS)
def test_each_act_with_integers(integers: Any, act: str) -> None:
    compare(integers, ("_saves", act), 2)


@pytest.mark.parametrize("act", NAMES)
def test_each_act_between_recorded_steps(models: Any, act: str, recorded: None) -> None:
    compare(models, ("_saves_all", act, "_writes_to_saved", act), 5)


composed = st.lists(st.sampled_from(NAMES), min_size=3, max_size=8).map(tuple)
composed_of_integers = st.lists(st.sampled_from(OF_INTEGERS), min_size=3, max_size=8).map(tuple)
patient = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(patient, max_examples=8)
@given(names=composed, tokens=st.integers(1, 4))
def test_composed_acts(models: Any, recorded: None, names: tuple[str, ...], tokens: int) -> None:
    compare(models, names, tokens)


@pytest.mark.full
@settings(patient, max_examples=500)
@given(names=composed, tokens=st.integers(1, 6))
def test_many_composed_acts(models: Any, recorded: None, names: tuple[str, ...], tokens: int) -> None:
    compare(models, names, tokens)


@pytest.mark.full
@settings(patient, max_examples=300)
@given(names=composed_of_integers, tokens=st.integers(1, 4))
def test_many_composed_acts_with_integers(
    integers: Any, recorded: None, names: tuple[str, ...], tokens: int
) -> None:
    compare(integers, names, tokens)


def test_a_cache_is_saved_by_safetensors(models: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    user = User(models[1])
    user.tokens(3)
    for at, layer in enumerate(user.cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            continue  # a view of longer tensors in the original, too
        kept = {"keys": layer.keys, "values": layer.values}
        save_file(kept, tmp_path / f"{at}.safetensors")
        read = load_file(tmp_path / f"{at}.safetensors")
        assert all(torch.equal(kept[name], read[name]) for name in kept)


def test_recorded_steps_go_on_after_somebody_has_written(recorded: None) -> None:
    for original, ours, _ in _pair("llama", level=2):  # none of whose steps were recorded before
        users = User(original), User(ours)
        for user in users:
            user.tokens(10)
            served = _served()
            user.layer.keys.mul_(0.5)
            user.tokens(12)
        assert _served() - served >= 4
        assert torch.allclose(users[0].seen[-1], users[1].seen[-1], atol=1e-3)


def test_what_an_attention_of_the_users_own_keeps_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given what ``update`` returns, before any attribute is read."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kept: list[torch.Tensor] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key.shape[2] % 4 == 0:
            key.mul_(0.9)
        kept.append(key)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "of_a_user", attention)
    seen = []
    for original, ours, _ in _pair("llama", level=2):
        for model in (original, ours):
            model.set_attn_implementation("of_a_user")
            kept.clear()
            user = User(model)
            user.tokens(12)
            kept[-3].zero_()
            user.tokens(3)
            seen.append([*(each.clone() for each in kept), *user.seen])
    for found, expected in zip(*seen, strict=True):
        assert torch.allclose(found, expected, atol=1e-3)


def _served() -> int:
    rows = liteboost_adaptor.status().to_dict()["rules"]
    return sum(row["calls"] for row in rows if row["id"].startswith("step"))
