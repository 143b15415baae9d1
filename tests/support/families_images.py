"""Inputs with an image for models that take one: an image, and a text with a place for it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import tiny_models

#: Names that configurations give the token which stands where the image goes.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "img_token_id", "image_patch_id")
#: Families whose images these inputs suit; the others want more beside the pixels.
FAMILIES = (
    *("aya_vision", "blip", "cohere2_vision", "cohere_compass", "cosmos3_omni", "florence2", "git", "glm46v"),
    *("glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "got_ocr2", "idefics2", "idefics3", "internvl"),
    *("lfm3_vl", "lighton_ocr", "llava", "minimax_m3_vl", "mistral3", "mistral_large4", "ovis2", "paligemma"),
    *("pp_chart2table", "qianfan_ocr", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7"),
    "video_llava",
)
#: Families that take several parts of an image, or several images, in a dimension of its own.
_SEVERAL_PARTS = ("idefics2", "idefics3", "smolvlm", "granite_docling")


@torch.no_grad()
def image_inputs(model: torch.nn.Module, rows: int = 2, length: int = 7, seed: int = 0) -> dict[str, Any]:
    """A batch of texts, each with one image at the beginning, as the family's processor would make it."""
    generator = torch.Generator().manual_seed(seed + 3)
    inputs = tiny_models.example_inputs(model, batch=rows, length=length, seed=seed)
    pixels = _pixels(model, rows, generator)
    places = _places(model, pixels, rows)
    if places:
        config = model.config
        token = next(value for name in _PLACEHOLDERS if (value := getattr(config, name, None)) is not None)
        image = torch.full((rows, places), token)
        inputs["input_ids"] = torch.cat(
            [inputs["input_ids"][:, :2], image, inputs["input_ids"][:, 2:]], dim=1
        )
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if _takes(model.model.forward, "mm_token_type_ids"):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).long()
    return inputs | pixels


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _vision(model: torch.nn.Module) -> Any:
    return getattr(model.config, "vision_config", None) or model.config


def _pixels(model: torch.nn.Module, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    vision = _vision(model)
    if getattr(vision, "spatial_merge_size", None) and getattr(vision, "temporal_patch_size", None):
        # Patches of all images in one list, and the grid of each image (Qwen2-VL).
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.randn(rows * 16, width, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}
    size = getattr(vision, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    pixels = {"pixel_values": torch.randn(rows, 3, height, width, generator=generator)}
    if model.config.model_type in _SEVERAL_PARTS:
        pixels["pixel_values"] = pixels["pixel_values"][:, None]
    if _takes(getattr(model, "get_image_features", pixels.get), "image_sizes"):
        pixels["image_sizes"] = torch.tensor([[height, width]] * rows)
    return pixels


def _places(model: torch.nn.Module, pixels: dict[str, torch.Tensor], rows: int) -> int:
    """Tokens one image becomes."""
    features = getattr(model, "get_image_features", None)
    if features is None:
        return 0
    found = features(**pixels)
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, (tuple, list)) else [found]
    hidden = model.get_input_embeddings().weight.shape[1]
    return sum(part.numel() for part in parts) // hidden // rows
