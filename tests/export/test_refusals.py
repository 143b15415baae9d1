"""What cannot be exported is refused, with the function or setting and the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.errors import ExportError
from liteboost_adaptor.export import lengths, recorded, recording
from liteboost_adaptor.export.folder import export_folder, export_model
from liteboost_adaptor.export.generation import settings


@pytest.fixture
def model() -> Iterator[Any]:
    made = tiny_models.build("llama")
    liteboost_adaptor.apply(made, level=2)
    yield made
    liteboost_adaptor.undo()


def refusal(model: torch.nn.Module, folder: Path, longest: int = 8) -> str:
    with pytest.raises(ExportError) as refused:
        export_model(model, None, folder / "folder", longest)
    assert not (folder / "folder").exists()
    return str(refused.value)


def test_settings_of_generation_that_the_runner_does_not_know(model: Any, tmp_path: Path) -> None:
    model.generation_config.no_repeat_ngram_size = 2
    said = refusal(model, tmp_path)
    assert "no_repeat_ngram_size" in said and "repetition_penalty" in said


def test_settings_of_generation_that_it_does(model: Any) -> None:
    config = model.generation_config
    config.update(do_sample=True, top_k=7, temperature=0.5, eos_token_id=[3, 4])
    assert settings(config) == {
        "stop": [3, 4],
        "sample": True,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }


def test_operators_that_a_runner_has_not(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = recorded.recorded

    def with_a_sum(*arguments: Any) -> Any:
        made = original(*arguments)
        line = "op liteboost_parallel::all_reduce_ default 1 0 t 0 -> 0"
        return dataclasses.replace(made, text=f"{made.text}\n{line}")

    monkeypatch.setattr(recording, "recorded", with_a_sum)
    said = refusal(model, tmp_path)
    assert "liteboost_parallel::all_reduce_.default" in said and "one process" in said


def test_a_model_that_is_not_served_at_level_2(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=1)
    assert "LITEBOOST_LEVEL" in refusal(model, tmp_path)
    liteboost_adaptor.undo()


def test_more_tokens_than_the_model_has_positions(model: Any, tmp_path: Path) -> None:
    assert "--max-tokens must be from 2 to 256" in refusal(model, tmp_path, 257)


def in_the_way(values: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """A forward of a layer that does something else first."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        values(x)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    return forward


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (lambda x: x.sum().item() > 0, "reads values (aten._local_scalar_dense"),
        (lambda x: bool((x.sum() > 0).all()), "decides by a value of a tensor"),
        (lambda x: torch.rand(1), "draws random numbers"),
    ],
    ids=["reads a value", "decides by one", "draws"],
)
def test_a_forward_that_no_program_can_do(values: Any, words: str, tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__ = type("Odd", (type(layer),), {"forward": in_the_way(values)})
    liteboost_adaptor.apply(model, level=2)
    said = refusal(model, tmp_path)
    assert (
        "LlamaForCausalLM cannot be exported: its forward for a prompt of 1 tokens" in said and words in said
    )
    liteboost_adaptor.undo()


def test_a_cache_that_is_otherwise_behind_a_prompt() -> None:
    class Made:
        def __init__(self, sizes: int) -> None:
            self._sizes = sizes

        def values(self, *_: Any) -> list[int]:
            return []

        def after(self, state: Any, _: list[int]) -> Any:
            return {"0.keys": (1, state.get("0.keys", (1, 0))[1] + self._sizes)}

    def record(seen: int, count: int) -> Any:
        return Made(2 if seen else 1), {"0.keys": (1, 1)} if seen else {}

    with pytest.raises(ExportError, match=r"keeps 0.keys otherwise behind a prompt of 2 tokens"):
        lengths.tables(record, 4)


def test_a_decoder_beside_an_encoder(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        **{"vocab_size": 60, "d_model": 32, "max_position_embeddings": 40},
        **{f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    liteboost_adaptor.apply(model, level=2)
    assert "has an encoder" in refusal(model, tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "T5Config"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "cannot be read"),
    ],
    ids=["no decoder alone", "a word for a number"],
)
def test_folders_that_hold_no_such_model(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ExportError, match=words):
        export_folder(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
