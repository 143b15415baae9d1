"""Rotary functions of every form in transformers, and how a call of one is checked against the original."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import liteboost_adaptor

from . import calls, planted
from .compare import FLOOR

HEAD_DIM = 32
VISION = "apply_rotary_pos_emb_vision"


@dataclass(frozen=True)
class Form:
    """A rotary function: what it takes, as its own text says.

    Attributes:
        rule: The rule that serves it, without ``rope.``.
        arguments: In order; ``freqs`` is a complex table.
        width: Of the tables.
        shape: Of q: ``BHSD``, ``BSHD`` or ``SHD``.
        keeps: Whether tables may be fp32 where q is not.
    """

    rule: str
    family: str
    function: str = "apply_rotary_pos_emb"
    arguments: str = "q k cos sin"
    width: int = HEAD_DIM
    shape: str = "BHSD"
    keeps: bool = False

    def original(self) -> Callable[..., Any]:
        return getattr(_modeling(self.family), self.function)


FORMS = {
    "Llama": Form("half", "llama"),
    "Phi-3": Form("half_partial", "phi3", width=24),
    "GLM-4 MoE": Form("half_partial", "glm4_moe", width=24),
    "Nemotron": Form("half_partial", "nemotron", width=24),
    "GLM-ASR": Form("half_partial_ids", "glmasr", width=24),
    "Qwen4": Form("half_partial_alone", "qwen4_exp", width=24),
    "Qwen4, no keys": Form("half_partial_alone", "qwen4_exp", arguments="q none cos sin", width=24),
    "OLMo": Form("half_fp32", "olmo2", keeps=True),
    "ModernBERT": Form("half_fp32", "modernbert_decoder", keeps=True),
    "Hunyuan-VL": Form("half_fp32", "hunyuan_vl", keeps=True),
    "Gemma 4": Form("half_one", "gemma4", arguments="q cos sin"),
    "GPT-OSS": Form("half_table", "gpt_oss", width=HEAD_DIM // 2),
    "NanoChat": Form("half_reverse", "nanochat"),
    "Qwen2-VL": Form("half_vision", "qwen2_vl", VISION, shape="SHD", keeps=True),
    "Qwen2-VL batch": Form(
        "half_vision", "qwen2_vl", "apply_rotary_pos_emb_vision", shape="BSHD", keeps=True
    ),
    "MiniMax-M3": Form("half_vision_partial", "minimax_m3_vl", VISION, shape="SHD", width=24),
    "BLT": Form("interleaved_plain", "blt"),
    "Cohere": Form("interleaved", "cohere", keeps=True),
    "ERNIE 4.5 VL": Form("interleaved", "ernie4_5_vl_moe", keeps=True),
    "Inkling 2": Form(
        "interleaved_vision", "inkling2", "apply_rotary_pos_emb_vision", shape="SHD", keeps=True
    ),
    "GLM-4V": Form("interleaved_partial", "glm4v", width=24),
    "privacy filter": Form("interleaved_table", "openai_privacy_filter", width=HEAD_DIM // 2),
    "Helium": Form("interleaved_first", "helium"),
    "ERNIE 4.5": Form("interleaved_first_fp32", "ernie4_5", keeps=True),
    "GLM": Form("interleaved_first_partial", "glm", width=24),
    "GPT-J": Form("interleaved_one", "gptj", arguments="q sin cos", shape="BSHD", width=HEAD_DIM // 2),
    "DeepSeek V4": Form("interleaved_last", "deepseek_v4", arguments="q cos sin", width=12, keeps=True),
    "DeepSeek V3": Form("deinterleave", "deepseek_v3", "apply_rotary_pos_emb_interleave"),
    "Mistral Large 4": Form("deinterleave_plain", "mistral_large4", "apply_rotary_pos_emb_interleave"),
    "DeepSeek V2": Form("complex", "deepseek_v2", "apply_rotary_emb", "q k freqs", HEAD_DIM // 2, keeps=True),
    "Llama 4": Form(
        "complex_positions_first",
        "llama4",
        "apply_rotary_emb",
        "q k freqs",
        HEAD_DIM // 2,
        "BSHD",
        keeps=True,
    ),
}


def _modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def calling(function: str, text: str, folder: Path) -> nn.Module:
    """A module in a file of its own that calls a function of ``text``, and nothing else."""
    text += f"""

class Rotation(torch.nn.Module):
    def forward(self, *args, **kwargs):
        return {function}(*args, **kwargs)
"""
    return planted.load(text, folder).Rotation()


def holder(form: Form, folder: Path) -> nn.Module:
    """A module that calls the original of ``form``."""
    text = f"import torch\nfrom {form.original().__module__} import {form.function}\n"
    return calling(form.function, text, folder)


def arguments_of(
    form: Form, dtype: torch.dtype, table_dtype: torch.dtype, shape: str = ""
) -> tuple[Any, ...]:
    """Tables without symmetry; q and k as views of a projection."""
    shape = shape or form.shape
    generator = torch.Generator().manual_seed(5)
    batch, length = (3, 5) if "B" in shape else (1, 5)

    def tensor(heads: int) -> torch.Tensor:
        x = torch.randn(batch, length, heads, HEAD_DIM, generator=generator).to(dtype)
        return {"BSHD": x, "SHD": x[0], "BHSD": x.transpose(1, 2)}[shape]

    angles = torch.rand(batch, length, form.width, generator=generator) * 6
    angles = angles if "B" in shape else angles[0]
    made = {
        "q": tensor(4),
        "k": tensor(2),
        "none": None,
        "cos": angles.cos().to(table_dtype),
        "sin": (angles * 0.7).sin().to(table_dtype),
        "freqs": torch.polar(angles / 6 + 0.5, angles),
    }
    return tuple(made[name] for name in form.arguments.split())


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def raised(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers in fp32."""
    return tuple(a.float() if isinstance(a, torch.Tensor) and not a.is_complex() else a for a in arguments)


def check_served(module: nn.Module, form: Form, *arguments: Any, **named: Any) -> None:
    """Served once by the rule; fp32 within noise; 16 bits as near to the truth as the original."""
    in_fp32 = dict(zip(named, raised(tuple(named.values())), strict=True))
    theirs, truth = results(module(*arguments, **named)), results(module(*raised(arguments), **in_fp32))
    liteboost_adaptor.apply(module)
    with calls.served() as served:
        found = module(*arguments, **named)
    liteboost_adaptor.undo()
    assert served.rules == {f"rope.{form.rule}": 1} and served.fallbacks == {}
    assert type(found) is (tuple if len(theirs) > 1 else torch.Tensor)
    for ours, original, exact in zip(results(found), theirs, truth, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (original.dtype, original.shape, original.stride())
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, exact, rtol=2e-6, atol=2e-6)
        error, own = ((x.double() - exact.double()).norm() for x in (ours, original))
        assert error <= 1.5 * own + FLOOR[ours.dtype] * exact.norm()


def outcome(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
    try:
        return module(*arguments)
    except Exception as fault:  # noqa: BLE001 - compared with the original's
        return fault


def source_of(family: str, *functions: str) -> str:
    """A file with these functions of a family, without their decorators."""
    modeling = _modeling(family)
    texts = [inspect.getsource(inspect.unwrap(getattr(modeling, name))) for name in functions]
    return "\n\n".join(["import torch\n", *(re.sub(r"^@.*\n", "", text, flags=re.M) for text in texts)])
