"""Ranks that share models, and then go their own ways."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
from parallel import ranks
from parallel.jobs import _quiet, _raised
from parallel.jobs_kinds import generated
from parallel.jobs_load import PLAN, class_of
from support import families, tiny_models
from support.numbers import relative
from torch.nn.parallel import DistributedDataParallel

import liteboost_adaptor
from liteboost_adaptor.parallel.runtime import call_group, groups


def whole_again(folder: str, names: list[str]) -> dict[str, Any]:
    """Of each family, loaded in parts: what differs from one that was loaded whole when ranks have parted."""
    _quiet()
    rank = int(os.environ["RANK"])
    seen: list[str] = []
    models = {name: class_of(f"{folder}/{name}").from_pretrained(f"{folder}/{name}") for name in names}
    sharded = all(hasattr(model, PLAN) for model in models.values())
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: seen.append(name))
        model.users_own = name
    found: dict[str, Any] = {"sharded": sharded}
    for name, model in models.items():
        whole = tiny_models.build(name)
        inputs = tiny_models.example_inputs(whole, batch=2, length=9 + rank)  # other ones on each rank
        right = families.decode(whole, inputs, 4)
        start = len(seen)
        text = families.decode(model, inputs, 4)
        loaded = class_of(f"{folder}/{name}").from_pretrained(f"{folder}/{name}")
        mine, theirs = model.state_dict(), loaded.state_dict()
        found[name] = {
            "tokens": torch.equal(text[0], right[0]) and torch.equal(text[1], right[1]),
            "state": list(mine) == list(theirs) and all(torch.equal(mine[key], theirs[key]) for key in mine),
            "modules": _modules(model) == _modules(loaded),
            "gradients": [p.requires_grad for p in model.parameters()]
            == [p.requires_grad for p in loaded.parameters()],
            "ties": len(list(model.parameters())) == len(list(loaded.parameters())),
            "kept": len(seen) > start and model.users_own == name and not hasattr(model, PLAN),
            "trains": _raised(model.train) == "nothing raised",
        }
    return found


def _modules(model: torch.nn.Module) -> list[tuple[str, str]]:
    return [(name, f"{type(each).__name__} {each.extra_repr()}") for name, each in model.named_modules()]


def later(folder: str) -> dict[str, Any]:
    """Ranks that make two calls together, and then an uneven last one; with a cache of before."""
    _quiet()
    rank = int(os.environ["RANK"])
    model = class_of(folder).from_pretrained(folder)
    found: dict[str, Any] = {"together": [generated(model), generated(model)]}
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    found["was sharded"] = hasattr(model, PLAN)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["apart"] = generated(model, rank)
        found["again"] = generated(model, 1)
    found["warned"] = [str(each.message) for each in said if "LITEBOOST_TP=1" in str(each.message)]
    found["cache"] = _raised(lambda: model(ids[:, :1], past_key_values=cache))
    found["loaded whole"] = not hasattr(class_of(folder).from_pretrained(folder), PLAN)
    found["noted"] = any("LITEBOOST_TP=1" in note for note in liteboost_adaptor.status().environment)
    return found


def changed(folder: str) -> str:
    """What parting says where weights were changed in memory; the model goes on sharded."""
    _quiet()
    model = class_of(folder).from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    text = _raised(lambda: generated(model, int(os.environ["RANK"])))
    return text if hasattr(model, PLAN) else "whole"


def moved(folder: str) -> list[int]:
    """Tokens of a model that was given another dtype before ranks part."""
    _quiet()
    model = class_of(folder).from_pretrained(folder).to(torch.float64)
    return generated(model, int(os.environ["RANK"]))


@torch.no_grad()
def resized(folder: str) -> dict[str, Any]:
    """A model whose vocabulary grows after it was sharded by default, beside one that was whole before."""
    _quiet()
    model = class_of(folder).from_pretrained(folder)
    was_sharded, ids = hasattr(model, PLAN), torch.arange(5, 25)[None]
    before = model(input_ids=ids).logits
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.resize_token_embeddings(300, mean_resizing=False)
    after = model(input_ids=ids).logits
    return {
        "was sharded": was_sharded,
        "warned": sum(
            "resize_token_embeddings() needs the whole model" in str(each.message) for each in said
        ),
        "rows": [*model.get_input_embeddings().weight.shape, *model.get_output_embeddings().weight.shape],
        "sizes": [before.size(-1), after.size(-1), model.config.vocab_size],
        "distance": relative(after[..., : before.size(-1)], before),
        "new token": bool(model(input_ids=torch.tensor([[299]])).logits.isfinite().all()),
    }


def seeded(folder: str, how: str) -> dict[str, Any]:
    """What a script draws whose ranks have seeds of their own, and the number it would draw next."""
    _quiet()
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else 0
    model = class_of(folder).from_pretrained(folder)
    ids = torch.arange(5, 17)[None]
    found: dict[str, Any] = {"was sharded": hasattr(model, PLAN)}
    torch.manual_seed(int(os.environ.get("SEED", rank)))
    if how == "loop":
        drawn, cache = [], None
        with torch.no_grad():
            for _ in range(6):
                step = model(ids, past_key_values=cache, use_cache=True)
                cache, ids = step.past_key_values, torch.multinomial(step.logits[:, -1].softmax(-1), 1)
                drawn.append(ids.item())
        found["tokens"] = drawn
    else:
        text = model.generate(ids, do_sample=how == "sampled", max_new_tokens=6, min_new_tokens=6)
        found["tokens"] = text[0].tolist()
    return found | {"next": torch.rand(1).item(), "sharded": hasattr(model, PLAN)}


def wrapped(folder: str) -> dict[str, Any]:
    """A model in a wrapper of data-parallel work, in which ranks have other inputs and gradients."""
    _quiet()
    model = class_of(folder).from_pretrained(folder)
    was_sharded = hasattr(model, PLAN)
    parallel = DistributedDataParallel(model)
    ids = torch.arange(5, 17)[None] + int(os.environ["RANK"])
    parallel(input_ids=ids, labels=ids).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    return {"was sharded": was_sharded, "sum": gradient.double().abs().sum().item()}


def launched(folder: str) -> dict[str, Any]:
    """What becomes of a model in processes that a launcher of data-parallel work has started."""
    _quiet()
    model = class_of(folder).from_pretrained(folder)
    return {"sharded": hasattr(model, PLAN), "met": groups.is_connected(), "tokens": generated(model)}


def quantized(folder: str) -> dict[str, Any]:
    """Ranks part that hold parts of integers; the logits of the whole, and of one loaded whole."""
    _quiet()
    model = class_of(folder).from_pretrained(folder)
    was_sharded = hasattr(model, PLAN)
    ids = torch.arange(5, 17)[None] + int(os.environ["RANK"])
    with torch.no_grad():
        found = model(ids).logits
        loaded = class_of(folder).from_pretrained(folder)
        return {
            "was sharded": was_sharded,
            "same": torch.equal(found, loaded(ids).logits),
            "whole": not hasattr(model, PLAN) and not hasattr(loaded, PLAN),
        }


def memory_seen_late(folder: str) -> str:
    """As `memory`; rank 0, which serves the store, could end long before rank 1 looks for the reason."""
    if os.environ["RANK"] == "1":
        call_group._POLL_INTERVALS_S = (2.0, 2.0)
    return memory(folder, float(os.environ["RANK"] == "0"))


def memory(folder: str, wait: float = 0.0) -> str:
    """What parting says where there is no room for the whole model; asked ``wait`` seconds after loading."""
    _quiet()
    from liteboost_adaptor.parallel.data import memory as room

    model = class_of(folder).from_pretrained(folder)
    room.free_memory = lambda: 1000
    time.sleep(wait)
    text = _raised(lambda: generated(model, int(os.environ["RANK"])))
    again = generated(model) if hasattr(model, PLAN) and not groups.divergence.reason else []
    ranks.report({"text": text, "again": again})
    return text
