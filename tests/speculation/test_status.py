"""Settings, the rows of the status, what is taken back."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from support import state, tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor import config, rule_ids
from liteboost_adaptor.errors import ConfigError
from liteboost_adaptor.huggingface import speculation

from .speculating import RULE, Counts, repeating, rows, served_here, text


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


@pytest.mark.parametrize("value", ["", "  ", "off", "OFF", "0"])
def test_off(value: str) -> None:
    assert config.read({"LITEBOOST_SPECULATE": value}).speculate == ""


def test_lookup_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.read({"LITEBOOST_SPECULATE": " Lookup "}).speculate == "lookup"
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    assert config.read({"LITEBOOST_SPECULATE": tmp_path.name}).speculate == str(tmp_path)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "draft"
    with pytest.raises(ConfigError) as caught:
        config.read({"LITEBOOST_SPECULATE": str(missing)})
    said = str(caught.value)
    assert "LITEBOOST_SPECULATE must be off, lookup, or a folder with a draft model" in said
    assert f"no such folder: {missing}" in said and "Change or unset it." in said
    with pytest.raises(ConfigError, match="no model in that folder"):
        config.read({"LITEBOOST_SPECULATE": str(tmp_path)})
    with pytest.raises(ConfigError, match="speculate must be"):
        liteboost_adaptor.apply(speculate="lokup")


def test_off_by_default(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama)
    counts = Counts()
    text(llama, repeating())
    assert not rows() and not counts.served and not counts.reasons
    assert "_sample" not in vars(type(llama))


@served_here
def test_rows(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    (row,) = rows()
    assert (row.state, row.targets, row.where) == ("applied", 1, ["LlamaForCausalLM"])
    assert row.title == "Several candidates are checked in a step (LITEBOOST_SPECULATE)"
    before = row.calls
    text(llama, repeating())
    text(llama, repeating(), max_new_tokens=4)
    status = liteboost_adaptor.status()
    (row,) = rows()
    assert row.calls == before + 1 and row.fallbacks["fewer than 16 new tokens"]
    assert any(
        note.startswith("Speculation: ") and "candidates were accepted" in note for note in status.environment
    )
    assert "generate" in str(status)


def test_levels_and_disabling(llama: nn.Module) -> None:
    for more, reason in (
        ({"level": 1}, "needs level 2, level 1 is set"),
        ({"disable": "generate.*"}, "turned off by LITEBOOST_DISABLE=generate.*"),
    ):
        liteboost_adaptor.apply(llama, speculate="lookup", **more)
        assert [(row.state, row.reason) for row in rows()] == [("disabled", reason)]
        assert "_sample" not in vars(type(llama))
        counts = Counts()
        text(llama, repeating())
        assert not counts.served and not counts.reasons
    assert RULE in rule_ids.all_ids()


@served_here
def test_undo_leaves_nothing() -> None:
    model = tiny_models.build("llama", seed=1)
    expected = text(model, repeating())
    before = state.Snapshot(model)
    liteboost_adaptor.apply(model, speculate="lookup")
    assert "_sample" in vars(type(model))
    counts = Counts()
    assert torch.equal(text(model, repeating()), expected) and counts.served == 1
    assert liteboost_adaptor.undo() == []
    assert not before.differences() and not rows()
    assert torch.equal(text(model, repeating()), expected) and counts.served == 1


@served_here
def test_other_models_of_the_class_do_not_speculate(llama: nn.Module) -> None:
    other = tiny_models.build("llama", seed=2)
    liteboost_adaptor.apply(llama, speculate="lookup")
    liteboost_adaptor.apply(other)
    counts = Counts()
    text(other, repeating())
    assert not counts.served and not counts.reasons
    text(llama, repeating())
    assert counts.served == 1


def test_copies_and_pickles_are_of_the_original(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup")
    for made in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        assert "_sample" not in vars(type(made))


@served_here
def test_models_that_are_loaded_speculate(llama: nn.Module, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    liteboost_adaptor.apply(speculate="lookup")
    loaded = type(llama).from_pretrained(tmp_path)
    counts = Counts()
    text(loaded, repeating())
    assert counts.served == 1


def test_a_sampler_of_somebody_else_wins(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.utils import GenerationMixin

    liteboost_adaptor.apply(llama, speculate="lookup")
    calls = []
    cls = type(llama).__bases__[0]
    original = GenerationMixin._sample

    def theirs(self: object, *args: object, **kwargs: object) -> object:
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "_sample", theirs, raising=False)
    counts = Counts()
    text(llama, repeating())
    assert calls == [1] and counts.reasons == {"the model samples in code of its own": 1}


def test_a_model_that_no_rule_serves_as_a_whole(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, speculate="lookup", disable="*.*")
    assert [row.state for row in rows()] == ["disabled"]
    liteboost_adaptor.apply(llama, speculate="lookup", disable="step.*")
    assert [(row.state, row.reason) for row in rows()] in (
        [("refused", "no rule serves the model as a whole")],
        [("applied", "")],
    )
    assert speculation.LEVEL == 2
