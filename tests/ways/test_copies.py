"""Copies of a served model: deep copies, pickles, checkpoints; and tables that grow."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from support import calls, numbers, tiny_models
from support.ways import FAMILIES, compare, families
from torch import nn

import liteboost_adaptor


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**tiny_models.example_inputs(model)).logits


def with_deepcopy(model: nn.Module, folder: Path) -> nn.Module:
    return copy.deepcopy(model)


def with_an_old_pickle(model: nn.Module, folder: Path) -> nn.Module:
    return pickle.loads(pickle.dumps(model, protocol=0))


def with_torch_save(model: nn.Module, folder: Path) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def with_save_pretrained(model: nn.Module, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


@pytest.mark.parametrize("way", [with_deepcopy, with_an_old_pickle, with_torch_save, with_save_pretrained])
@families(*FAMILIES)
def test_a_copy_is_an_original_and_is_served_in_its_turn(
    family: str, way: Callable[[nn.Module, Path], nn.Module], level: int, tmp_path: Path
) -> None:
    model = tiny_models.build(family)
    expected = logits(model)
    classes = [type(part) for part in model.modules()]
    liteboost_adaptor.apply(model, level=level)
    ours = logits(model)
    twin = way(model, tmp_path)
    assert [type(part) for part in twin.modules()] == classes
    assert [type(part) for part in model.modules()] != classes
    assert torch.equal(logits(model), ours)
    assert torch.equal(logits(twin), expected)
    liteboost_adaptor.undo(model)
    runs = compare(twin, level, lambda: logits(twin))
    assert torch.equal(runs.found, ours)
    assert runs.served.kinds["norm"] > 0 and runs.reasons == set()


@pytest.mark.parametrize("protocol", [0, 2, 5])
@families("llama", "gpt2", "gpt_oss", "deepseek_v3", "mamba2")
def test_classes_of_a_served_model_pickle_as_the_originals(family: str, protocol: int, level: int) -> None:
    model = tiny_models.build(family)
    classes = [type(part) for part in model.modules()]
    liteboost_adaptor.apply(model, level=level)
    served = [type(part) for part in model.modules()]
    assert served != classes
    text = pickle.dumps(served, protocol=protocol)
    assert b"liteboost" not in text
    assert pickle.loads(text) == classes


@families("llama", "gpt2", "gpt_oss", "deepseek_v3", "mamba2")
def test_a_deep_copy_of_an_offloaded_model_holds_originals(family: str, level: int) -> None:
    """accelerate's hooks hold bound methods; those of the copy are the original class's."""
    model = tiny_models.build(family)
    expected = logits(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    twin = copy.deepcopy(model)
    with calls.served() as served:
        assert torch.equal(logits(twin), expected)
    assert served.rules == {}
    runs = compare(twin, level, lambda: logits(twin))
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0


@families(*FAMILIES)
def test_a_checkpoint_is_served_as_it_is_loaded(family: str, level: int, tmp_path: Path) -> None:
    original = tiny_models.build(family)
    expected = logits(original)
    original.save_pretrained(tmp_path)
    liteboost_adaptor.apply(level=level)
    model = type(original).from_pretrained(tmp_path).eval()
    with calls.served() as served:
        found = logits(model)
    assert numbers.relative(found, expected) <= 2e-5 and served.kinds["norm"] > 0
    liteboost_adaptor.undo()
    assert torch.equal(logits(model), expected)


@families(*FAMILIES)
def test_resize_token_embeddings(family: str, level: int) -> None:
    """The head is another module afterwards: its new rows count."""
    reference, model = tiny_models.build(family), tiny_models.build(family)
    liteboost_adaptor.apply(model, level=level)
    logits(model)
    for each in (reference, model):
        torch.manual_seed(1)
        each.resize_token_embeddings(277)
    expected = logits(reference)
    with calls.served() as served:
        found = logits(model)
    assert found.shape[-1] == 277
    assert numbers.relative(found, expected) <= 2e-5
    assert served.kinds["linear"] > 0
    liteboost_adaptor.undo(model)
    assert torch.equal(logits(model), expected)


def served_llama() -> tuple[nn.Module, torch.Tensor]:
    """A served model that ran, and the original's logits."""
    model = tiny_models.build("llama")
    expected = logits(model)
    liteboost_adaptor.apply(model)
    logits(model)
    return model, expected


def originals_only(model: nn.Module) -> bool:
    return not any("__liteboost__" in vars(type(part)) for part in model.modules())


def test_a_copy_of_a_part() -> None:
    model, _ = served_llama()
    layer = copy.deepcopy(model.model.layers[0])
    shallow = copy.copy(model.model.norm)
    assert originals_only(layer) and originals_only(shallow)
    assert shallow.weight is model.model.norm.weight


def test_state_dict_is_the_originals() -> None:
    reference, other = tiny_models.build("llama"), tiny_models.build("llama", seed=3)
    model, _ = served_llama()
    found = model.state_dict()
    assert list(found) == list(reference.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]
    model.load_state_dict(other.state_dict())
    assert numbers.relative(logits(model), logits(other)) <= 2e-5


def test_weights_assigned_moved_or_resized_count() -> None:
    model, _ = served_llama()
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data * 2
    model.resize_token_embeddings(300)
    model.load_state_dict(model.state_dict(), assign=True)
    model.to(torch.bfloat16)
    model.float()
    found = logits(model)
    liteboost_adaptor.undo()
    assert numbers.relative(found, logits(model)) <= 2e-5


def test_signatures_names_and_types_are_the_originals() -> None:
    reference = tiny_models.build("llama")
    model, _ = served_llama()
    for ours, original in zip(model.modules(), reference.modules(), strict=True):
        assert isinstance(ours, type(original))
        assert repr(type(ours)) == repr(type(original))
        assert inspect.signature(ours.forward) == inspect.signature(original.forward)
        assert type(ours).forward.__doc__ == type(original).forward.__doc__
        assert (type(ours) is nn.Linear) == (type(original) is nn.Linear)
    assert repr(model) == repr(reference)


def test_clone_by_config_and_class() -> None:
    """``type(model)(config)`` and ``type(model).from_pretrained`` are how programs make twins."""
    model, expected = served_llama()
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    liteboost_adaptor.undo()
    assert originals_only(twin)
    assert torch.equal(logits(twin), expected)
