"""What ranks do with models of integers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from parallel.jobs import _count_collectives, _quiet, _raised, _recorded_steps
from support.numbers import relative
from torch import nn
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor.parallel.tensor.layers import QuantizedRowParallelLinear
from liteboost_adaptor.program import step
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear
from liteboost_adaptor.quantization.layers import QuantizedExperts, QuantizedLayer


@torch.no_grad()
def load(folders: list[str], length: int) -> dict[str, Any]:
    """Of each folder: the tokens it writes, logits of a prompt, and what this rank holds of the integers."""
    _quiet()
    step.RECORDED_AT = 3
    found = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.arange(5, 25)[None]
        before = _recorded_steps()
        tokens = model.generate(ids, max_new_tokens=length, do_sample=False)
        layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
        found[folder] = {
            "tokens": tokens.tolist(),
            "logits": model(input_ids=ids).logits.flatten().tolist(),
            "held": sum(layer.weight.nbytes for layer in layers),
            "layers": len(layers),
            "recorded": _recorded_steps() - before,
            "sharded": any(isinstance(each, QuantizedRowParallelLinear) for each in layers),
            "shifted": _with_shifted_output(model, ids),
        }
    return found


def _with_shifted_output(model: Any, ids: torch.Tensor) -> list[float]:
    """Logits of ``model`` with a bias that a script gives a layer whose output is all-reduced."""
    layers = [each for name, each in model.named_modules() if name.endswith("down_proj")]
    if not layers:
        return []
    layers[0].bias = nn.Parameter(torch.full((model.config.hidden_size,), 0.3), requires_grad=False)
    return model(input_ids=ids).logits.flatten().tolist()


def refused(folder: str) -> str:
    """What loading says."""
    _quiet()
    return _raised(lambda: AutoModelForCausalLM.from_pretrained(folder))


@torch.no_grad()
def experts(folder: str, forms: dict[str, list[Any]], length: int) -> dict[str, Any]:
    """Models with experts of integers: ``NAME`` is the plain checkpoint, ``NAME quantized`` that of integers.

    Saves what was read as integers, and what was rounded while it was read, beside them.
    """
    _quiet()
    step.RECORDED_AT = 3
    found = {}
    for name, form in forms.items():
        root = Path(folder) / name
        whole = root.with_name(f"{name} quantized")
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
        steps = _recorded_steps()
        ids = torch.arange(5, 25)[None]
        tokens = model.generate(ids, max_new_tokens=length, do_sample=False, pad_token_id=0)
        steps = _recorded_steps() - steps
        modules = [each for each in model.modules() if isinstance(each, QuantizedLayer)]
        plan = getattr(model, "_liteboost_plan", None)
        found[name] = {
            "tokens": tokens.tolist(),
            "logits": model(input_ids=ids).logits.flatten().tolist(),
            "shapes": [list(each.shape) for each in modules if isinstance(each, QuantizedExperts)],
            "held": sum(each.nbytes for each in model.parameters())
            + sum(tensor.nbytes for each in modules for tensor in each.unpacked().tensors().values()),
            "recorded": steps,
            "roles": Counter(plan.roles.values()) if plan else {},
            "collectives": _count_collectives(lambda: model(input_ids=ids)),  # noqa: B023
        }
        model.save_pretrained(root.with_name(f"{name} {'saved' if plan else 'alone'}"))
        if plan is None:
            continue
        config = LiteBoostConfig(*form)
        rounded = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, quantization_config=config)
        found[name]["rounded"] = rounded(input_ids=ids).logits.flatten().tolist()
        rounded.save_pretrained(root.with_name(f"{name} rounded"))
    return found


def changed(folder: str) -> str:
    """What is said of a checkpoint in which a byte has changed."""
    _quiet()
    return _raised(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@torch.no_grad()
def in_place(folder: str) -> dict[str, Any]:
    """A quantized model that was loaded whole, before and behind `shard`."""
    _quiet()
    liteboost_adaptor.apply(level=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    liteboost_adaptor.apply(level=2)
    if os.environ["RANK"] == "0":
        model.save_pretrained(f"{folder} alone")
    ids = torch.arange(5, 25)[None]
    alone, held = model(input_ids=ids).logits, sum(each.nbytes for each in model.buffers())
    liteboost_adaptor.shard(model)
    model.save_pretrained(f"{folder} in place")
    return {
        "distance": relative(model(input_ids=ids).logits, alone),
        "held": sum(each.nbytes for each in model.buffers()) / held,
    }
