"""What ranks do to test data parallelism."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from parallel.jobs import _quiet, _raised
from support import tiny_models
from support.numbers import relative
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

import liteboost_adaptor

#: A token that greedy text of the tiny model runs into, so that rows end at different lengths.
PAD = 0


def _rows(model: torch.nn.Module, batch: int, padding: int = 3) -> dict[str, torch.Tensor]:
    return dict(tiny_models.example_inputs(model, batch=batch, padding=padding))


def _both(
    alone: Any, shared: Any, inputs: dict[str, torch.Tensor], **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD, **settings}
    one, all_ranks = (model.generate(**inputs, **settings) for model in (alone, shared))
    return getattr(one, "sequences", one), getattr(all_ranks, "sequences", all_ranks)


def _ending(alone: Any, inputs: dict[str, torch.Tensor]) -> int:
    """A token at which the first row of greedy text ends and the last does not, as far as there is one."""
    text = alone.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    text = getattr(text, "sequences", text)[:, -6:]
    first, last = set(text[0, :3].tolist()), set(text[-1].tolist())
    return min(first - last, default=int(text[0, 0]))


def replicas(folder: str, files: str = "") -> dict[str, Any]:
    """Batches of all kinds, by one process and by replicas that share their rows, loaded from ``files``."""
    _quiet()
    liteboost_adaptor.apply(tp=1, dp=1, sp=1, cp=1)
    alone = AutoModelForCausalLM.from_pretrained(folder)
    alone.generation_config = GenerationConfig(pad_token_id=PAD)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply()
    model = AutoModelForCausalLM.from_pretrained(files or folder)
    model.generation_config = GenerationConfig(pad_token_id=PAD)
    found: dict[str, Any] = {"held": sum(p.numel() for p in model.parameters())}
    found["rows"] = []
    model.forward = _counted(model.forward, found["rows"])
    for batch in (1, 2, 3, 5):
        inputs = _rows(alone, batch)
        found["rows"].clear()
        one, shared = _both(alone, model, inputs)
        found[f"batch {batch}"] = torch.equal(one, shared)
        found[f"own rows of {batch}"] = max(found["rows"], default=0)
    inputs = _rows(alone, 3)
    found["positional"] = torch.equal(
        alone.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False),
        model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False),
    )
    end = _ending(alone, inputs)
    one, shared = _both(alone, model, inputs, eos_token_id=end)
    found["ends"] = [one.tolist(), shared.tolist()]
    one, shared = _both(alone, model, inputs, num_beams=3, num_return_sequences=2)
    found["beams"] = torch.equal(one, shared)
    found["dicts"] = _dicts(alone, model, inputs)
    found["sampled"] = _sampled(model, inputs)
    found["other inputs"] = _raised(
        lambda: model.generate(inputs["input_ids"] + torch.distributed.get_rank(), max_new_tokens=2)
    )
    rank = torch.distributed.get_rank()
    first = inputs["input_ids"][:1]
    own = {} if rank else {"streamer": TextStreamer(None)}
    found["a streamer of one"] = _raised(lambda: model.generate(first, max_new_tokens=2, **own))
    found["whole"] = _whole(alone, model, inputs)
    model.save_pretrained(Path(folder) / "saved")
    found["after"] = torch.equal(*_both(alone, model, inputs))
    return found


def _counted(forward: Any, rows: list[int]) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        rows.append(ids.shape[0])
        return forward(*args, **kwargs)

    return counting


def _dicts(alone: Any, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    scored = settings | {"output_scores": True, "output_logits": True}
    one, shared = (each.generate(**inputs, **scored) for each in (alone, model))
    beams = settings | {"num_beams": 2, "output_scores": True}
    beam, beam_shared = (each.generate(**inputs, **beams) for each in (alone, model))
    return {
        "same class": type(one).__name__ == type(shared).__name__,
        "sequences": torch.equal(one.sequences, shared.sequences),
        "scores": max(relative(b, a) for a, b in zip(one.scores, shared.scores, strict=True)),
        "logits": max(relative(b, a) for a, b in zip(one.logits, shared.logits, strict=True)),
        "steps": len(shared.scores),
        "no cache": shared.past_key_values is None,
        "beam indices": torch.equal(beam.beam_indices, beam_shared.beam_indices),
        "beam scores": relative(beam_shared.sequences_scores, beam.sequences_scores),
    }


def _sampled(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What is drawn for the same prompt in every row, twice, and the state of the generator afterwards."""
    same = {name: value[:1].repeat(4, 1) for name, value in inputs.items()}
    torch.manual_seed(torch.distributed.get_rank())
    drawn = []
    for _ in range(2):
        text = model.generate(**same, do_sample=True, max_new_tokens=8)
        drawn.append(getattr(text, "sequences", text)[:, -8:].tolist())
    return {"drawn": drawn, "next": torch.rand(1).item()}


def _whole(alone: Any, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What cannot be shared out is done by every replica, and the status says so."""

    class Lines(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    first = {name: value[:1] for name, value in inputs.items()}
    streamer = Lines()
    one, shared = _both(alone, model, first)
    streamed = model.generate(**first, streamer=streamer, max_new_tokens=6, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = model.generate(
            **inputs, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
        )
    notes = " ".join(liteboost_adaptor.status().environment)
    return {
        "streamed": torch.equal(one, streamed) and torch.equal(one, shared),
        "tokens": streamer.tokens == streamed[0].tolist(),
        "rows of states": states.hidden_states[0][0].shape[0],
        "noted": "streamer is given" in notes and "output_hidden_states is given" in notes,
    }


def sizes() -> list[str]:
    """What is said of sizes that do not multiply to two processes."""
    _quiet()
    found = []
    for wanted in ({"dp": 3}, {"tp": 2, "dp": 2}, {"sp": 2, "cp": 2}, {"tp": 1, "cp": 4}):
        liteboost_adaptor.undo()
        liteboost_adaptor.apply(**wanted)
        found.append(_raised(lambda: liteboost_adaptor.shard(tiny_models.build("llama"))))
    return found
