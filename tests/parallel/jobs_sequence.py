"""What ranks do to test sequence and context parallelism."""

from __future__ import annotations

import copy
import ctypes
import os
from typing import Any

import torch
from parallel.jobs import _quiet, _raised
from parallel.jobs_memory import Peak
from support import families, tiny_models
from support.calls import served
from support.numbers import relative
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import liteboost_adaptor

STEPS = 4
_T5 = T5Config(d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=1, vocab_size=256)


def of_families(names: list[str], kinds: list[dict[str, int]], length: int) -> dict[str, Any]:
    """Each family by one process, and by ranks that share its prompts under sizes of each kind.

    A fault is a result, too, if all ranks have it.
    """
    _quiet()
    found: dict[str, Any] = {}
    for name in names:
        for sizes in kinds:
            try:
                found[f"{name} {sizes}"] = _of_family(name, sizes, length)
            except Exception as fault:  # noqa: BLE001 - reported by the test
                found[f"{name} {sizes}"] = {"fault": f"{type(fault).__name__}: {fault}"[:600]}
    return found


@torch.no_grad()
def _of_family(name: str, sizes: dict[str, int], length: int) -> dict[str, Any]:
    _under()
    model = tiny_models.build(name)
    plain = dict(tiny_models.example_inputs(model, batch=1, length=length))
    padded = dict(tiny_models.example_inputs(model, batch=3, padding=3, length=length))
    mask = padded.get("attention_mask")
    counted = slice(None) if mask is None else mask.bool()  # what stands at padding means nothing
    alone = [families.decode(model, each, STEPS) for each in (plain, padded)]
    whole = model(**padded).logits
    held = sum(parameter.numel() for parameter in model.parameters())
    _under(**sizes)
    liteboost_adaptor.shard(model)
    shared = [
        families.decode(model, each, STEPS, forced=one[0])
        for each, one in zip((plain, padded), alone, strict=True)
    ]
    return {
        "tokens": all(
            torch.equal(b[1].argmax(-1), a[1].argmax(-1)) for a, b in zip(alone, shared, strict=True)
        ),
        "distances": [
            *(relative(b[1], a[1]) for a, b in zip(alone, shared, strict=True)),
            relative(model(**padded).logits[counted], whole[counted]),
        ],
        "held": sum(parameter.numel() for parameter in model.parameters()) / held,
    }


def _under(**sizes: int) -> None:
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(**sizes)


@torch.no_grad()
def behaviour(sizes: dict[str, int]) -> dict[str, Any]:
    """What else may be done with a model whose prompts are shared."""
    _quiet()
    _under()
    model = tiny_models.build("llama")
    inputs = dict(tiny_models.example_inputs(model, batch=2, padding=3, length=21))
    ids = inputs["input_ids"][1:]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    model.generation_config = GenerationConfig(pad_token_id=0)

    def results() -> dict[str, Any]:
        beams = model.generate(**inputs, **settings, num_beams=3)
        short = model.generate(ids[:, :1], **settings)
        first = model(ids[:, :13], use_cache=True)
        between = model(ids[:, 13:15], past_key_values=first.past_key_values)
        second = model(ids[:, 15:], past_key_values=first.past_key_values)
        embedded = model.get_input_embeddings()(ids)
        states = model(inputs_embeds=embedded, output_hidden_states=True)
        return {
            "beams": beams.tolist(),
            "short": short.tolist(),
            "second turn": torch.cat([first.logits, between.logits, second.logits], 1),
            "states": torch.cat(states.hidden_states, -1),
            "without a cache": model(ids, use_cache=False).logits,
            "last three": model(ids, logits_to_keep=3).logits,
            "no cache": model(ids, use_cache=False).past_key_values is None,
            "long": model.generate(ids, **settings | {"max_new_tokens": 45}).tolist(),
        }

    alone = results()
    _under(**sizes)
    liteboost_adaptor.shard(model)
    shared = results()
    found: dict[str, Any] = {
        name: relative(shared[name], one) if isinstance(one, torch.Tensor) else shared[name] == one
        for name, one in alone.items()
    }
    torch.manual_seed(int(os.environ["RANK"]))  # each rank would draw something else
    found["sampled"] = model.generate(**inputs, do_sample=True, max_new_tokens=8).tolist()
    cache = model(ids, use_cache=True).past_key_values
    found["held"] = cache.layers[0].keys.shape[2]
    found["seen"] = cache.get_seq_length()
    found["copied"] = torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    found["rounding"] = _rounding(sizes, ids)
    found["refused"] = _refusals(model, ids)
    return found


def _rounding(sizes: dict[str, int], ids: torch.Tensor) -> dict[str, float]:
    """How far bf16 is from fp32, by one process and with a prompt that is shared."""
    _under()
    model = tiny_models.build("llama")
    exact = model(ids).logits
    model.to(torch.bfloat16)
    alone = model(ids).logits.float()
    _under(**sizes)
    liteboost_adaptor.shard(model)
    shared = model(ids).logits.float()
    return {"alone": (alone - exact).norm().item(), "shared": (shared - exact).norm().item()}


def _refusals(model: Any, ids: torch.Tensor) -> dict[str, str]:
    found = {
        "static cache": _raised(lambda: model.generate(ids, max_new_tokens=2, cache_implementation="static")),
        "attentions": _raised(lambda: model(ids, output_attentions=True)),
        "labels": _raised(lambda: model(ids, labels=ids)),
        "positions": _raised(lambda: model(ids, cu_seq_lens_q=ids[0])),
    }
    with torch.enable_grad():
        found["grad mode"] = _raised(lambda: model(ids))
    # After what was refused a prompt is served as before.
    found["afterwards"] = _raised(lambda: model(ids))
    liteboost_adaptor.undo()
    found["undone"] = _raised(lambda: model(ids))
    return found


def refused(names: list[str], sizes: dict[str, int]) -> dict[str, str]:
    """What is said of families that mix tokens elsewhere."""
    _quiet()
    found = {}
    for name in names:
        _under(**sizes)
        model = T5ForConditionalGeneration(_T5).eval() if name == "t5" else tiny_models.build(name.split()[0])
        if name.endswith("window in the cache"):
            model.config.sliding_window = 8

        def prompt(model: Any = model) -> None:
            liteboost_adaptor.shard(model)
            model.generate(**tiny_models.example_inputs(model, length=21), max_new_tokens=2)

        found[name] = _raised(prompt)
    return found


@torch.no_grad()
def last_loop(sizes: dict[str, int]) -> dict[str, Any]:
    """Loops of which the last alone writes to the cache: a prompt that nothing follows, and a text."""
    _quiet()
    _under()
    model = tiny_models.build("dory")
    model.config.recurrent_kv_cache_mode = "last_loop"
    inputs = dict(tiny_models.example_inputs(model, length=21))
    alone = model(**inputs, use_cache=False).logits
    _under(**sizes)
    liteboost_adaptor.shard(model)
    return {
        "distance": relative(model(**inputs, use_cache=False).logits, alone),
        "refused": _raised(lambda: model.generate(**inputs, max_new_tokens=2)),
    }


@torch.no_grad()
def long_prompt(sizes: dict[str, int], length: int) -> dict[str, Any]:
    """A long prompt: logits of its last token and tokens behind it, and the memory the prompt takes."""
    _quiet()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=256,
    )
    ids = torch.randint(32, 200, (1, length), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "pad_token_id": 0}

    def run(**sizes: int) -> tuple[Any, int]:
        _under(**sizes)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.generation_config = GenerationConfig(pad_token_id=0, return_dict_in_generate=True)
        if sizes:
            liteboost_adaptor.shard(model)
        model.generate(ids[:, :64], **settings)  # what is set up at a first call is no activation
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be seen
        with Peak() as peak:
            result = model.generate(ids, **settings)
        return result, peak.grown

    shared, bytes_shared = run(**sizes)
    alone, bytes_alone = run()
    return {
        "tokens": torch.equal(alone.sequences, shared.sequences),
        "distance": relative(torch.stack(shared.logits), torch.stack(alone.logits)),
        "bytes": [bytes_alone, bytes_shared],
    }


@torch.no_grad()
def kv8(names: list[str], kinds: list[dict[str, int]], length: int) -> dict[str, Any]:
    """A cache of integers in ranks and in one process: how far their logits are apart, and from values'."""
    _quiet()
    found = {}
    for name in names:
        model = tiny_models.build(name)
        inputs = dict(tiny_models.example_inputs(model, batch=3, padding=3, length=length))
        _under()
        tokens, plain = families.decode(model, inputs, 2 * STEPS)
        _under(quant="kv8")
        alone = families.decode(model, inputs, 2 * STEPS, forced=tokens)[1]
        for sizes in kinds:
            model = tiny_models.build(name)
            _under(quant="kv8", **sizes)
            liteboost_adaptor.shard(model)
            with served() as calls:
                logits = families.decode(model, inputs, 2 * STEPS, forced=tokens)[1]
            found[f"{name} {sizes}"] = {
                "distance": relative(logits, alone),
                "effect": relative(plain, alone),
                "served": calls.rules["cache.int8"],
            }
    return found
