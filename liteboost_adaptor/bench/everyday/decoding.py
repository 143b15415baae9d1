"""Scripts that generate text, in the ways of ``generate`` and by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from .inputs import decoder, prompt, tokenizer
from .script import Script, numbers_of, tokens


def _generate(folder: Path, rows: int = 1, length: int = 24, **options: Any) -> Iterable[float]:
    options.setdefault("max_new_tokens", 240)
    torch.manual_seed(0)
    return tokens(decoder(folder).generate(prompt(rows, length), **options))


def _short(folder: Path) -> Iterable[float]:
    return _generate(folder, max_new_tokens=20, do_sample=False)


def _greedy(folder: Path) -> Iterable[float]:
    return _generate(folder, do_sample=False)


def _long(folder: Path) -> Iterable[float]:
    return _generate(folder, max_new_tokens=400, do_sample=False)


def _sampling(folder: Path) -> Iterable[float]:
    return _generate(folder, do_sample=True, top_p=0.9, temperature=0.8)


def _beams(folder: Path) -> Iterable[float]:
    return _generate(folder, num_beams=4, do_sample=False, max_new_tokens=100)


def _beam_sampling(folder: Path) -> Iterable[float]:
    return _generate(folder, num_beams=3, do_sample=True, max_new_tokens=100)


def _several_samples(folder: Path) -> Iterable[float]:
    return _generate(folder, do_sample=True, num_return_sequences=6)


def _static_cache(folder: Path) -> Iterable[float]:
    # `generate` would compile the forward, which is another benchmark.
    return _generate(folder, do_sample=False, cache_implementation="static", disable_compile=True)


def _prompt_lookup(folder: Path) -> Iterable[float]:
    return _generate(folder, do_sample=False, prompt_lookup_num_tokens=4, max_new_tokens=80)


def _stop_strings(folder: Path) -> Iterable[float]:
    return _generate(folder, do_sample=False, stop_strings=["w5 w5 w5"], tokenizer=tokenizer())


def _scores(folder: Path) -> Iterable[float]:
    options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    found = decoder(folder).generate(prompt(1, 24), max_new_tokens=240, **options)
    return tokens(found.sequences)


def _hidden_states_once(folder: Path) -> Iterable[float]:
    model = decoder(folder)
    model.generate(prompt(1, 24), max_new_tokens=60, do_sample=False)
    with torch.no_grad():
        model(prompt(1, 24), output_hidden_states=True)
    return tokens(model.generate(prompt(1, 24), max_new_tokens=100, do_sample=False))


def _streaming(folder: Path) -> Iterable[float]:
    from transformers import TextIteratorStreamer

    model, made = decoder(folder), tokenizer()
    streamer = TextIteratorStreamer(made, skip_prompt=True)
    options = {"max_new_tokens": 240, "do_sample": False, "streamer": streamer}
    thread = Thread(target=model.generate, args=(prompt(1, 24),), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return numbers_of(text)


def _by_hand(folder: Path) -> Iterable[float]:
    model, ids = decoder(folder), prompt(1, 24)
    found = []
    with torch.inference_mode():
        result = model(ids, use_cache=True)
        for _ in range(240):
            token = result.logits[:, -1:].argmax(-1)
            found.append(float(token))
            result = model(token, past_key_values=result.past_key_values, use_cache=True)
    return found


def _autocast(folder: Path) -> Iterable[float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids = _generate(folder, do_sample=False, max_new_tokens=120)
    return [float(len(list(ids)))]  # two roundings of bfloat16 may choose two tokens


def _bfloat16(folder: Path) -> Iterable[float]:
    model = decoder(folder, dtype=torch.bfloat16)
    ids = model.generate(prompt(1, 24), max_new_tokens=240, do_sample=False)
    return [float(ids.numel())]


SCRIPTS = {
    "short": Script("decoder", _short, "`generate`, 20 tokens once"),
    "greedy": Script("decoder", _greedy, "`generate`, 240 tokens"),
    "long": Script("decoder", _long, "`generate`, 400 tokens"),
    "bfloat16": Script("decoder", _bfloat16, "`generate` in bfloat16, 240 tokens"),
    "sampling": Script("decoder", _sampling, "`do_sample=True, top_p=0.9`"),
    "beams": Script("decoder", _beams, "`num_beams=4`"),
    "beam-sampling": Script("decoder", _beam_sampling, "`num_beams=3, do_sample=True`"),
    "several-samples": Script("decoder", _several_samples, "`num_return_sequences=6`"),
    "static-cache": Script("decoder", _static_cache, '`cache_implementation="static"`, not compiled'),
    "prompt-lookup": Script("decoder", _prompt_lookup, "`prompt_lookup_num_tokens=4`"),
    "stop-strings": Script("decoder", _stop_strings, "`stop_strings`"),
    "scores": Script("decoder", _scores, "`output_scores=True`"),
    "hidden-states-once": Script("decoder", _hidden_states_once, "`output_hidden_states=True` between texts"),
    "streaming": Script("decoder", _streaming, "`TextIteratorStreamer` and a thread"),
    "by-hand": Script("decoder", _by_hand, "a loop over `forward`"),
    "autocast": Script("decoder", _autocast, "`generate` under `torch.autocast`"),
}
