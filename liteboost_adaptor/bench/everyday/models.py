"""Small random models, each saved once with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..models import randomise
from .inputs import VOCAB, tokenizer

_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SPEECH = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "num_mel_bins": 80,
    "max_source_positions": 150,
    "max_target_positions": 448,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _encoder(hidden_size: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": VOCAB,
    }


#: name -> (model type, class, configuration).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decoder": ("llama", "AutoModelForCausalLM", _TEXT),
    "encoder-decoder": (
        "t5",
        "AutoModelForSeq2SeqLM",
        {"d_model": 256, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_heads": 8, "vocab_size": VOCAB}
        | {"pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0},
    ),
    "minilm": ("bert", "AutoModel", _encoder(384, 6, 12)),
    "narrow": ("bert", "AutoModel", _encoder(128, 2, 2)),
    "classifier": (
        "distilbert",
        "AutoModelForSequenceClassification",
        {"dim": 256, "n_layers": 4} | {"n_heads": 8, "hidden_dim": 1024, "vocab_size": VOCAB},
    ),
    "tagger": ("bert", "AutoModelForTokenClassification", _encoder(256, 4, 8)),
    "masked": ("roberta", "AutoModelForMaskedLM", _encoder(256, 4, 8) | {"pad_token_id": 0}),
    "speech": ("whisper", "AutoModelForSpeechSeq2Seq", _SPEECH),
}


def folder_of(name: str, workdir: Path) -> Path:
    """The folder of the model ``name`` below ``workdir``, written at the first call."""
    folder = workdir / name
    if folder.is_dir():
        return folder
    from transformers.utils import logging

    unfinished = folder.with_name(f"{name}.unfinished")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = _image_model() if name == "image-text" else _built(*MODELS[name])
    model.generation_config = _generation_config(model)
    model.save_pretrained(unfinished)
    tokenizer().save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


def _built(model_type: str, cls: str, values: dict[str, Any]) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **values)
    model = getattr(transformers, cls).from_config(config)
    randomise(model, seed=0)
    return model


def _generation_config(model: Any) -> Any:
    """Texts end by their length alone, so that every run has as many steps."""
    from transformers import GenerationConfig

    found = GenerationConfig.from_model_config(model.config)
    found.eos_token_id, found.pad_token_id = None, 0
    return found


def _image_model() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
        projection_dim=128,
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=3)
    model = LlavaForConditionalGeneration(config)
    randomise(model, seed=0)
    return model
