"""Decoding: sampling, beams, contrastive, assisted and prompt-lookup search, streamers, pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import numbers, tiny_models
from support.ways import FAMILIES, compare, families

import liteboost_adaptor

#: Families whose cache can be rolled back, which assistants and prompt lookup need.
ROLLED_BACK = ("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "gpt_oss", "deepseek_v3")
CONTRASTIVE = Path(__file__).parent / "contrastive_search"


def generate(model: torch.nn.Module, inputs: dict[str, Any], **settings: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **settings}
    return model.generate(**inputs, **settings)


@families(*FAMILIES)
def test_sampling_with_a_seed(family: str, level: int) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return generate(model, inputs, do_sample=True, temperature=0.8, top_k=50, top_p=0.95)

    runs = compare(model, level, run)
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0 and runs.served.kinds["linear"] > 0


@families(*FAMILIES)
def test_beam_search(family: str, level: int) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        settings = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
        out = generate(model, inputs, return_dict_in_generate=True, **settings)
        return out.sequences, out.sequences_scores

    runs = compare(model, level, run)
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0


@pytest.mark.parametrize(
    "settings",
    [{"use_cache": False}, {"prefill_chunk_size": 4}],
    ids=["without a cache", "in chunks"],
)
@families("llama", "gemma2", "gpt_oss")
def test_prompts_and_steps_in_other_pieces(family: str, settings: dict[str, Any]) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)
    runs = compare(model, 2, lambda: generate(model, inputs, **settings))
    runs.assert_close()
    assert runs.served.kinds["attention"] > 0


@pytest.mark.usefixtures("modules_cache")
@families("llama", "gpt2", "gemma2", "mixtral", "gpt_neox", "gpt_oss", "deepseek_v3")
def test_contrastive_search(family: str, level: int) -> None:
    model = tiny_models.build(family)
    inputs = numbers.padded_inputs(model)

    def run() -> torch.Tensor:
        settings = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 6}
        return model.generate(**inputs, **settings, custom_generate=str(CONTRASTIVE), trust_remote_code=True)

    runs = compare(model, level, run)
    assert runs.expected.shape[1] == inputs["input_ids"].shape[1] + 6
    assert not torch.equal(runs.expected, generate(model, inputs)), "the search is greedy"
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0


@pytest.mark.parametrize("helper", ["an assistant", "prompt lookup"])
@families(*ROLLED_BACK)
def test_assisted_decoding(family: str, helper: str, level: int) -> None:
    model, assistant = tiny_models.build(family), tiny_models.build(family, seed=5)
    inputs = tiny_models.example_inputs(model, batch=1)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 2)  # something to look up
    inputs["attention_mask"] = inputs["attention_mask"].repeat(1, 2)
    settings = {"assistant_model": assistant} if helper == "an assistant" else {"prompt_lookup_num_tokens": 3}

    runs = compare(model, level, lambda: numbers.greedy(model, inputs, **settings))
    runs.assert_same_text()
    assert torch.equal(runs.expected.tokens, numbers.greedy(model, inputs).tokens)
    assert runs.served.kinds["attention"] > 0


def test_an_assistant_that_is_served_itself() -> None:
    model, assistant = tiny_models.build("llama"), tiny_models.build("llama", seed=5)
    inputs = tiny_models.example_inputs(model, batch=1)
    expected = generate(model, inputs, assistant_model=assistant)
    liteboost_adaptor.apply(model)
    liteboost_adaptor.apply(assistant)
    assert torch.equal(generate(model, inputs, assistant_model=assistant), expected)


@families(*FAMILIES)
def test_streamers(family: str, level: int) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Collected(BaseStreamer):
        def __init__(self) -> None:
            self.pieces: list[torch.Tensor] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.pieces.append(value.reshape(-1).clone())

        def end(self) -> None:
            self.ended = True

    model = tiny_models.build(family)
    inputs = tiny_models.example_inputs(model, batch=1)

    def run() -> list[torch.Tensor]:
        streamer = Collected()
        tokens = generate(model, inputs, streamer=streamer)
        assert streamer.ended and torch.equal(torch.cat(streamer.pieces), tokens[0])
        return streamer.pieces

    runs = compare(model, level, run)
    assert len(runs.found) == 7  # the prompt and each token
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0


def word_tokenizer(size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


@families(*FAMILIES)
def test_pipeline(family: str, level: int) -> None:
    from transformers import pipeline

    model = tiny_models.build(family)
    tokenizer = word_tokenizer(model.config.get_text_config().vocab_size)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["w40 w41 w42 w43 w44", "w77 w90"]

    def run() -> list[torch.Tensor]:
        found = made(prompts, batch_size=2, max_new_tokens=5, do_sample=False, return_tensors=True)
        return [torch.tensor(answer[0]["generated_token_ids"]) for answer in found]

    runs = compare(model, level, run)
    assert all(len(answer) >= 5 for answer in runs.found)
    runs.assert_close()
    assert runs.served.kinds["norm"] > 0
