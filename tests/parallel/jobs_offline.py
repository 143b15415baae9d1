"""What ranks do with checkpoints that are sharded already."""

from __future__ import annotations

from typing import Any

import torch
from parallel.jobs import _quiet, _raised
from parallel.jobs_load import PLAN, _loaded, _nbytes
from support import families, tiny_models
from support.numbers import relative
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor.quantization import LiteBoostConfig


def of_families(folder: str, names: list[str]) -> dict[str, Any]:
    """Each family loaded from ``folder/name sharded``, compared with one process and the whole checkpoint."""
    _quiet()
    found: dict[str, Any] = {}
    for name in names:
        whole = tiny_models.build(name)
        inputs = tiny_models.example_inputs(whole, batch=3, padding=3)
        alone = families.decode(whole, inputs, 4)
        model, read = _loaded(f"{folder}/{name} sharded")
        _, logits = families.decode(model, inputs, 4, forced=alone[0])
        other, _ = _loaded(f"{folder}/{name}")
        mine, theirs = model.state_dict(), other.state_dict()
        found[name] = {
            "sharded": hasattr(model, PLAN),
            "distance": relative(logits, alone[1]),
            "same": set(mine) == set(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine),
            "read": read / _nbytes(model),
        }
    return found


@torch.no_grad()
def with_integers_in_the_cache(folder: str) -> dict[str, Any]:
    """Logits of the whole model in one process and of its parts, both loaded with ``kv8``."""
    _quiet()
    liteboost_adaptor.apply(tp=1)
    ids, config = torch.arange(5, 25)[None], LiteBoostConfig("kv8")
    alone = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", quantization_config=config)
    expected = alone(ids, use_cache=True)
    liteboost_adaptor.apply(tp=2)
    config = LiteBoostConfig("kv8")
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama sharded", quantization_config=config)
    found = model(ids, use_cache=True)
    return {
        "sharded": hasattr(model, PLAN),
        "distance": relative(found.logits, expected.logits),
        "kept": str(vars(found.past_key_values.layers[0])["keys"].dtype),
        "heads": found.past_key_values.layers[0].keys.shape[1],
    }


def faults(folder: str) -> dict[str, str]:
    """What is said of folders that cannot be loaded."""
    _quiet()
    found = {
        name: _raised(lambda name=name: _loaded(f"{folder}/{name}"))
        for name in ("short", "changed", "renamed")
    }
    found["gone"] = _raised(lambda: _loaded(f"{folder}/gone"))
    found["four"] = _raised(lambda: _loaded(f"{folder}/four"))
    liteboost_adaptor.apply(tp=1)
    found["tp 1"] = _raised(lambda: _loaded(f"{folder}/short"))
    return found
