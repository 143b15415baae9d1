"""A whole model directory with code of its own: known bodies are served, a changed line is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models
from torch import nn
from transformers import AutoModelForCausalLM

import liteboost_adaptor

#: transformers tells remote models apart by the names of their folders.
NUMBERS = itertools.count()

CONFIGURATION = """
from transformers import LlamaConfig


class HouseConfig(LlamaConfig):
    model_type = "house"
"""

RENAMED = [
    (
        "from transformers.models.llama.configuration_llama import LlamaConfig",
        "from .configuration_house import HouseConfig",
    ),
    ("Llama", "House"),
]

#: What is changed -> (family of rules that must refuse it, the line, what stands there instead).
CHANGED = {
    "epsilon after the root": (
        "norm",
        planted.NORM_ROW,
        "hidden_states = hidden_states / (variance.sqrt() + self.variance_epsilon)",
    ),
    "epsilon after the reciprocal": (
        "norm",
        planted.NORM_ROW,
        "hidden_states = hidden_states * (torch.rsqrt(variance) + self.variance_epsilon)",
    ),
    "statistics in the dtype of the input": (
        "norm",
        "hidden_states = hidden_states.to(torch.float32)",
        "hidden_states = hidden_states.to(input_dtype)",
    ),
    "the scale rounded before the product": (
        "norm",
        planted.NORM_ROW,
        "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon).to(input_dtype)",
    ),
    "large rows clamped": (
        "norm",
        planted.NORM_ROW,
        f"{planted.NORM_ROW}\n        hidden_states = hidden_states.clamp(-30, 30)",
    ),
    "large rows clamped by a branch": (
        "norm",
        planted.NORM_VARIANCE,
        f"{planted.NORM_VARIANCE}\n        if hidden_states.abs().max() > 1e4:\n"
        "            hidden_states = hidden_states * 0.5",
    ),
    # With both signs exchanged it is NanoChat's rotation, which has a rule of its own.
    "the rotation is a reflection": ("rope", planted.ROTATE_HALF, "return torch.cat((x2, x1), dim=-1)"),
    "keys turn the other way": (
        "rope",
        "k_embed = (k * cos) + (rotate_half(k) * sin)",
        "k_embed = (k * cos) - (rotate_half(k) * sin)",
    ),
    "large queries clamped": (
        "rope",
        planted.ROPE_Q,
        f"{planted.ROPE_Q}\n    q_embed = q_embed.clamp(-1e4, 1e4)",
    ),
    "the table of another axis": ("rope", planted.ROPE_COS, "cos = cos.flip(-1).unsqueeze(unsqueeze_dim)"),
}


def directory(folder: Path, *changes: tuple[str, str]) -> Path:
    """A checkpoint as it is uploaded: configuration and code by ``auto_map``, weights, settings."""
    tiny_models.build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "model_type": "house",
        "architectures": ["HouseForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_house.HouseConfig",
            "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "configuration_house.py").write_text(CONFIGURATION, encoding="utf-8")
    text = planted.llama_text(*changes, *RENAMED)
    (folder / "modeling_house.py").write_text(text, encoding="utf-8")
    return folder


def load(folder: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    assert model.config.model_type == "house"
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**numbers.padded_inputs(model)).logits


@pytest.mark.usefixtures("modules_cache")
def test_copied_code_is_served_like_the_librarys(level: int, tmp_path: Path) -> None:
    library = tiny_models.build("llama")
    liteboost_adaptor.apply(library, level=level)
    with calls.served() as wanted:
        logits(library)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=level)
    model = load(directory(tmp_path / f"house{next(NUMBERS)}"))
    with calls.served() as served:
        found = logits(model)
    assert served.rules == wanted.rules and served.fallbacks == {}
    assert state.rows().keys() == {"applied"}
    liteboost_adaptor.undo()
    expected = logits(model)
    assert numbers.relative(found, expected) <= 2e-5
    assert torch.equal(expected, logits(library))


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_line_is_refused(change: str, level: int, tmp_path: Path) -> None:
    family, *line = CHANGED[change]
    liteboost_adaptor.apply(level=level)
    model = load(directory(tmp_path / f"house{next(NUMBERS)}", tuple(line)))
    with calls.served() as served:
        found = logits(model)
    refused = state.rows()["refused"]
    assert {row.id for row in refused} == {f"{family}.*"}
    assert all(row.reason for row in refused)
    # Nothing of the family is served, and everything else is.
    assert served.kinds[family] == 0
    assert all(served.kinds[kind] > 0 for kind in ("norm", "rope", "attention", "linear") if kind != family)
    liteboost_adaptor.undo()
    assert numbers.relative(found, logits(model)) <= 2e-5
