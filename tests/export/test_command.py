"""``export MODEL DIR``: what it writes, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import runner, tiny_models
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.quantization import LiteBoostConfig


@pytest.fixture(autouse=True)
def _level_2() -> Iterator[None]:
    liteboost_adaptor.apply(level=2)
    yield
    liteboost_adaptor.undo()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_models.build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("options", "scheme"),
    [([], ""), (["--quant", "w8a16", "--kv8"], "w8a16+kv8")],
    ids=["as it is", "quantized"],
)
def test_the_folder_gives_the_tokens_of_the_model(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], scheme: str
) -> None:
    target = tmp_path / "folder"
    common = ["--max-tokens", "24", "--dtype", "float32"]
    assert cli.main(["export", str(source), str(target), *common, *options]) == 0
    said, steps = (" ".join(text.split()) for text in capsys.readouterr())
    size = sum(each.stat().st_size for each in target.rglob("*") if each.is_file())
    assert f"folder: {size / 1e6:,.1f} MB, " in said and "sequences of up to 24 tokens" in said
    assert steps.startswith("loading the model ") and steps.endswith("writing the folder")
    assert "recording a prompt of 1 recording " in steps and "recording one token behind 1 " in steps
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    quantized = {"quantization_config": LiteBoostConfig(scheme)} if scheme else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **quantized)
    prompt = runner.prompt(model, 7)
    assert runner.tokens(target, prompt, 17) == runner.generated(model, prompt, 17)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (b"no tensors", "model cannot be read: Error while deserializing header"),
        (None, "Error no file named"),
    ],
    ids=["damaged", "missing"],
)
def test_a_model_that_cannot_be_read_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: bytes | None, words: str
) -> None:
    (source / "model.safetensors").unlink()
    if weights is not None:
        (source / "model.safetensors").write_bytes(weights)
    target = tmp_path / "folder"
    assert cli.main(["export", str(source), str(target), "--dtype", "float32"]) == 1
    assert words in " ".join(capsys.readouterr().err.split()) and not target.exists()


def test_a_folder_that_holds_something_is_left_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert cli.main(["export", str(source), str(target)]) == 1
    assert "is not empty; name a new folder" in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in target.iterdir()] == ["notes.txt"]
