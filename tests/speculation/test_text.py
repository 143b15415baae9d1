"""The text with speculation is the text without: families, ends, streams, results, kept caches, threads."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
from support import tiny_models
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import liteboost_adaptor
from liteboost_adaptor.huggingface.speculation import loop

from .speculating import HAS_PREFILL, NEW_TOKENS, Counts, both, repeating, served_here, settings, text

pytestmark = served_here
FAMILIES = ("llama", "qwen3", "gpt2", "gpt_neox", "phi", "mixtral", "deepseek_v3")


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


def other(ids: torch.Tensor) -> torch.Tensor:
    """A prompt of the same length in which nothing repeats."""
    return torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(5))[None] + 32


def spread(model: nn.Module) -> nn.Module:
    """``model`` with weights by which it says something else each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()


@pytest.mark.parametrize("kind", ["repeating", "other"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_same(family: str, kind: str) -> None:
    model = tiny_models.build(family, seed=1)
    ids = repeating() if kind == "repeating" else other(repeating(times=3))
    counts = Counts()
    expected, found = both(model, ids)
    assert counts.served == 1 and not counts.reasons
    assert torch.equal(found, expected)
    assert counts.proposed >= counts.accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [2, 5, 8, 16, 17])
def test_prompts_have_the_bits_that_they_have_without(length: int, dtype: torch.dtype) -> None:
    """Also those as short as a step with candidates, and what is called beside `generate`."""
    model = tiny_models.build("llama", seed=1).to(dtype)
    ids = repeating()[:, :length]
    expected, found = both(model, ids, output_logits=True, return_dict_in_generate=True)
    assert all(torch.equal(a, b) for a, b in zip(expected.logits, found.logits, strict=True))
    with torch.no_grad():
        scored = model(ids).logits
        liteboost_adaptor.apply(model, speculate="off")
        assert torch.equal(model(ids).logits, scored)


def test_candidates_that_the_model_cannot_say() -> None:
    """An encoder that has read tokens the decoder has not, and placeholders of what a kept cache has read."""
    sides = {"layers": 1, "ffn_dim": 32, "attention_heads": 2}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    tokens = {"vocab_size": 300, "decoder_vocab_size": 20, "pad_token_id": 0, "decoder_start_token_id": 0}
    apart = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    config = MarianConfig(d_model=32, max_position_embeddings=2048, **sizes, **tokens, **apart)
    model = spread(MarianMTModel(config))
    pairs = torch.tensor([[token for x in range(20) for y in range(20) for token in (x, y, 250)]])
    counts = Counts()
    expected, found = both(model, pairs)
    assert torch.equal(found, expected) and counts.served == 1

    decoder = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = spread(LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=32, **decoder)))

    def behind_placeholders(speculate: str) -> torch.Tensor:
        liteboost_adaptor.apply(model, speculate=speculate)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs_embeds=model.model.embed_tokens(pairs.clamp(max=19)), past_key_values=cache)
        ids = torch.cat([torch.where(pairs < 20, pairs, -200), torch.tensor([[3, 4, 5]])], 1)
        return text(model, ids, past_key_values=cache)

    assert torch.equal(behind_placeholders("lookup"), behind_placeholders("off"))


def test_candidates_are_accepted(llama: nn.Module) -> None:
    """A tiny model goes round in its text, which is what a lookup finds."""
    counts = Counts()
    expected, found = both(llama, repeating(), max_new_tokens=120)
    assert torch.equal(found, expected)
    assert counts.accepted > 60 and counts.steps < 60


def test_steps_that_check_nothing_are_recorded_ones(llama: nn.Module) -> None:
    """Between candidates a step is that of `_sample`: the same program serves it."""
    from liteboost_adaptor.report import report

    liteboost_adaptor.apply(llama, speculate="lookup")
    text(llama, other(repeating(times=2)))
    before = report.counter("step.program").calls
    text(llama, other(repeating(times=2)))
    assert report.counter("step.program").calls > before


@pytest.fixture(scope="module")
def t5() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    config = T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return spread(T5ForConditionalGeneration(config))


def test_an_encoder_decoder(t5: nn.Module) -> None:
    counts = Counts()
    expected, found = both(t5, repeating(90), max_new_tokens=60)
    assert torch.equal(found, expected)
    assert counts.served == 1 and counts.steps > 0


def test_what_the_encoder_reads_is_looked_up(t5: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from liteboost_adaptor.huggingface.speculation import candidates

    read: list[list[int]] = []
    original = candidates.LookupCandidates.__init__

    def init(self: Any, max_length: int, eos: Any, verified: int, source: list[int], pace: Any) -> None:
        read.append(source)
        original(self, max_length, eos, verified, source, pace)

    monkeypatch.setattr(candidates.LookupCandidates, "__init__", init)
    ids = repeating(90)
    both(t5, ids)
    assert read == [ids[0].tolist()]


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())
        self.shapes.append(tuple(value.shape))

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_the_same(llama: nn.Module) -> None:
    heard = []
    for speculate in ("off", "lookup"):
        liteboost_adaptor.apply(llama, speculate=speculate)
        streamer = Collected()
        text(llama, repeating(), streamer=streamer)
        heard.append((streamer.pieces, streamer.shapes, streamer.ended))
    assert heard[0] == heard[1]
    assert len(heard[0][0]) == NEW_TOKENS + 1


class StopBehind(StoppingCriteria):
    """Stops behind so many tokens in all, and notes what it is asked about."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked.append((input_ids.shape[1], None if scores is None else len(scores)))
        return torch.full((1,), input_ids.shape[1] >= self.length, dtype=torch.bool)


@pytest.mark.parametrize("behind", range(20, 36))
def test_what_stops_inside_an_accepted_run_stops_there(llama: nn.Module, behind: int) -> None:
    ids = repeating()
    asked, results, streamed = [], [], []
    for speculate in ("off", "lookup"):
        liteboost_adaptor.apply(llama, speculate=speculate)
        stop, streamer = StopBehind(ids.shape[1] + behind), Collected()
        more = {"stopping_criteria": StoppingCriteriaList([stop]), "streamer": streamer}
        more |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        result = text(llama, ids, **more)
        asked.append(stop.asked)
        results.append(result)
        streamed.append((streamer.pieces, streamer.ended))
    expected, found = results
    assert torch.equal(found.sequences, expected.sequences)
    assert found.sequences.shape[1] == ids.shape[1] + behind
    assert asked[0] == asked[1] and streamed[0] == streamed[1]
    assert len(found.scores) == len(found.logits) == behind
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


class Raises(Collected):
    """Raises when it hears a piece for this time."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error = at, error

    def put(self, value: torch.Tensor) -> None:
        if len(self.pieces) == self.at:
            raise self.error
        super().put(value)


class RaisesBehind(StopBehind):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("behind", [2, 5, 12, 17, 20, 25, 33])
@pytest.mark.parametrize("kind", ["streamer", "criterion"])
def test_a_kept_cache_goes_on_where_a_text_was_interrupted(llama: nn.Module, kind: str, behind: int) -> None:
    ids = repeating()
    results, counts = [], Counts()
    for speculate in ("off", "lookup"):
        liteboost_adaptor.apply(llama, speculate=speculate)
        cache, streamer = DynamicCache(config=llama.config), Collected()
        more: dict[str, Any] = {"past_key_values": cache, "streamer": streamer}
        if kind == "streamer":
            more["streamer"] = streamer = Raises(behind, KeyboardInterrupt)
        else:
            more["stopping_criteria"] = StoppingCriteriaList([RaisesBehind(ids.shape[1] + behind)])
        with pytest.raises(KeyboardInterrupt):
            text(llama, ids, **more)
        kept = cache.get_seq_length()
        heard = torch.tensor([[token for piece in streamer.pieces for token in piece]])
        heard = torch.cat((heard, torch.tensor([[33, 34, 35]])), dim=1)
        results.append((kept, heard, text(llama, heard, past_key_values=cache)))
    (kept, heard, expected), (ours, also_heard, found) = results
    assert counts.served == 2
    assert ours == kept and torch.equal(also_heard, heard) and torch.equal(found, expected)


class StopsWhenHeard(StoppingCriteria):
    """Stops when a streamer has heard so many pieces."""

    def __init__(self, streamer: Collected, count: int) -> None:
        self.streamer, self.count = streamer, count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((1,), len(self.streamer.pieces) >= self.count)


@pytest.mark.parametrize("count", [3, 15, 20, 25])
def test_a_criterion_asks_what_the_streamer_has_heard(llama: nn.Module, count: int) -> None:
    results = []
    for speculate in ("off", "lookup"):
        liteboost_adaptor.apply(llama, speculate=speculate)
        streamer = Collected()
        criteria = StoppingCriteriaList([StopsWhenHeard(streamer, count)])
        found = text(llama, repeating(), streamer=streamer, stopping_criteria=criteria)
        results.append((found.tolist(), streamer.pieces))
    assert results[0] == results[1]


@pytest.mark.parametrize("hears_first", [False, True], ids=["criteria first", "streamer first"])
def test_a_streamer_and_criteria_take_turns(monkeypatch: pytest.MonkeyPatch, hears_first: bool) -> None:
    """In either order that a release has; the test above says which one this release has."""
    events: list[tuple[str, int]] = []

    class Notes(StopBehind):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            events.append(("asked", input_ids.shape[1]))
            return super().__call__(input_ids, scores, **kwargs)

    class Hears(Collected):
        def put(self, value: torch.Tensor) -> None:
            events.append(("heard", 1 + int(value)))

    monkeypatch.setattr(loop, "_HEARS_FIRST", hears_first)
    stops = loop.StopAtToken(StoppingCriteriaList([Notes(7)]), 4, Hears())
    stops.candidates = types.SimpleNamespace(verified=9)
    assert bool(stops(torch.arange(9)[None], None).all()) and stops.end == stops.checked == 7
    order = ("heard", "asked") if hears_first else ("asked", "heard")
    assert events == [(each, length) for length in (5, 6, 7) for each in order]


@pytest.mark.parametrize("count", range(17, 34))
def test_max_length_inside_an_accepted_run(llama: nn.Module, count: int) -> None:
    expected, found = both(llama, repeating(), max_new_tokens=count)
    assert torch.equal(found, expected) and found.shape[1] == repeating().shape[1] + count


def test_an_end_of_text_inside_an_accepted_run(llama: nn.Module) -> None:
    ids = repeating()
    liteboost_adaptor.apply(llama)
    plain = text(llama, ids)[0, ids.shape[1] :].tolist()
    ends = {token: plain.index(token) for token in plain[8:]}
    for token, at in ends.items():
        expected, found = both(llama, ids, eos_token_id=[token, 3])
        assert torch.equal(found, expected)
        assert found.shape[1] == ids.shape[1] + at + 1


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are letters."""
    letters = {chr(97 + at) if at < 26 else chr(0x100 + at): at for at in range(256)}
    made = Tokenizer(WordLevel(letters, unk_token="a"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_stop_strings_inside_an_accepted_run(llama: nn.Module, words: PreTrainedTokenizerFast) -> None:
    ids = repeating()
    liteboost_adaptor.apply(llama)
    plain = text(llama, ids)[0, ids.shape[1] :].tolist()
    for at in range(18, 36, 3):
        stop = words.decode(plain[at : at + 2]).replace(" ", "")
        expected, found = both(llama, ids, stop_strings=[stop], tokenizer=words)
        assert torch.equal(found, expected) and found.shape[1] < ids.shape[1] + NEW_TOKENS


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 30, "eos_token_id": 40},
        {"suppress_tokens": [33, 34, 35]},
        {"bad_words_ids": [[36], [37, 38]]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_processors_and_settings(llama: nn.Module, more: dict[str, Any]) -> None:
    counts = Counts()
    expected, found = both(llama, repeating(), **more)
    assert counts.served == 1 and torch.equal(found, expected)


def test_a_prompt_in_chunks(llama: nn.Module) -> None:
    """Releases that have a method for the prompt leave the chunks to it; in others the original runs."""
    counts = Counts()
    expected, found = both(llama, repeating(), prefill_chunk_size=7)
    assert torch.equal(found, expected)
    assert counts.served == HAS_PREFILL
    assert counts.reasons == ({} if HAS_PREFILL else {"prefill_chunk_size": 1})


def test_scores_are_those_without(llama: nn.Module) -> None:
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = both(llama, repeating(), **more)
    assert type(found) is type(expected)
    assert len(found.scores) == len(found.logits) == NEW_TOKENS
    for ours, theirs in zip(found.logits + found.scores, expected.logits + expected.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padding_before_the_prompt(llama: nn.Module) -> None:
    ids, mask = repeating(), torch.ones_like(repeating())
    mask[0, :5] = 0
    counts = Counts()
    expected, found = both(llama, ids, attention_mask=mask)
    assert counts.served == 1 and torch.equal(found, expected)


@pytest.mark.parametrize("gives_mask", [False, True], ids=["no mask", "a mask"])
def test_turns_of_a_chat_with_a_kept_cache(llama: nn.Module, gives_mask: bool) -> None:
    texts, lengths = [], []
    counts = Counts()
    for speculate in ("off", "lookup"):
        liteboost_adaptor.apply(llama, speculate=speculate)
        cache, ids = DynamicCache(config=llama.config), repeating()
        seen = []
        for turn in range(3):
            more = {"attention_mask": torch.ones_like(ids)} if gives_mask else {}
            out = text(llama, ids, past_key_values=cache, return_dict_in_generate=True, **more)
            assert out.past_key_values is cache
            seen.append(cache.get_seq_length())
            ids = torch.cat((out.sequences, repeating(times=1) + turn), dim=1)
        texts.append(out.sequences)
        lengths.append(seen)
    assert torch.equal(*texts) and lengths[0] == lengths[1]
    assert lengths[0][0] == repeating().shape[1] + NEW_TOKENS - 1
    assert counts.served == 3 and not counts.reasons


def test_the_users_settings_stay(llama: nn.Module) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(**settings())
    before = config.to_dict()
    liteboost_adaptor.apply(llama, speculate="lookup")
    own = llama.generation_config.to_dict()
    counts = Counts()
    llama.generate(repeating(), generation_config=config)
    assert counts.served == 1
    assert config.to_dict() == before and llama.generation_config.to_dict() == own


def test_two_threads_generate_at_once(llama: nn.Module) -> None:
    prompts = [repeating(), other(repeating()), repeating(70), repeating(80, 3)]
    liteboost_adaptor.apply(llama)
    expected = [text(llama, ids) for ids in prompts]
    liteboost_adaptor.apply(llama, speculate="lookup")
    found: dict[int, list[torch.Tensor]] = {}

    def work(at: int) -> None:
        found[at] = [text(llama, prompts[at]) for _ in range(4)]

    counts = Counts()
    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(each, expected[at]) for at, texts in found.items() for each in texts)
    assert len(found) == len(prompts) and counts.served == 16


def test_int8_keys_and_values(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, quant="kv8", speculate="off")
    expected = text(llama, repeating())
    liteboost_adaptor.apply(llama, quant="kv8", speculate="lookup")
    counts = Counts()
    assert torch.equal(text(llama, repeating()), expected)
    assert counts.served == 1 and counts.accepted


def test_bfloat16_chooses_within_rounding() -> None:
    """Where bf16 has ties a text may take the other token: compared is what each token was chosen by."""
    model = tiny_models.build("llama", seed=1).bfloat16()
    liteboost_adaptor.apply(model, speculate="lookup")
    ids = repeating()
    counts = Counts()
    found = text(model, ids)
    assert counts.served == 1 and counts.accepted
    with torch.no_grad():
        logits = model(found).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, found[0, ids.shape[1] :, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max() < 0.02 * logits.abs().max()
