"""Every script of everyday use, shortened: it gives the same with us, and we serve calls of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import liteboost_adaptor
from liteboost_adaptor.bench.everyday import decoding, inputs, models, runner, tasks
from liteboost_adaptor.bench.everyday.script import numbers_of
from liteboost_adaptor.bench.everyday.scripts import SCRIPTS
from liteboost_adaptor.report import report

#: How configurations name their numbers of layers. One layer will do, but of a script that names all twelve.
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("everyday")


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    liteboost_adaptor.undo()


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens, texts and batches than are timed; more than it takes until steps are recorded."""
    generate, texts, embeddings = decoding._generate, tasks._texts, tasks._embeddings
    tokens = {"max_new_tokens": 24}
    monkeypatch.setattr(decoding, "_generate", lambda folder, **how: generate(folder, **how | tokens))
    monkeypatch.setattr(tasks, "_texts", lambda count: texts(min(count, 6)))
    monkeypatch.setattr(
        tasks, "_embeddings", lambda folder, batches, rows: embeddings(folder, min(batches, 4), rows)
    )


def folder_of(script: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of a script, with as few layers as it needs."""
    name = SCRIPTS[script].model
    if script == "offload":
        return models.folder_of(name, workdir / "whole")
    for each, (family, cls, values) in models.MODELS.items():
        fewer = {key: 1 if key in LAYERS else value for key, value in values.items()}
        monkeypatch.setitem(models.MODELS, each, (family, cls, fewer))
    monkeypatch.setattr(models, "_TEXT", models.MODELS["decoder"][2])
    return models.folder_of(name, workdir)


def served() -> int:
    return sum(counter.calls for counter in report.counters.values())


@pytest.mark.usefixtures("native_only", "shortened")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_same_with_us(name: str, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(name, workdir, monkeypatch)
    liteboost_adaptor.undo()
    before = served()
    expected = [float(each) for each in SCRIPTS[name].run(folder)]
    assert served() == before and expected and all(map(math.isfinite, expected))
    liteboost_adaptor.apply(level=2)
    runner._compare(name, expected, [float(each) for each in SCRIPTS[name].run(folder)])
    assert served() > before


def test_a_model_is_written_once_and_whole(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("short", workdir, monkeypatch)
    assert sorted(each.name for each in folder.parent.iterdir() if "unfinished" in each.name) == []
    monkeypatch.setattr(models, "_built", lambda *_: pytest.fail("the model was built again"))
    assert models.folder_of("decoder", folder.parent) == folder
    assert inputs.decoder(folder).generation_config.eos_token_id is None


def test_texts_are_words_of_the_tokenizer() -> None:
    text = inputs.words(9, seed=3)
    assert text != inputs.words(9, seed=4) and len(text.split()) == 9
    ids = inputs.tokenizer()(text)["input_ids"]
    assert ids == numbers_of(text) and min(ids) >= inputs.FIRST and max(ids) < inputs.VOCAB
    chat = inputs.tokenizer().apply_chat_template([{"role": "user", "content": text}], return_dict=True)
    assert chat["input_ids"] == [1, *ids]
