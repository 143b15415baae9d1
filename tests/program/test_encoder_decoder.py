"""Decoders beside an encoder: their steps run as programs, whatever the encoder has read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import liteboost_adaptor
from liteboost_adaptor.program import step as steps
from liteboost_adaptor.program.reasons import MORE_FUNCTIONS

from .conftest import reasons, served

_BART = {
    **{
        "vocab_size": 120,
        "d_model": 64,
        "max_position_embeddings": 120,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
    **{"decoder_start_token_id": 2, "forced_eos_token_id": None},
}
_T5 = {
    **{"vocab_size": 120, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0},
}
_WHISPER = _BART | {"max_source_positions": 30, "max_target_positions": 120, "bos_token_id": 2}
#: The prefix of the classes of a family -> its sizes.
FAMILIES = {"T5": _T5, "Bart": _BART, "Whisper": _WHISPER}
FURTHER = {
    **{name: _BART for name in ("MBart", "Marian", "Pegasus", "BlenderbotSmall", "M2M100")},
    **{name: _T5 for name in ("MT5", "UMT5", "LongT5")},
}
_HEADS = ("ForConditionalGeneration", "MTModel")


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(FAMILIES | FURTHER)[family])
    cls = next(found for head in _HEADS if (found := getattr(transformers, family + head, None)))
    model = cls(config).eval()
    if family == "Whisper":
        for name in ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"):
            setattr(model.generation_config, name, None)
        model.generation_config.max_length = 120
    return model


def inputs_of(family: str, rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if family == "Whisper":
        return {"input_features": torch.randn(rows, 80, 60, generator=generator)}
    ids = torch.randint(5, 120, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def written(model: torch.nn.Module, inputs: dict[str, torch.Tensor], count: int, **more: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, **more}
    return model.generate(**inputs, **settings)


def logits_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """``[count, rows, vocabulary]`` of greedy tokens."""
    made = written(model, inputs, count, output_logits=True, return_dict_in_generate=True)
    return torch.stack(made.logits)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    liteboost_adaptor.undo()


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.full) for family in FURTHER)]
)
def test_texts_of_all_lengths_are_those_of_transformers_and_one_program_makes_them(family: str) -> None:
    model = build(family)
    given = [inputs_of(family, 2, length, length) for length in (9, 14, 14, 23)]
    expected = [logits_of(model, each, 30) for each in given]
    assert family == "Whisper" or not torch.allclose(expected[0][-1], expected[1][-1], atol=1e-4)
    liteboost_adaptor.apply(model, level=2)
    before, noted = served(), reasons()
    for inputs, logits in zip(given, expected, strict=True):
        assert torch.allclose(logits_of(model, inputs, 30), logits, atol=2e-5, rtol=2e-4)
    assert served() - before >= 4 * 29 - 12 - steps.RECORDED_AT
    assert reasons().get("recorded", 0) - noted.get("recorded", 0) == 1
    # One step is enough: what stands for tensors leads transformers nowhere else.
    assert reasons().get(MORE_FUNCTIONS, 0) == noted.get(MORE_FUNCTIONS, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_checked_several_at_a_time(family: str) -> None:
    model, inputs = build(family), inputs_of(family, 1, 14)
    expected = written(model, inputs, 60, prompt_lookup_num_tokens=4)
    liteboost_adaptor.apply(model, level=2)
    before, noted = served(), reasons()
    assert torch.equal(written(model, inputs, 60, prompt_lookup_num_tokens=4), expected)
    new = {reason: count - noted.get(reason, 0) for reason, count in reasons().items()}
    assert served() - before > 5, new


@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_token_is_a_prompt_and_counts_as_none(rows: int) -> None:
    model = build("T5")
    liteboost_adaptor.apply(model, level=2)
    before = served() + sum(reasons().values())
    written(model, inputs_of("T5", rows, 9), 12)
    assert served() + sum(reasons().values()) == before + 11


class Decoding:
    """A T5 with a program, in the middle of a text, beside a copy without us.

    Attributes:
        models: Ours and theirs.
        caches: Of each.
        encoded: What each one's encoder has made.
    """

    def __init__(self) -> None:
        liteboost_adaptor.undo()
        ours = build("T5")
        self.models = [ours, copy.deepcopy(ours)]
        liteboost_adaptor.apply(ours, level=2)
        self._inputs = inputs_of("T5", 2, 9)
        with torch.no_grad():
            self.encoded = [model.encoder(**self._inputs) for model in self.models]
            self.caches = [
                model(
                    decoder_input_ids=torch.zeros(2, 1, dtype=torch.long),
                    encoder_outputs=encoded,
                    attention_mask=self._inputs["attention_mask"],
                    use_cache=True,
                ).past_key_values
                for model, encoded in zip(self.models, self.encoded, strict=True)
            ]
        self._count = 0

    def step(self, **more: Any) -> tuple[Any, Any]:
        self._count += 1
        ids = torch.tensor([[self._count % 100 + 5], [self._count % 90 + 7]])
        with torch.no_grad():
            return tuple(
                model(
                    decoder_input_ids=ids,
                    encoder_outputs=encoded,
                    past_key_values=cache,
                    attention_mask=self._inputs["attention_mask"],
                    use_cache=True,
                    **more,
                )
                for model, encoded, cache in zip(self.models, self.encoded, self.caches, strict=True)
            )

    def agree(self, count: int = 1, **more: Any) -> int:
        """``count`` steps give the original's logits; how many of them programs served."""
        before = served()
        for _ in range(count):
            ours, theirs = self.step(**more)
            assert torch.allclose(ours.logits, theirs.logits, atol=2e-5, rtol=2e-5)
        return served() - before


@pytest.fixture
def decoding() -> Decoding:
    made = Decoding()
    made.agree(8 + steps.RECORDED_AT)
    assert made.agree(2) == 2
    return made


def test_keys_and_values_of_the_encoder_are_those_that_are_kept(decoding: Decoding) -> None:
    for cache in decoding.caches:
        layer = cache.cross_attention_cache.layers[1]
        layer.values = layer.values * 2
    decoding.agree(3)
    for cache in decoding.caches:
        cache.cross_attention_cache.layers[0].keys.mul_(-1)
    decoding.agree(3)


def test_an_encoder_that_is_to_be_read_anew_is_read(decoding: Decoding) -> None:
    for cache in decoding.caches:
        cache.cross_attention_cache.layers[0].reset()
        cache.is_updated[0] = False
    assert decoding.agree() == 0
    assert decoding.caches[0].is_updated[0] is True
    decoding.agree(4)


def test_another_output_of_the_encoder_is_returned(decoding: Decoding) -> None:
    for encoded in decoding.encoded:
        encoded["last_hidden_state"] = encoded.last_hidden_state + 1
    ours, _ = decoding.step()
    assert torch.equal(ours.encoder_last_hidden_state, decoding.encoded[0].last_hidden_state)
    assert type(ours) is transformers.modeling_outputs.Seq2SeqLMOutput
    assert decoding.agree() == 1


def test_a_cache_that_is_another_inside_is_seen(decoding: Decoding) -> None:
    class Noting(transformers.DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(args[2])
            return super().update(*args, **kwargs)

    seen: list[int] = []
    decoding.caches[0].self_attention_cache.__class__ = Noting
    decoding.agree()
    assert seen == [0, 1]


def test_an_encoder_that_gives_more_than_its_output_is_not_recorded_and_named(decoding: Decoding) -> None:
    for encoded in decoding.encoded:
        encoded["hidden_states"] = (encoded.last_hidden_state,)
    before = reasons()
    assert decoding.agree() == 0
    (reason,) = [each for each, count in reasons().items() if count != before.get(each, 0)]
    assert reason.startswith("encoder_outputs is given as a BaseModelOutput")
    ours, theirs = decoding.step()
    assert len(ours.encoder_hidden_states) == len(theirs.encoder_hidden_states) == 1


def test_beams_and_samples_are_those_of_transformers() -> None:
    model = build("Bart")
    inputs = inputs_of("Bart", 2, 11)
    ways = [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"num_return_sequences": 2, "do_sample": True},
    ]

    def texts() -> list[torch.Tensor]:
        made = []
        for way in ways:
            torch.manual_seed(3)
            made.append(written(model, inputs, 20, **way))
        return made

    expected = texts()
    liteboost_adaptor.apply(model, level=2)
    for _ in range(2):
        assert all(map(torch.equal, texts(), expected))
