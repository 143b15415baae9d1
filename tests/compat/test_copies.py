"""Copies, pickles and checkpoints of a served model are those of the original."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path

import pytest
import torch
from support import numbers, processes, tiny_models
from torch import nn

import liteboost_adaptor


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny_models.example_inputs(model)).logits


def originals_only(model: nn.Module) -> bool:
    return not any("__liteboost__" in vars(type(part)) for part in model.modules())


def bound(family: str = "llama") -> tuple[nn.Module, torch.Tensor]:
    model = tiny_models.build(family)
    expected = run(model)
    liteboost_adaptor.apply(model)
    run(model)
    return model, expected


def deep(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def old_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model, protocol=0))


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("way", [deep, pickled, old_pickle, saved])
def test_copies_are_originals_with_the_same_numbers(way, family: str) -> None:
    model, expected = bound(family)
    twin = way(model)
    assert originals_only(twin)
    assert not originals_only(model)
    liteboost_adaptor.undo()
    assert torch.equal(run(twin), expected)
    assert [type(part) for part in twin.modules()] == [type(part) for part in model.modules()]


def test_a_copy_of_a_part() -> None:
    model, _ = bound()
    layer = copy.deepcopy(model.model.layers[0])
    shallow = copy.copy(model.model.norm)
    assert originals_only(layer) and originals_only(shallow)
    assert shallow.weight is model.model.norm.weight


def test_a_pickle_loads_where_we_are_not(tmp_path: Path) -> None:
    model, expected = bound()
    torch.save(model, tmp_path / "model.pt")
    torch.save(expected, tmp_path / "expected.pt")
    script = """
import json, sys, torch
sys.modules["liteboost_adaptor"] = None
from support import tiny_models
model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
expected = torch.load(sys.argv[1] + "/expected.pt")
with torch.no_grad():
    found = model(**tiny_models.example_inputs(model)).logits
print(json.dumps(torch.equal(found, expected)))
"""
    assert processes.python_json(script, str(tmp_path)) is True


def test_state_dict_is_the_originals() -> None:
    reference = tiny_models.build("llama").state_dict()
    model, _ = bound()
    found = model.state_dict()
    assert list(found) == list(reference)
    assert all(torch.equal(found[name], reference[name]) for name in reference)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in tiny_models.build("llama").named_parameters()
    ]
    model.load_state_dict(tiny_models.build("llama", seed=3).state_dict())
    expected = run(tiny_models.build("llama", seed=3))
    assert numbers.relative(run(model), expected) <= 2e-5


def test_saved_files_are_the_same_bytes(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "without")
    model, expected = bound()
    model.save_pretrained(tmp_path / "with")
    names = sorted(file.name for file in (tmp_path / "without").iterdir())
    assert sorted(file.name for file in (tmp_path / "with").iterdir()) == names
    for name in names:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes(), name
    again = type(tiny_models.build("llama")).from_pretrained(tmp_path / "with").eval()
    assert torch.equal(run(again), expected)


def test_weights_assigned_moved_or_resized_count() -> None:
    model, _ = bound()
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data * 2
    model.resize_token_embeddings(300)
    model.load_state_dict(model.state_dict(), assign=True)
    model.to(torch.bfloat16)
    model.float()
    found = run(model)
    liteboost_adaptor.undo()
    assert numbers.relative(found, run(model)) <= 2e-5


def test_signatures_names_and_types_are_the_originals() -> None:
    reference = tiny_models.build("llama")
    model, _ = bound()
    for ours, original in zip(model.modules(), reference.modules(), strict=True):
        assert isinstance(ours, type(original))
        assert repr(type(ours)) == repr(type(original))
        assert inspect.signature(ours.forward) == inspect.signature(original.forward)
        assert type(ours).forward.__doc__ == type(original).forward.__doc__
        assert (type(ours) is nn.Linear) == (type(original) is nn.Linear)
    assert repr(model) == repr(reference)


def test_clone_by_config_and_class() -> None:
    """``type(model)(config)`` and ``type(model).from_pretrained`` are how programs make twins."""
    model, expected = bound()
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    liteboost_adaptor.undo()
    assert originals_only(twin)
    assert torch.equal(run(twin), expected)
