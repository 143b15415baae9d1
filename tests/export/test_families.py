"""Folders of every kind of model give the tokens that `generate` gives, over 200 of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import runner, tiny_models

import liteboost_adaptor
from liteboost_adaptor.export.folder import export_folder, export_model

pytestmark = pytest.mark.full

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
LONGEST, NEW = 720, 200
LENGTHS = (1, 17, 500)
FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_oss", "mixtral"),
    *("qwen3_next", "deepseek_v3"),
)
SCHEMES = ("w8a16", "w4a16", "w8a8", "w4a8", "kv8", "w4a16+kv8")


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    """Models are prepared, and the quantizer is registered, whatever a test before this one has undone."""
    with liteboost_adaptor.patched(level=2):
        yield


def agree(model: torch.nn.Module, folder: Path) -> None:
    for length in LENGTHS:
        prompt = runner.prompt(model, length)
        assert runner.tokens(folder, prompt, NEW) == runner.generated(model, prompt, NEW), length


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    model.config.max_position_embeddings = 1024
    liteboost_adaptor.apply(model, level=2)
    export_model(model, None, tmp_path / "folder", LONGEST)
    agree(model, tmp_path / "folder")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_bfloat16(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family).bfloat16()
    model.config.max_position_embeddings = 1024
    liteboost_adaptor.apply(model, level=2)
    export_model(model, None, tmp_path / "folder", LONGEST)
    agree(model, tmp_path / "folder")


@pytest.fixture
def trained() -> Callable[[str], torch.nn.Module]:
    from transformers import AutoModelForCausalLM

    from liteboost_adaptor.quantization import LiteBoostConfig

    def load(scheme: str) -> torch.nn.Module:
        options = {"quantization_config": LiteBoostConfig(scheme)} if scheme else {}
        return AutoModelForCausalLM.from_pretrained(TRAINED, **options)

    return load


@pytest.mark.parametrize("scheme", ["", *SCHEMES])
def test_the_trained_model(scheme: str, trained: Callable[[str], torch.nn.Module], tmp_path: Path) -> None:
    done = export_folder(TRAINED, tmp_path / "folder", scheme or None)
    assert done.longest == 1024
    agree(trained(scheme), tmp_path / "folder")


def test_threads_give_the_same(trained: Callable[[str], torch.nn.Module], tmp_path: Path) -> None:
    export_folder(TRAINED, tmp_path / "folder", longest=64)
    prompt = runner.prompt(trained(""), 17)
    assert runner.tokens(tmp_path / "folder", prompt, 40, "--threads", "2") == runner.tokens(
        tmp_path / "folder", prompt, 40
    )
