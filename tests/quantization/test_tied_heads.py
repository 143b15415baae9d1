"""Heads tied by a setting that means more than that: encoder-decoders, and heads with a tied bias."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from support import numbers

import liteboost_adaptor
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear, offline, quantize_model

_T5 = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
_BERT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
#: Class of the model: its configuration.
MODELS = {
    "BartForConditionalGeneration": transformers.BartConfig(**_BART),
    "BertForMaskedLM": transformers.BertConfig(**_BERT),
    "T5ForConditionalGeneration": transformers.T5Config(**_T5),
    "UMT5ForConditionalGeneration": transformers.UMT5Config(**_T5),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, name)(copy.deepcopy(MODELS[name])).eval()  # quantizing notes itself there


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(5, 29).view(2, 12)
    also = {"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **also).logits


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same_after_quantizing_and_after_loading(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = logits(model)
    quantize_model(model, LiteBoostConfig("w8a16"))
    assert any(isinstance(layer, QuantizedLinear) for layer in model.modules())
    found = logits(model)
    assert numbers.relative(found, expected) < 0.1
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert numbers.relative(logits(again), found) < 1e-6


def llava() -> torch.nn.Module:
    """Tied by the configuration of the whole, while that of its language model says it is not."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=96, tie_word_embeddings=False, **sizes),
        vision_config=transformers.CLIPVisionConfig(image_size=16, patch_size=8, **sizes),
        tie_word_embeddings=True,
        image_token_index=95,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("head", [8, 16])
@pytest.mark.parametrize("name", [*MODELS, "Llava"])
def test_a_checkpoint_quantized_offline_computes_the_same(name: str, head: int, tmp_path: Path) -> None:
    model = llava() if name == "Llava" else build(name)
    expected = logits(model)
    model.save_pretrained(tmp_path / "plain")
    offline.quantize_folder(tmp_path / "plain", tmp_path / "new", LiteBoostConfig("w8a16", head=head))
    again = type(model).from_pretrained(tmp_path / "new").eval()
    assert any(isinstance(layer, QuantizedLinear) for layer in again.modules())
    assert numbers.relative(logits(again), expected) < 0.1


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "UMT5ForConditionalGeneration"])
def test_the_head_stays_tied_and_the_status_says_so(name: str) -> None:
    model = build(name)
    quantize_model(model, LiteBoostConfig("w8a16"))
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    rows = [row for row in liteboost_adaptor.status().rules if row.id == "quantization"]
    assert any("it is tied, and" in row.reason for row in rows)


def test_a_class_that_computes_by_the_setting_keeps_its_head() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            if self.config.tie_word_embeddings:
                result.logits = result.logits * 0.125
            return result

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Scaled(transformers.LlamaConfig(vocab_size=96, tie_word_embeddings=True, **sizes)).eval()
    expected = logits(model)
    quantize_model(model, LiteBoostConfig("w8a16"))
    assert not isinstance(model.lm_head, QuantizedLinear)
    assert numbers.relative(logits(model), expected) < 0.1
