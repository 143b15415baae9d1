"""What ranks do to test loading."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from parallel.jobs import _pickled, _quiet, _raised
from support import families, tiny_models
from support.numbers import relative

import liteboost_adaptor
from liteboost_adaptor.checkpoint import files as checkpoint

PLAN = "_liteboost_plan"


def _nbytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def class_of(folder: str | Path) -> Any:
    """The class that a folder's configuration names; of some families the auto classes find another one."""
    return getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])


def _loaded(folder: str, **arguments: Any) -> tuple[Any, int]:
    """A model, and the bytes that were asked of files for it."""
    before = checkpoint.requests.bytes
    model = class_of(folder).from_pretrained(folder, **arguments)
    return model, checkpoint.requests.bytes - before


def _of_family(folder: str, name: str) -> dict[str, Any]:
    whole = tiny_models.build(name)
    inputs = tiny_models.example_inputs(whole, batch=3, padding=3)
    alone = families.decode(whole, inputs, 4)
    total = _nbytes(whole)
    model, read = _loaded(str(Path(folder) / name))
    _, logits = families.decode(model, inputs, 4, forced=alone[0])
    liteboost_adaptor.shard(whole)
    mine, theirs = model.state_dict(), whole.state_dict()
    return {
        "sharded": hasattr(model, PLAN),
        "distance": relative(logits, alone[1]),
        "same": set(mine) == set(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine),
        "read": read / _nbytes(model),
        "held": _nbytes(model) / total,
    }


def of_families(folder: str, names: list[str]) -> dict[str, Any]:
    """Each family loaded from ``folder/name`` and compared with one process, and with `shard`."""
    _quiet()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _of_family(folder, name)
        except Exception as fault:  # noqa: BLE001 - reported by the test
            found[name] = {"fault": f"{type(fault).__name__}: {fault}"[:600]}
    return found


def ways(folder: str) -> dict[str, Any]:
    """Llama loaded in all kinds of ways; see the test."""
    _quiet()
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    whole = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(whole, padding=3)
    with torch.no_grad():
        wanted = whole(**inputs).logits

    def distance(**arguments: Any) -> float:
        model, _ = _loaded(f"{folder}/{arguments.pop('files', 'llama')}", **arguments)
        assert hasattr(model, PLAN)
        with torch.no_grad():
            return relative(model(**inputs).logits.float(), wanted)

    found["near"] = {
        "many files": distance(files="llama in parts"),
        "pickled": distance(files="llama pickled"),
        "device_map": distance(device_map="auto"),
        "no threads": _without_threads(distance),
    }
    found["bf16"] = distance(dtype=torch.bfloat16)
    model, _ = _loaded(f"{folder}/llama")
    found["train"] = _raised(model.train)
    found["eval"] = model.eval() is model
    with torch.no_grad():  # as a Trainer calls it
        loss = model(**inputs, labels=inputs["input_ids"], num_items_in_batch=torch.tensor(11)).loss
    found["loss"] = bool(loss.isfinite())
    found["adapters"] = _raised(lambda: model.add_adapter(None))
    found["resized"] = _raised(lambda: model.resize_token_embeddings(300))
    found["inner resized"] = _raised(lambda: model.model.resize_token_embeddings(300))
    embedding = model.get_input_embeddings()
    found["same size"] = all(
        model.resize_token_embeddings(**each) is embedding
        for each in ({}, {"new_num_tokens": 256}, {"new_num_tokens": 250, "pad_to_multiple_of": 64})
    )
    found["quantized"] = _raised(lambda: liteboost_adaptor.apply(model, quant="w8a16"))
    found["dequantized"] = _raised(model.dequantize)
    with torch.no_grad():
        found["pickled"] = torch.equal(_pickled(model)(**inputs).logits, model(**inputs).logits)
    found["settings"] = _raised(lambda: model.generate(**inputs, max_new_tokens=2 + rank))
    found["mismatch"] = _raised(
        lambda: _loaded(f"{folder}/llama", vocab_size=64, ignore_mismatched_sizes=True)
    )
    found["missing"] = _raised(lambda: _loaded(f"{folder}/llama incomplete"))
    found["short"] = _raised(lambda: _loaded(f"{folder}/llama short on {rank}"))
    found["whole"] = _wholes(f"{folder}/llama")
    return found


def _without_threads(distance: Any) -> float:
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        return distance()
    finally:
        del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]


def _wholes(folder: str) -> dict[str, Any]:
    """Why a model was not sharded: what was said of it."""
    found: dict[str, Any] = {}
    for name, settings in {"tp 1": {"tp": 1}, "level 1": {"level": 1}, "tp 3": {"tp": 3}}.items():
        liteboost_adaptor.apply(**settings)
        found[name] = _raised(lambda: hasattr(_loaded(folder)[0], PLAN) and found)
        found[f"{name} sharded"] = found[name] == "nothing raised" and hasattr(_loaded(folder)[0], PLAN)
    liteboost_adaptor.apply()
    found["again sharded"] = hasattr(_loaded(folder)[0], PLAN)
    from accelerate import PartialState

    PartialState()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["accelerator sharded"] = hasattr(_loaded(folder)[0], PLAN)
    found["accelerator"] = [str(each.message) for each in said if "loaded whole" in str(each.message)]
    found["accelerator noted"] = any("Accelerator" in note for note in liteboost_adaptor.status().environment)
    return found


def level(folder: str) -> str:
    """What loading says."""
    _quiet()
    return _raised(lambda: _loaded(folder))


@torch.no_grad()
def logits(folder: str) -> dict[str, Any]:
    """What a model says of some tokens, and the elements of parameters that this rank holds."""
    _quiet()
    model, _ = _loaded(folder, dtype=torch.float32)
    return {
        "logits": model(torch.arange(5, 17)[None]).logits.flatten().tolist(),
        "sharded": hasattr(model, PLAN),
        "experts": sum(each.numel() for name, each in model.named_parameters() if "_proj" in name),
    }
