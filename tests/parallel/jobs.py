"""What ranks do in the tests."""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections import Counter
from typing import Any

import torch
from support import families, tiny_models
from support.calls import served
from support.numbers import relative
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging as transformers_logging

import liteboost_adaptor
from liteboost_adaptor.program import step

STEPS = 4


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    logging.disable(logging.WARNING)


def family(name: str) -> dict[str, Any]:
    """One process's and all ranks' logits and tokens, of a batch of three with left padding."""
    model = tiny_models.build(name)
    inputs = tiny_models.example_inputs(model, batch=3, padding=3)
    alone = families.decode(model, inputs, STEPS)
    before = sum(p.numel() for p in model.parameters())
    plan = liteboost_adaptor.shard(model)
    _, logits = families.decode(model, inputs, STEPS, forced=alone[0])
    return {
        "same_tokens": torch.equal(logits.argmax(-1), alone[1].argmax(-1)),
        "distance": relative(logits, alone[1]),
        "held": sum(p.numel() for p in model.parameters()) / before,
        "roles": len(plan.roles),
    }


def steps(names: list[str]) -> dict[str, Any]:
    """Of each family: tokens made by recorded steps, and how far the logits are from one process's."""
    _quiet()
    step.RECORDED_AT = 3
    found = {}
    for name in names:
        model = tiny_models.build(name)
        inputs = tiny_models.example_inputs(model, batch=3, padding=3)
        liteboost_adaptor.undo(model)
        tokens, alone = families.decode(model, inputs, 12)
        liteboost_adaptor.shard(model)
        liteboost_adaptor.apply(model, level=2)
        before = _recorded_steps()
        _, logits = families.decode(model, inputs, 12, forced=tokens)
        found[name] = {"served": _recorded_steps() - before, "distance": relative(logits, alone)}
    return found


def _recorded_steps() -> int:
    rules = liteboost_adaptor.status().to_dict()["rules"]
    return next((rule["calls"] for rule in rules if rule["id"] == "step.program"), 0)


def first_tier(names: list[str], counted: list[str], rounded: str, recorded: list[str]) -> dict[str, Any]:
    """All that two ranks do in the first tier, but for `behaviour`."""
    return {
        "families": family_results(names),
        "collectives": collectives(counted),
        "rounding": rounding(rounded),
        "steps": steps(recorded),
    }


def family_results(names: list[str]) -> dict[str, Any]:
    """`family` of each; a fault is a result, too, if all ranks have it."""
    _quiet()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = family(name)
        except Exception as fault:  # noqa: BLE001 - reported by the test
            found[name] = {"fault": f"{type(fault).__name__}: {fault}"[:600]}
    return found


def _count_collectives(action: Any) -> dict[str, int]:
    """How often each collective is called."""
    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        sees_liteboost_ops = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "liteboost_parallel":
                found[func._schema.name.split("::")[1].removesuffix("_of")] += 1  # a sum, too
            return func(*args, **(kwargs or {}))

    with Counting():
        action()
    return dict(found)


@torch.no_grad()
def collectives(names: list[str]) -> dict[str, Any]:
    """Of each family: collectives of one forward, what the plan says, and the number of layers."""
    _quiet()
    found = {}
    for name in names:
        model = tiny_models.build(name)
        plan = liteboost_adaptor.shard(model)
        ids = tiny_models.example_inputs(model)["input_ids"]
        model(ids)
        found[name] = {
            "called": _count_collectives(lambda model=model, ids=ids: model(ids)),
            "planned": Counter(plan.roles.values()),
            "layers": model.config.num_hidden_layers,
        }
    return found


def behaviour() -> dict[str, Any]:
    """What a sharded model does beside computing the same."""
    _quiet()
    found: dict[str, Any] = {}
    model = tiny_models.build("llama")
    rank = int(os.environ["RANK"])
    found["not_in_training"] = _raised(lambda: liteboost_adaptor.shard(model.train()))
    model.eval()
    inputs = tiny_models.example_inputs(model, padding=3)
    with served() as before:
        families.decode(model, inputs, 3)
    liteboost_adaptor.shard(model)
    with served() as after:
        families.decode(model, inputs, 3)
    found["served"] = {rule: (before.rules[rule], count) for rule, count in after.rules.items()}
    found["twice"] = _raised(lambda: liteboost_adaptor.shard(model))
    torch.manual_seed(rank)  # each rank would draw something else
    sampled = model.generate(**inputs, do_sample=True, max_new_tokens=8, pad_token_id=0)
    found["sampled"] = sampled.sequences.tolist()
    heard = _Heard()
    own = heard if rank == 0 else None  # as scripts have it of which one rank prints
    first = {name: value[:1] for name, value in inputs.items()}
    found["streamed"] = _raised(lambda: model.generate(**first, max_new_tokens=4, streamer=own))
    found["heard"] = heard.tokens
    found["gradients"] = any(parameter.requires_grad for parameter in model.parameters())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        found["copied"] = torch.equal(twin(**inputs).logits, model(**inputs).logits)
        found["pickled"] = torch.equal(_pickled(model)(**inputs).logits, model(**inputs).logits)
    other = inputs | {"input_ids": inputs["input_ids"] + rank}
    found["other_inputs"] = _raised(lambda: model.generate(**other, max_new_tokens=2))
    found["other_models"] = _raised(
        lambda: liteboost_adaptor.shard(tiny_models.build(("llama", "gemma")[rank % 2]))
    )
    return found


class _Heard:
    """A streamer that counts what it is given behind the prompt."""

    tokens = -1

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1

    def end(self) -> None:
        pass


def _pickled(model: torch.nn.Module) -> torch.nn.Module:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def _raised(action: Any) -> str:
    try:
        action()
    except Exception as fault:  # noqa: BLE001 - the test reads it
        return f"{type(fault).__name__}: {fault}"
    return "nothing raised"


@torch.no_grad()
def rounding(name: str) -> dict[str, float]:
    """How far bf16 is from fp32, by one process and sharded."""
    _quiet()
    model = tiny_models.build(name)
    inputs = tiny_models.example_inputs(model, batch=3, length=13)
    exact = model(**inputs).logits
    model.to(torch.bfloat16)
    alone = model(**inputs).logits.float()
    liteboost_adaptor.shard(model)
    sharded = model(**inputs).logits.float()
    return {"alone": (alone - exact).norm().item(), "sharded": (sharded - exact).norm().item()}


def expert_parallel(folder: str, names: list[str]) -> dict[str, Any]:
    """Families with whole experts on each rank, sharded in place and loaded from ``folder/name``."""
    _quiet()
    step.RECORDED_AT = 3
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=2, ep=True)
    found: dict[str, Any] = {}
    for name in names:
        model = tiny_models.build(name)
        inputs = tiny_models.example_inputs(model, batch=3, padding=3)
        with liteboost_adaptor.patched(level=0):  # not sharded yet
            tokens, alone = families.decode(model, inputs, 12)
        plan = liteboost_adaptor.shard(model)
        before = _recorded_steps()
        logits = families.decode(model, inputs, 12, forced=tokens)[1]
        loaded = type(model).from_pretrained(f"{folder}/{name}")
        again = families.decode(loaded, inputs, 12, forced=tokens)[1]
        mine, theirs = loaded.state_dict(), model.state_dict()
        found[name] = {
            "roles": Counter(plan.roles.values()),
            "experts": [m.num_experts for n, m in model.named_modules() if plan.roles.get(n) == "experts"],
            "distance": max(relative(logits, alone), relative(again, alone)),
            "same": all(torch.equal(mine[key], theirs[key]) for key in theirs),
            "recorded": _recorded_steps() - before,
            "collectives": _count_collectives(lambda: model(inputs["input_ids"])),  # noqa: B023
        }
        model.save_pretrained(f"{folder}/{name}-saved")
    return found
