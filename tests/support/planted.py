"""Modeling code as a user of another library would write it: transformers' text with known changes."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
import sys
import types
from pathlib import Path

import torch

from . import tiny_models

_NUMBERS = itertools.count()

NORM_RETURN = "return self.weight * hidden_states.to(input_dtype)"
NORM_ROW = "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)"
NORM_VARIANCE = "variance = hidden_states.pow(2).mean(-1, keepdim=True)"
ROTATE_HALF = "return torch.cat((-x2, x1), dim=-1)"
ROPE_Q = "q_embed = (q * cos) + (rotate_half(q) * sin)"
ROPE_COS = "cos = cos.unsqueeze(unsqueeze_dim)"


def llama_text(*changes: tuple[str, str]) -> str:
    """Text of transformers' Llama, absolute in its imports, with each ``(old, new)`` replaced everywhere.

    Names, signatures, decorators and Hugging Face tags stay what they are.
    """
    from transformers.models.llama import modeling_llama

    text = inspect.getsource(modeling_llama)
    text = re.sub(r"^from \.\.\.(\w)", r"from transformers.\1", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.\.\. import", "from transformers import", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.(\w)", r"from transformers.models.llama.\1", text, flags=re.MULTILINE)
    for old, new in changes:
        assert old in text, f"transformers' Llama has no {old!r} any more"
        text = text.replace(old, new)
    return text


def load(text: str, folder: Path) -> types.ModuleType:
    """Import ``text`` from a file of its own in ``folder``, under a name nobody else has."""
    name = f"planted_modeling_{next(_NUMBERS)}"
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def llama(folder: Path, *changes: tuple[str, str], name: str = "LlamaForCausalLM") -> torch.nn.Module:
    """A tiny model of changed Llama code, with the weights of ``tiny_models.build("llama")``."""
    module = load(llama_text(*changes), folder)
    original = tiny_models.build("llama")
    model = getattr(module, name)(original.config)
    model.load_state_dict(original.state_dict())
    return model.eval()
