"""Encoder-decoders over two ranks: logits and texts of one process, also where modules share a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parallel import ranks
from parallel.jobs_encoder_decoder import outputs

import liteboost_adaptor
from liteboost_adaptor.parallel.tensor import layout

pytestmark = pytest.mark.usefixtures("native_only")

_BART: dict[str, Any] = {
    **{"vocab_size": 256, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2},
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64},
    **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None},
}
_T5: dict[str, Any] = {
    **{"vocab_size": 256, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2},
    **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", _BART),
    "bart scaled": ("BartForConditionalGeneration", _BART | {"scale_embedding": True}),
    "bart untied": ("BartForConditionalGeneration", _BART | {"tie_word_embeddings": False}),
    "marian": ("MarianMTModel", _BART),
    "m2m_100": ("M2M100ForConditionalGeneration", _BART),
    "mbart": ("MBartForConditionalGeneration", _BART),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5 untied": ("T5ForConditionalGeneration", _T5 | {"tie_word_embeddings": False}),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
    "longt5": ("LongT5ForConditionalGeneration", _T5 | {"local_radius": 5}),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
}


def build(name: str) -> Any:
    cls = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    return cls(cls.config_class(**MODELS[name][1])).eval()


def test_two_ranks_give_what_one_process_gives(tmp_path: Path) -> None:
    liteboost_adaptor.undo()
    for name in MODELS:
        model = build(name)
        for parameter in model.parameters():  # of the size of those of trained models
            parameter.data.normal_(std=0.3)
        model.save_pretrained(tmp_path / name)
        # Positions of some are no part of a checkpoint.
        logits, text = outputs(type(model).from_pretrained(tmp_path / name, dtype=torch.float32).eval())
        torch.save({"logits": logits, "text": text}, tmp_path / f"{name}.pt")
    for found in ranks.run(2, "parallel.jobs_encoder_decoder:loaded", str(tmp_path), list(MODELS)):
        for name, each in found.items():
            assert each["sharded"], name
            assert each["distance"] <= 1e-5 and each["same text"], (name, each)
        assert found["bart"]["vocabulary"]  # not replicated in place of sharded


@pytest.mark.parametrize("name", MODELS)
def test_every_embedding_with_a_sharded_weight_knows_its_rows(name: str) -> None:
    model = build(name)
    found = layout.infer_layout(model)
    holders = [
        each
        for each, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and f"{each}.weight" in found.shardings
    ]
    assert holders and all(found.roles[each] == "embedding" for each in holders)
