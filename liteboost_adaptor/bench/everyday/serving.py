"""Scripts that use one decoder again and again: chats, batches, evaluation, training between texts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from .inputs import decoder, prompt, tokenizer, words
from .script import Script, tokens


def _chat(folder: Path) -> Iterable[float]:
    """Each turn reads the whole conversation again."""
    model, made, messages = decoder(folder), tokenizer(), []
    for turn in range(8):
        messages.append({"role": "user", "content": words(12, seed=turn)})
        inputs = made.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        inputs.pop("token_type_ids", None)
        ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        answer = made.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return tokens(ids)


def _chat_with_cache(folder: Path) -> Iterable[float]:
    """The cache is kept from turn to turn."""
    from transformers import DynamicCache

    model = decoder(folder)
    cache, ids = DynamicCache(config=model.config), prompt(1, 0)
    for turn in range(8):
        ids = torch.cat([ids, prompt(1, 12, seed=turn)], dim=1)
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
    return tokens(ids)


def _batches(folder: Path) -> Iterable[float]:
    model, found = decoder(folder), []
    for rows in (1, 2, 3, 4, 5, 6, 7, 8):
        found += tokens(model.generate(prompt(rows, 16), max_new_tokens=24, do_sample=False))
    return found


def _padded_batches(folder: Path) -> Iterable[float]:
    model, made, found = decoder(folder), tokenizer(), []
    for rows in (6, 6, 3):
        texts = [words(4 + 3 * row, seed=row) for row in range(rows)]
        inputs = made(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        found += tokens(model.generate(**inputs, max_new_tokens=40, do_sample=False))
    return found


def _many_short(folder: Path) -> Iterable[float]:
    model, found = decoder(folder), []
    for text in range(20):
        found += tokens(model.generate(prompt(1, 10 + text), max_new_tokens=10, do_sample=False))
    return found


def _log_likelihoods(folder: Path) -> Iterable[float]:
    """As an evaluation harness asks for them: batches of requests, longest first."""
    model, found = decoder(folder), []
    for request in range(16):
        ids = prompt(4, 128 - 4 * request, seed=request)
        with torch.no_grad():
            logits = model(ids).logits.log_softmax(-1)
        found += tokens(logits[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2)))
    return found


def _offload(folder: Path) -> Iterable[float]:
    layers = {f"model.layers.{at}": "disk" if at > 9 else "cpu" for at in range(12)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    with tempfile.TemporaryDirectory() as aside:
        model = decoder(folder, device_map=layers | rest, offload_folder=aside)
        return tokens(model.generate(prompt(1, 24), max_new_tokens=60, do_sample=False))


def _grpo(folder: Path) -> Iterable[float]:
    """Groups of samples, and a step of the optimizer by them."""
    model = decoder(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(0)
    for step in range(2):
        ids = model.generate(
            prompt(2, 16, seed=step), max_new_tokens=40, do_sample=True, num_return_sequences=4
        )
        logits = model(ids).logits[:, 15:-1].log_softmax(-1)
        chosen = logits.gather(-1, ids[:, 16:, None])[..., 0].sum(-1)
        rewards = (ids[:, 16:] % 2).float().mean(-1)
        loss = -((rewards - rewards.mean()) * chosen).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tokens(ids)


SCRIPTS = {
    "chat": Script("decoder", _chat, "8 turns, each reads all before"),
    "chat-with-cache": Script("decoder", _chat_with_cache, "8 turns that keep their cache"),
    "batches": Script("decoder", _batches, "1 to 8 texts at once, in turn"),
    "padded-batches": Script("decoder", _padded_batches, "texts of other lengths, padded"),
    "many-short": Script("decoder", _many_short, "20 texts of 10 tokens"),
    "log-likelihoods": Script("decoder", _log_likelihoods, "an evaluation's requests, no cache"),
    "offload": Script("decoder", _offload, "two of 12 layers on disk (accelerate)"),
    "grpo": Script("decoder", _grpo, "groups of samples, then a step of the optimizer"),
}
