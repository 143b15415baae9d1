"""What ranks do to test saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel.jobs import _quiet, _raised
from parallel.jobs_load import class_of
from support import tiny_models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor.parallel.checkpoint import saving


def saves(folder: str, names: list[str]) -> dict[str, Any]:
    """Each family saved after it was loaded in parts, and one that was sharded by `shard` in small files."""
    _quiet()
    root = Path(folder)
    found: dict[str, Any] = {}
    for name in names:
        # With the configuration of the family, which may share its class with another one.
        config = AutoConfig.from_pretrained(root / name)
        model = class_of(root / name).from_pretrained(root / name, config=config)
        found[name] = _raised(lambda model=model, name=name: model.save_pretrained(root / f"{name} saved"))
    built = tiny_models.build(names[0])
    liteboost_adaptor.shard(built)
    found["again"] = _raised(lambda: built.save_pretrained(root / f"{names[0]} saved", max_shard_size="50KB"))
    found["impossible"] = _raised(lambda: built.save_pretrained(root / names[0] / "config.json" / "below"))
    local = saving.Tensors.local

    def planted(self: Any, name: str) -> Any:
        if dist.get_rank() == 1 and "layers.1" in name:
            raise OSError("planted")
        return local(self, name)

    saving.Tensors.local = planted
    found["other"] = _raised(lambda: built.save_pretrained(root / "never"))
    saving.Tensors.local = local
    room = saving.ShardSpec.empty_global

    def none_left(*_: Any) -> Any:
        raise MemoryError("planted")

    saving.ShardSpec.empty_global = none_left
    found["no memory"] = _raised(lambda: built.save_pretrained(root / "never"))
    saving.ShardSpec.empty_global = room
    found["state_dict"] = _raised(lambda: built.save_pretrained(root / "x", state_dict={"a": 1}))
    return found


def saves_replaced(folder: str, saved: str) -> dict[str, Any]:
    """A model whose head and embedding a script has replaced; on one rank only; a parameter replaced."""
    _quiet()
    found: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(folder)
    replace(model)
    with torch.no_grad():
        found["logits"] = model(input_ids=torch.arange(8)[None]).logits.tolist()
    found["saved"] = _raised(lambda: model.save_pretrained(saved))

    model = tiny_models.build("llama")
    liteboost_adaptor.shard(model)
    if dist.get_rank():
        replace(model)
    found["one rank"] = _raised(lambda: model.save_pretrained(f"{saved} never"))

    model = tiny_models.build("llama")
    liteboost_adaptor.shard(model)
    whole = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    model.lm_head.weight = nn.Parameter(whole, requires_grad=False)
    found["parameter"] = _raised(lambda: model.save_pretrained(f"{saved} never"))
    return found


def replace(model: Any) -> None:
    """New layers, the head's with half of the rows: as many as a shard has."""
    torch.manual_seed(5)
    width = model.config.hidden_size
    model.set_input_embeddings(nn.Embedding(model.config.vocab_size, width))
    model.set_output_embeddings(nn.Linear(width, model.config.vocab_size // 2, bias=False))
