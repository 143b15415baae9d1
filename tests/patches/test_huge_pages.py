"""Weights that are moved to huge pages: which, when, and that nobody else can tell."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM, LlamaConfig

import liteboost_adaptor
from liteboost_adaptor.huggingface import caching_allocator, huge_pages

pytestmark = pytest.mark.skipif(not huge_pages._kernel_has_them(), reason="this kernel has no huge pages")

#: One layer whose MLP and head are large enough, and whose attention is not.
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=2100,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2200,
    tie_word_embeddings=True,
)
MOVED = {
    "model.embed_tokens.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(made)
    return made


@pytest.fixture
def active() -> Iterator[None]:
    """Models are served as they are loaded, at level 2."""
    with liteboost_adaptor.patched(level=2):
        yield


def _row() -> dict:
    rules = liteboost_adaptor.status().to_dict()["rules"]
    return next(rule for rule in rules if rule["id"] == huge_pages.RULE)


def _moved(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.data_ptr() in huge_pages._held}


def test_large_weights_move_and_stay_what_they_are(folder: Path, tmp_path: Path) -> None:
    with liteboost_adaptor.patched(level=1):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert _moved(model) == set()
    before = dict(model.named_parameters())
    liteboost_adaptor.apply(model, level=2)
    assert _moved(model) == MOVED
    assert _row()["state"] == "applied"
    assert all(before[name] is weight for name, weight in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(dict(model.named_parameters())[name].data_ptr() % huge_pages.PAGE == 0 for name in MOVED)

    saved = load_file(folder / "model.safetensors")
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    save_model(model, tmp_path / "model.st")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(before["model.embed_tokens.weight"], tmp_path / "one.pt")
    whole = sum(weight.nbytes for weight in before.values())
    assert (tmp_path / "model.st").stat().st_size < whole + 10_000
    assert (tmp_path / "model.pt").stat().st_size < whole + 20_000
    read = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(saved[name], read[name]) for name in saved)

    liteboost_adaptor.undo(model)
    assert _row()["state"] != "applied"
    assert _moved(model) == MOVED  # nothing about them is to be taken back
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def test_another_binding_moves_nothing_again(active: None, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    where = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert _moved(model) == MOVED
    liteboost_adaptor.apply(model, level=2, disable="norm.*")
    assert where == {name: weight.data_ptr() for name, weight in model.named_parameters()}


def test_what_lies_on_huge_pages_already_is_not_moved(active: None) -> None:
    """Memory that is kept when it is freed lies there: to move out of it would keep the weights twice."""
    first = AutoModelForCausalLM.from_config(CONFIG)
    liteboost_adaptor.apply(first, level=2)  # so that freed memory is kept
    before = len(huge_pages._held)
    second = AutoModelForCausalLM.from_config(CONFIG)
    liteboost_adaptor.apply(second, level=2)
    large = [weight for weight in second.parameters() if weight.nbytes >= huge_pages.LEAST]
    assert len(large) == len(MOVED) and _row()["state"] == "applied"
    assert len(huge_pages._held) == before
    for weight in large:
        assert caching_allocator.is_deleter(torch.ops.liteboost._deleter_of(weight))
        assert weight.data_ptr() % huge_pages.PAGE == 0
    del first


def test_their_memory_goes_with_them(active: None, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    gc.collect()
    held = len(huge_pages._held)
    model.lm_head.weight.data = torch.zeros(1)
    assert len(huge_pages._held) == held - 1
    del model
    gc.collect()
    assert len(huge_pages._held) == held - len(MOVED)


def test_what_somebody_else_holds_stays(folder: Path) -> None:
    with liteboost_adaptor.patched(level=1):
        model = AutoModelForCausalLM.from_pretrained(folder)
    held = {name: tensor for name, tensor in model.state_dict().items() if "up_proj" in name}
    model.model.layers[0].mlp.gate_proj.weight.share_memory_()
    liteboost_adaptor.apply(model, level=2)
    assert _moved(model) == {name for name in MOVED if "up_proj" not in name and "gate_proj" not in name}
    next(iter(held.values())).zero_()
    assert not model.model.layers[0].mlp.up_proj.weight.any()


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("kind", ["untyped", "typed"])
def test_a_weight_whose_storage_somebody_holds_stays(kind: str, folder: Path) -> None:
    with liteboost_adaptor.patched(level=1):
        model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.model.layers[0].mlp.up_proj.weight
    held = weight.untyped_storage() if kind == "untyped" else weight.data.storage()
    liteboost_adaptor.apply(model, level=2)
    assert _moved(model) == {name for name in MOVED if "up_proj" not in name}
    held.fill_(0)
    assert not weight.any()
    del held
    liteboost_adaptor.apply(model, level=2)
    assert _moved(model) == MOVED


def test_a_write_to_mapped_memory_is_not_lost(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with liteboost_adaptor.patched(level=1):
        model = AutoModelForCausalLM.from_config(CONFIG).eval()
    with safe_open(folder / "model.safetensors", "pt") as file:
        mine, other = file.get_tensor(name), file.get_tensor(name)  # two storages over one mapping
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(mine)
    del mine
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = 77.0
    assert other[3, 5] == 77.0
    liteboost_adaptor.apply(model, level=2)
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.data_ptr() in huge_pages._held
    assert weight[3, 5] == 77.0 and other[3, 5] == 77.0 and torch.equal(weight.data, other)


def test_pages_of_the_file_leave_the_process(folder: Path, tmp_path: Path) -> None:
    # Of 64 MiB, so that other memory of the process does not matter.
    save_file({"large": torch.ones(1 << 24), "small": torch.ones(4)}, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        large, small = file.get_tensor("large"), file.get_tensor("small")
    assert large.sum() == large.numel()
    before = _resident_file_pages()
    copy = huge_pages.moved(large)
    huge_pages._let_go(large)
    assert _resident_file_pages() < before - (60 << 20)
    assert torch.equal(copy, large) and small.sum() == 4  # read from the file again


def _resident_file_pages() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))


@pytest.mark.parametrize("settings", [{"level": 1}, {"disable": "weights.*"}])
def test_nothing_moves_unless_asked_for(folder: Path, settings: dict) -> None:
    with liteboost_adaptor.patched(**settings):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert _moved(model) == set()


def test_nothing_moves_where_memory_is_short(
    active: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "available_bytes", lambda: huge_pages.SPARE + 1000)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert _moved(model) == set()
    assert "memory is short" in str(liteboost_adaptor.status(full=True))


def test_logits_are_the_same_bits(active: None, folder: Path) -> None:
    ids = torch.randint(0, 2200, (2, 9))
    with torch.no_grad():
        there = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        with liteboost_adaptor.patched(disable="weights.huge_pages"):
            here = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.equal(there, here)


def _lent(kind: str, folder: Path) -> tuple[torch.Tensor, Callable[[], None]]:
    """Memory that somebody else has lent to a tensor, and what writes there without it."""
    shape = (CONFIG.intermediate_size, CONFIG.hidden_size)
    if kind == "numpy":
        array = numpy.ones(shape, numpy.float32)
        return torch.from_numpy(array), lambda: array.fill(7)
    if kind == "buffer":
        memory = bytearray(numpy.ones(shape, numpy.float32).tobytes())
        seven = numpy.full(shape, 7, numpy.float32).tobytes()
        tensor = torch.frombuffer(memory, dtype=torch.float32).view(shape)
        return tensor, lambda: memory.__setitem__(slice(None), seven)
    if kind == "dlpack":
        array = numpy.ones(shape, numpy.float32)
        return torch.from_dlpack(array), lambda: array.fill(7)
    path = folder / "weights.safetensors"  # a name alone says nothing
    numpy.ones(shape, numpy.float32).tofile(path)
    array = numpy.memmap(path, mode="c" if kind == "private map" else "r+", dtype=numpy.float32, shape=shape)
    return torch.from_numpy(array), lambda: array.fill(7)


@pytest.mark.parametrize("kind", ["numpy", "buffer", "dlpack", "map", "private map"])
@pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict"])
def test_what_somebody_has_lent_stays(kind: str, how: str, tmp_path: Path) -> None:
    with liteboost_adaptor.patched(level=1):
        model = AutoModelForCausalLM.from_config(CONFIG).eval()
    layer, (tensor, write) = model.model.layers[0].mlp.up_proj, _lent(kind, tmp_path)
    if how == "parameter":
        layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
    elif how == "data":
        layer.weight.data = tensor
    else:
        layer.load_state_dict({"weight": tensor}, assign=True)
    del tensor
    gc.collect()
    liteboost_adaptor.apply(model, level=2)
    assert "model.layers.0.mlp.up_proj.weight" not in _moved(model)
    assert "model.layers.0.mlp.gate_proj.weight" in _moved(model)
    write()
    assert bool((layer.weight == 7).all())
