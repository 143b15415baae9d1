"""The families of models that tests go through, and how one of each is built and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from liteboost_adaptor.parallel.tensor import layout

from . import coverage, families_images, tiny_models

CAUSAL, IMAGE_TEXT = "Causal language models", "Image-text models"
SECTIONS: dict[str, Callable[[], list[str]]] = {
    CAUSAL: tiny_models.families,
    IMAGE_TEXT: tiny_models.image_text_families,
}

#: Families that cannot be built or run here from a tiny configuration, and why.
NOT_BUILDABLE = {
    "gemma3n": "its vision tower needs timm; the text model is gemma3n_text",
    "gemma4_assistant": "a draft head; it runs on the cache of the model that it drafts for",
    "gemma4_unified_assistant": "as gemma4_assistant",
    "blip-2": "generates only from an image, and from inputs of a Q-Former",
    "deepseek_ocr2": "its configuration has no tiny vision tower that it accepts",
    "diffusion_gemma": "its configuration has no tiny layout that it accepts; it denoises blocks of tokens",
    "evolla": "listed for proteins; the mapping has no class for its configuration",
    "fast_vlm": "its vision tower needs timm",
    "granite4_vision": "its configuration has no tiny vision tower that it accepts",
    "idefics": "runs only on images, with their own attention mask",
    "inkling_mm_model": "needs scipy",
    "instructblip": "as blip-2",
    "instructblipvideo": "as blip-2",
    "kosmos-2": "runs only on images, with a mask of their positions",
    "perception_lm": "its vision tower needs timm",
    "pi0": "predicts actions of a robot; it has no vocabulary",
    "pix2struct": "runs only on flattened patches of an image",
    "pp_formulanet": "runs only on an image; its tiny tower does not fit its decoder",
    "udop": "runs only on text with bounding boxes",
    "vision-encoder-decoder": "a pair of any two models; its decoders are families of their own",
}
#: Families that do not run without an image.
NEEDS_IMAGE = ("blip",)


def buildable(section: str = CAUSAL) -> list[str]:
    """The families of a section that can be built."""
    return [family for family in SECTIONS[section]() if family not in NOT_BUILDABLE]


def text_run(model: torch.nn.Module) -> Callable[[], Any]:
    """Prefill of a left-padded text batch and two cached steps."""
    if model.config.model_type in NEEDS_IMAGE:
        inputs = families_images.image_inputs(model)
    else:
        inputs = tiny_models.example_inputs(model, padding=3)
    return lambda: tiny_models.generate(model, inputs, new_tokens=3)


def measured(section: str) -> Iterator[coverage.Coverage]:
    """Coverage of every family of a section."""
    for family in buildable(section):
        model = tiny_models.build(family)
        yield coverage.measure(family, model, text_run(model))


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Parameters and buffers in ``dtype``, but those that ``from_pretrained`` keeps in fp32."""
    plan = getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype)
    kept = [
        re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in (*plan, "inv_freq", "original_inv_freq")
    ]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = torch.float32 if any(pattern.search(name) for pattern in kept) else dtype
        if tensor.is_floating_point():
            moved = tensor.data.to(wanted)
            # Reformer keeps mask values of fp32 in buffers; as fp16 they would be infinite, and stay so.
            if moved.isfinite().all() or not tensor.isfinite().all():
                tensor.data = moved
    model.config.dtype = dtype
    return model


def inputs_of(
    model: torch.nn.Module, length: int, paddings: tuple[int, ...], seed: int = 0
) -> dict[str, Any]:
    """Text whose rows are padded at the left by so many positions."""
    inputs = tiny_models.example_inputs(model, batch=len(paddings), length=length, seed=seed)
    for row, padding in enumerate(paddings):
        if "attention_mask" in inputs:
            inputs["attention_mask"][row, :padding] = 0
    return inputs


@torch.no_grad()
def prefill(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of every position, ``[rows, length, vocabulary]``."""
    if (
        model.config.is_encoder_decoder
        and getattr(model, "encoder", getattr(model, "model", None)) is not None
    ):
        inputs = inputs | {"decoder_input_ids": inputs["input_ids"]}
    return model(**inputs).logits


class _Forced(LogitsProcessor):
    """Goes on with given tokens, whatever the logits say."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = iter(tokens.unbind(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = next(self.tokens)[:, None]
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)


@torch.no_grad()
def decode(
    model: torch.nn.Module, inputs: dict[str, Any], steps: int, forced: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``generate`` with a cache: tokens ``[rows, steps]`` and their logits ``[rows, steps, vocabulary]``.

    Args:
        forced: TokenShards to go on with in place of the likeliest, so that runs compare at every step.
    """
    settings = tiny_models.greedy_settings(model, steps)
    if hasattr(model, "num_codebooks"):  # their generate fails on a padding token among the tokens
        settings.suppress_tokens = [settings.pad_token_id]
    model.generation_config = settings
    processors = LogitsProcessorList([] if forced is None else [_Forced(forced)])
    # Copies: some families write into what they are given.
    inputs = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    out = model.generate(**inputs, generation_config=settings, logits_processor=processors)
    return out.sequences.flatten(0, -2)[:, -steps:], torch.stack(out.logits, dim=1)


def world_sizes(family: str) -> list[int]:
    """Numbers of ranks among which a tiny model can be sharded."""
    with torch.device("meta"):
        return layout.infer_layout(tiny_models._from_config(family)).world_sizes()
