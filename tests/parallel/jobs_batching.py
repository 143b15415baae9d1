"""What ranks do to test continuous batching."""

from __future__ import annotations

import json
from typing import Any

import torch
from parallel.jobs import _quiet, _raised
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import liteboost_adaptor
from liteboost_adaptor.program import step

_TOKENS = 8
#: Of several lengths, one longer than a page.
LENGTHS = (3, 17, 40, 1, 9)


def prompts(vocabulary: int, shift: int = 0) -> list[list[int]]:
    return [[(7 * at + length + shift) % vocabulary for at in range(length)] for length in LENGTHS]


def _pages(seed: int | None = None) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(page_size=16, num_blocks=64, seed=seed)


def _batch(model: Any, inputs: list[list[int]], **settings: Any) -> list[list[int]]:
    config = GenerationConfig(
        max_new_tokens=_TOKENS, eos_token_id=-1, pad_token_id=0, **{"do_sample": False, **settings}
    )
    found = model.generate_batch(inputs, generation_config=config, continuous_batching_config=_pages(3))
    return [found[name].generated_tokens for name in sorted(found)]


def _by_hand(model: Any, inputs: list[list[int]]) -> list[list[int]]:
    """The texts of a manager that a script starts itself: rank 0's requests, with texts on all ranks."""
    config = GenerationConfig(max_new_tokens=_TOKENS, eos_token_id=-1, pad_token_id=0, do_sample=False)
    manager = model.init_continuous_batching(config, _pages())
    manager.start()
    manager.add_requests(inputs, max_new_tokens=_TOKENS)
    found: dict[str, list[int]] = {}
    while len(found) < len(inputs) and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[result.request_id] = result.generated_tokens
    manager.stop()
    return [found[name] for name in sorted(found)]


def texts(folder: str, names: list[str]) -> dict[str, Any]:
    """Texts of families by one process, and by ranks that share the model."""
    _quiet()
    step.RECORDED_AT = 3  # texts are short
    found = {}
    for name in names:
        liteboost_adaptor.apply(tp=1)
        alone = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        inputs = prompts(alone.config.get_text_config().vocab_size)
        expected = _batch(alone, inputs)
        liteboost_adaptor.undo()
        liteboost_adaptor.apply()
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        held = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in alone.parameters())
        found[name] = {"held": held, "expected": expected, "found": _batch(model, inputs)}
        liteboost_adaptor.undo()
    return found


def behaviour(folder: str) -> dict[str, Any]:
    """Sampling, managers started by hand, and ranks that were given different prompts."""
    expected = texts(folder, ["llama"])["llama"]
    liteboost_adaptor.apply()
    model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/llama")
    inputs = prompts(model.config.vocab_size)
    found = {**expected, "sampled": _batch(model, inputs, do_sample=True, temperature=2.0)}
    rank = torch.distributed.get_rank()
    found["by hand"] = _by_hand(model, inputs)
    found["other prompts"] = _raised(lambda: _batch(model, prompts(model.config.vocab_size, rank)))
    # Of which printing leaves out the middle, where they differ.
    long = [torch.zeros(2000, dtype=torch.long) for _ in inputs]
    long[0][1000] = rank
    found["other tensors"] = _raised(lambda: _batch(model, long))
    other = GenerationConfig(max_new_tokens=2 + rank, eos_token_id=-1, pad_token_id=0, do_sample=False)
    found["other settings"] = [
        _raised(lambda: model.generate_batch(inputs, other)),
        _raised(lambda: model.init_continuous_batching(other, _pages())),
        _raised(lambda: model.generate_batch(inputs, continuous_batching_config=_pages(rank))),
    ]
    found["after"] = _batch(model, inputs)
    rules = json.loads(liteboost_adaptor.status().to_json())["rules"]
    found["paged"] = sum(rule["calls"] for rule in rules if rule["id"].startswith("paged."))
    found["recorded"] = sum(rule["calls"] for rule in rules if rule["id"] == "step.program")
    return found


def apart(folder: str, by_hand: bool) -> dict[str, Any]:
    """What each rank gets that was given prompts of its own, where nobody has asked for shards."""
    _quiet()
    liteboost_adaptor.apply(tp=1)
    alone: Any = AutoModelForCausalLM.from_pretrained(folder)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = prompts(alone.config.vocab_size, torch.distributed.get_rank())
    expected = _batch(alone, inputs)
    return {"expected": expected, "found": (_by_hand if by_hand else _batch)(model, inputs)}
