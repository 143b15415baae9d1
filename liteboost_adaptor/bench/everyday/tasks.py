"""Scripts of pipelines, encoders, images and speech."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .inputs import prompt, tokenizer, words
from .script import Script, numbers_of, tokens


def _texts(count: int) -> list[str]:
    return [words(6 + 5 * (at % 7), seed=at) for at in range(count)]


def _pipeline(task: str, folder: Path, **options: Any) -> Any:
    from transformers import pipeline

    return pipeline(task, model=str(folder), tokenizer=tokenizer(), **options)


def _text_generation(folder: Path) -> Iterable[float]:
    run = _pipeline("text-generation", folder)
    found = [each for text in _texts(4) for each in run(text, max_new_tokens=40, do_sample=False)]
    return numbers_of(" ".join(each["generated_text"] for each in found))


def _text_classification(folder: Path) -> Iterable[float]:
    run = _pipeline("text-classification", folder)
    return [each["score"] for text in _texts(120) for each in run(text)]


def _zero_shot(folder: Path) -> Iterable[float]:
    run = _pipeline("zero-shot-classification", folder)
    labels = ["w9", "w10", "w11"]
    return [each for text in _texts(40) for each in run(text, labels)["scores"]]


def _token_classification(folder: Path) -> Iterable[float]:
    run = _pipeline("token-classification", folder)
    return [each["score"] for text in _texts(120) for each in run(text)]


def _fill_mask(folder: Path) -> Iterable[float]:
    run = _pipeline("fill-mask", folder)
    return [each["score"] for text in _texts(80) for each in run(f"{text} <mask>")]


def _feature_extraction(folder: Path) -> Iterable[float]:
    run = _pipeline("feature-extraction", folder)
    return [each for text in _texts(60) for each in run(text)[0][0]]


def _embeddings(folder: Path, batches: int, rows: int) -> Iterable[float]:
    """Mean of the tokens, normalized: what sentence embeddings are."""
    from transformers import AutoModel

    model, made, found = AutoModel.from_pretrained(folder).eval(), tokenizer(), []
    for at in range(batches):
        texts = _texts(rows + at)[at:]
        inputs = made(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        found += tokens(torch.nn.functional.normalize(mean, dim=-1)[:, :4])
    return found


def _minilm(folder: Path) -> Iterable[float]:
    return _embeddings(folder, batches=20, rows=8)


def _narrow(folder: Path) -> Iterable[float]:
    return _embeddings(folder, batches=300, rows=1)


def _translation(folder: Path) -> Iterable[float]:
    from transformers import AutoModelForSeq2SeqLM

    model, found = AutoModelForSeq2SeqLM.from_pretrained(folder), []
    for text in range(4):
        ids = model.generate(prompt(1, 12 + text, seed=text), max_new_tokens=60, do_sample=False)
        found += tokens(ids)
    return found


def _image_text(folder: Path, with_image: bool) -> Iterable[float]:
    from transformers import AutoModelForImageTextToText

    model, found = AutoModelForImageTextToText.from_pretrained(folder), []
    for text in range(4):
        ids = prompt(1, 20, seed=text)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if with_image:
            ids[:, 2:18] = model.config.image_token_id
            generator = torch.Generator().manual_seed(text)
            inputs["pixel_values"] = torch.randn(1, 3, 64, 64, generator=generator)
        found += tokens(model.generate(**inputs, max_new_tokens=40, do_sample=False))
    return found


def _image(folder: Path) -> Iterable[float]:
    return _image_text(folder, with_image=True)


def _no_image(folder: Path) -> Iterable[float]:
    return _image_text(folder, with_image=False)


def _speech(folder: Path) -> Iterable[float]:
    from transformers import AutoModelForSpeechSeq2Seq

    model, found = AutoModelForSpeechSeq2Seq.from_pretrained(folder), []
    for part in range(4):
        features = torch.randn(1, 80, 300, generator=torch.Generator().manual_seed(part))
        found += tokens(model.generate(features, max_new_tokens=50, do_sample=False))
    return found


SCRIPTS = {
    "pipeline-text-generation": Script("decoder", _text_generation, "`text-generation`, 4 texts"),
    "pipeline-text-classification": Script("classifier", _text_classification, "`text-classification`"),
    "pipeline-zero-shot": Script("classifier", _zero_shot, "`zero-shot-classification`"),
    "pipeline-token-classification": Script("tagger", _token_classification, "`token-classification`"),
    "pipeline-fill-mask": Script("masked", _fill_mask, "`fill-mask`"),
    "pipeline-feature-extraction": Script("minilm", _feature_extraction, "`feature-extraction`"),
    "minilm": Script("minilm", _minilm, "sentence embeddings, hidden size 384"),
    "narrow": Script("narrow", _narrow, "single sentences, hidden size 128"),
    "translation": Script("encoder-decoder", _translation, "T5, 4 texts"),
    "llava-image": Script("image-text", _image, "LLaVA, 4 images"),
    "llava-text": Script("image-text", _no_image, "LLaVA, no image"),
    "whisper": Script("speech", _speech, "Whisper, 4 parts"),
}
