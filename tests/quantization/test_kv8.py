"""Models with a cache of integers (kv8), beside transformers' own code on a cache of rounded states."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, numbers, tiny_models
from support.processes import python_json
from torch.nn.functional import cross_entropy

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.bench.rounded_caches import rounding
from liteboost_adaptor.config import Quant, Settings, with_overrides
from liteboost_adaptor.errors import ConfigError, QuantizationError
from liteboost_adaptor.kv_cache.int8_layers import RULE
from liteboost_adaptor.quantization import LiteBoostConfig, QuantizedLinear
from liteboost_adaptor.report import Row, report

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"
#: Windows, sinks, capped logits, experts, states of different sizes, and one that reads its cache itself.
SAMPLE = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "phi3", "gpt2", "deepseek_v3"),
    *("qwen3_next", "bart", "gemma4_text", "falcon"),
)
#: Of what rounding does to logits. Another order of a sum takes a number past a tie now and then; the integer
#: that is another then is one of thousands.
SHARE = 0.25


def load(folder: Path = FOLDER, dtype: torch.dtype = torch.float32, **arguments: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments).eval()


def kept(cache: Any) -> list[torch.Tensor]:
    """What the layers of a cache hold in memory."""
    return [vars(layer)[name] for layer in cache.layers for name in ("keys", "values")]


def calls() -> int:
    return report.counter(RULE).calls


def rows(state: str = "applied") -> list[Row]:
    """Of the status."""
    return [row for row in liteboost_adaptor.status().rules if (row.id, row.state) == (RULE, state)]


def check(family: str) -> None:
    """A left-padded batch, cached and recorded steps: near the rounded states, and far from the others."""
    model = tiny_models.build(family)
    inputs = families.inputs_of(model, 13, (0, 3, 6))
    liteboost_adaptor.undo(model)
    with rounding():
        tokens, expected = families.decode(model, inputs, 9)
    _, plain = families.decode(model, inputs, 9, forced=tokens)
    effect = numbers.relative(plain, expected)
    before = calls()
    liteboost_adaptor.apply(model, quant="kv8")
    _, found = families.decode(model, inputs, 9, forced=tokens)
    if calls() == before:
        pytest.skip("keeps no keys and values that grow")
    assert numbers.relative(found, expected) <= max(SHARE * effect, 2e-5)
    assert effect > 1e-4


@pytest.mark.parametrize("family", SAMPLE)
def test_families(family: str) -> None:
    check(family)


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(set(families.buildable()) - set(SAMPLE)))
def test_every_other_family(family: str) -> None:
    check(family)


def perplexity(model: torch.nn.Module, blocks: torch.Tensor, parts: int = 1) -> float:
    """With a cache, each block read in so many parts."""
    total = 0.0
    with torch.inference_mode():
        for ids in blocks.split(8):
            cache, logits = None, []
            for part in ids.chunk(parts, dim=1):
                out = model(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits.float())
            found = torch.cat(logits, 1)[:, :-1].flatten(0, 1)
            total += cross_entropy(found, ids[:, 1:].flatten(), reduction="none").double().sum().item()
    return math.exp(total / blocks[:, 1:].numel())


def text(blocks: int | None = None) -> torch.Tensor:
    from liteboost_adaptor.bench.perplexity import tokenize

    return tokenize(FOLDER, FOLDER / "heldout.txt")[:blocks]


def test_perplexity_of_some_blocks_in_one_part_and_in_several() -> None:
    model, blocks = load(), text(4)
    liteboost_adaptor.undo(model)
    plain = perplexity(model, blocks)
    with rounding():
        expected = perplexity(model, blocks)
    liteboost_adaptor.apply(model, quant="kv8")
    whole, parts = perplexity(model, blocks), perplexity(model, blocks, 5)
    assert whole == pytest.approx(expected, rel=2e-5) and parts == pytest.approx(expected, rel=2e-5)
    assert expected != plain and whole / plain <= 1.002


#: What the whole of the held-out text may cost; the same weights with a cache of 32 bits: 1, 1.0005, 1.005.
RATIOS = {"kv8": 1.002, "w8a16+kv8": 1.0025, "w4a16+kv8": 1.007}


@pytest.mark.full
@pytest.mark.parametrize("scheme", RATIOS)
def test_perplexity_of_the_whole_text(scheme: str) -> None:
    blocks = text()
    plain = perplexity(load(), blocks)
    assert math.log(plain) == pytest.approx(3.4396, abs=5e-4)
    assert perplexity(load(quantization_config=LiteBoostConfig(scheme)), blocks) / plain <= RATIOS[scheme]


def test_bf16_is_as_near_to_rounded_states_as_the_model_is_to_its_own() -> None:
    model = load()
    liteboost_adaptor.undo(model)
    ids = text(2)
    with torch.no_grad():
        with rounding():
            exact = model(ids, use_cache=True).logits
            model.bfloat16()
            theirs = numbers.relative(model(ids, use_cache=True).logits, exact)
        liteboost_adaptor.apply(model, quant="kv8")
        assert numbers.relative(model(ids, use_cache=True).logits, exact) <= 1.5 * theirs


def test_a_generation_is_recorded_and_keeps_half_of_the_bytes(no_grad: None) -> None:
    model, ids = load(dtype=torch.bfloat16), text(1)[:, :40]
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids, **options).past_key_values
    liteboost_adaptor.apply(model, quant="kv8")
    steps, before = report.counter("step.program"), calls()
    served, fallbacks = steps.calls, report.counter(RULE).fallbacks.total()
    cache = model.generate(ids, **options).past_key_values
    assert steps.calls - served >= 20
    assert calls() - before == 30 * 2 * model.config.num_hidden_layers
    assert report.counter(RULE).fallbacks.total() == fallbacks
    dim = model.config.hidden_size // model.config.num_attention_heads
    expected = sum(tensor.nbytes for tensor in kept(plain)) * (dim + 4) / (2 * dim)
    assert sum(tensor.nbytes for tensor in kept(cache)) == expected
    assert all(tensor.dtype == torch.int8 for tensor in kept(cache))


WAYS = {
    "beams": {"num_beams": 3},
    "several sequences": {"num_beams": 4, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(way: str, no_grad: None) -> None:
    """Tokens are those of transformers on rounded states; nothing is near a tie."""
    model, ids = load(), text(1)[:, :30]
    options = {"max_new_tokens": 24, "return_dict_in_generate": True, **WAYS[way]}
    liteboost_adaptor.undo(model)
    torch.manual_seed(0)
    if way == "static":  # stays as it is, and says so
        expected = model.generate(ids, **options)
    else:
        with rounding():
            expected = model.generate(ids, **options)
    liteboost_adaptor.apply(model, quant="kv8")
    torch.manual_seed(0)
    before = calls()
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert (calls() > before) == (way != "static")
    if way == "static":
        assert any("it does not append to what it keeps" in row.reason for row in rows("refused"))


def test_an_assistant_and_its_model_both_keep_integers(no_grad: None) -> None:
    model, ids = load(), text(1)[:, :30]
    assistant = copy.deepcopy(model)
    liteboost_adaptor.apply(model, quant="kv8")
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    liteboost_adaptor.apply(assistant, quant="kv8")
    found = model.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)


def test_a_prompt_is_used_again(no_grad: None) -> None:
    from transformers import DynamicCache

    model, ids = load(), text(2)[:, :40]
    liteboost_adaptor.apply(model, quant="kv8")
    prompt = DynamicCache(config=model.config)
    model(ids[:1, :30], past_key_values=prompt)
    for end in ids[0, 30:], ids[1, 30:]:
        whole = torch.cat([ids[0, :30], end])[None]
        options = {"max_new_tokens": 10, "do_sample": False}
        found = model.generate(whole, past_key_values=copy.deepcopy(prompt), **options)
        assert torch.equal(found, model.generate(whole, **options))
    assert prompt.get_seq_length() == 30 and kept(prompt)[0].dtype == torch.int8


def test_a_cache_without_layers_keeps_integers_from_the_first_token(no_grad: None) -> None:
    from transformers import DynamicCache

    model, ids = load(), text(1)[:, :30]
    liteboost_adaptor.apply(model, quant="kv8")
    made = model(ids, past_key_values=DynamicCache()).logits
    assert torch.equal(made, model(ids, use_cache=True).logits)


def test_attention_weights_come_from_the_original_on_the_values(no_grad: None) -> None:
    model, ids = tiny_models.build("llama"), torch.arange(1, 12)[None]
    model.set_attn_implementation("eager")
    liteboost_adaptor.undo(model)
    with rounding():
        expected = model(ids, output_attentions=True, use_cache=True).attentions
    liteboost_adaptor.apply(model, quant="kv8")
    found = model(ids, output_attentions=True, use_cache=True).attentions
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_it_is_off_unless_asked_for_and_undone(no_grad: None) -> None:
    model, ids = tiny_models.build("llama"), torch.arange(1, 12)[None]
    liteboost_adaptor.apply(model)
    assert kept(model(ids, use_cache=True).past_key_values)[0].dtype == torch.float32
    before = sum(row.targets for row in rows())
    liteboost_adaptor.apply(model, quant="kv8")
    cache = model(ids, use_cache=True).past_key_values
    assert kept(cache)[0].dtype == torch.int8
    expected = cache.layers[0].keys
    (row,) = rows()
    assert row.targets - before == model.config.num_hidden_layers and row.calls
    liteboost_adaptor.undo(model)
    assert torch.equal(cache.layers[0].keys, expected) and type(cache.layers[0].keys) is torch.Tensor
    assert kept(model(ids, use_cache=True).past_key_values)[0].dtype == torch.float32
    assert sum(row.targets for row in rows()) == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"level": 1}, "needs level 2, level 1 is set"),
        ({"disable": "cache.int8"}, "turned off by LITEBOOST_DISABLE=cache.int8"),
        ({"disable": "cache.*"}, r"turned off by LITEBOOST_DISABLE=cache.*"),
    ],
)
def test_where_it_cannot_be_the_status_says_why(settings: dict, reason: str, no_grad: None) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, quant="kv8", **settings)
    cache = model(torch.arange(1, 12)[None], use_cache=True).past_key_values
    assert kept(cache)[0].dtype == torch.float32
    found = [row for state in ("disabled", "refused") for row in rows(state)]
    assert any(reason in row.reason for row in found)


def test_compiled_models_keep_states_as_they_are_and_go_on_with_integers(no_grad: None) -> None:
    model, ids = tiny_models.build("llama"), torch.arange(1, 12)[None]
    liteboost_adaptor.apply(model, quant="kv8")
    cache = model(ids, use_cache=True).past_key_values
    expected = model(torch.tensor([[5]]), past_key_values=copy.deepcopy(cache)).logits
    compiled = torch.compile(model, backend="eager")
    found = compiled(torch.tensor([[5]]), past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", [None, "w4a16"])
def test_a_checkpoint_says_it(scheme: str | None, tmp_path: Path, no_grad: None) -> None:
    config = LiteBoostConfig(scheme, kv_cache="int8")
    model, ids = load(quantization_config=config), text(1)[:, :30]
    assert kept(model(ids, use_cache=True).past_key_values)[0].dtype == torch.int8
    model.save_pretrained(tmp_path / "saved")
    names = ["--scheme", scheme, "--kv-cache", "int8"] if scheme else ["--scheme", "kv8"]
    assert cli.main(["quantize", str(FOLDER), str(tmp_path / "offline"), *names]) == 0
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    for folder in ("saved", "offline"):
        written = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert written["kv_cache"] == "int8" and written["scheme"] == scheme
        again = load(tmp_path / folder)
        assert any(isinstance(part, QuantizedLinear) for part in again.modules()) == bool(scheme)
        assert kept(again(ids, use_cache=True).past_key_values)[0].dtype == torch.int8
        assert torch.equal(again.generate(ids, max_new_tokens=12, do_sample=False), expected)


SCRIPT = f"""
import json
import liteboost_adaptor, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(FOLDER)!r}).eval()
with torch.no_grad():
    out = model.generate(torch.arange(5, 25)[None], max_new_tokens=4, return_dict_in_generate=True)
layers = [type(part).__name__ for part in model.modules()]
print(json.dumps([str(vars(out.past_key_values.layers[0])["keys"].dtype), layers.count("QuantizedLinear")]))
"""


@pytest.mark.parametrize(("value", "layers"), [("kv8", 0), ("w8a16+kv8,head=16", 28)])
def test_the_variable_is_all_that_a_script_needs(value: str, layers: int) -> None:
    assert python_json(SCRIPT, is_forked=True, LITEBOOST_QUANT=value) == ["torch.int8", layers]


def test_names_of_schemes() -> None:
    def read(text: str) -> Quant | None:
        return with_overrides(Settings(), quant=text).quant

    assert read("kv8") == Quant("", kv_cache="int8")
    assert read("w4a16+kv8,group=64") == Quant("w4a16", 64, kv_cache="int8")
    for quant in (Quant("", kv_cache="int8"), Quant("w8a8", head=16, kv_cache="int8")):
        assert with_overrides(Settings(), quant=quant).quant == quant
    for wrong in (
        "kv4",
        "+kv8",
        "w4a16+",
        "w4a16+kv4",
        "kv8+w4a16",
        "kv8+kv8",
        "kv8,head=16",
        "w4a16+kv8+kv8",
    ):
        with pytest.raises(ConfigError, match="quant must be 0"):
            read(wrong)
    assert LiteBoostConfig("w4a16+kv8").to_dict() == LiteBoostConfig("w4a16", kv_cache="int8").to_dict()
    assert LiteBoostConfig("kv8").to_dict() == LiteBoostConfig(None, kv_cache="int8").to_dict()
    assert "kv_cache" not in LiteBoostConfig("w4a16").to_dict()
    for arguments, words in (
        ({"kv_cache": "int4"}, "kv_cache must be 'int8' or None, got 'int4'"),
        ({"scheme": None}, "scheme None needs kv_cache"),
        ({"scheme": "kv8", "calibrate": "a.txt"}, "calibrate is for weights"),
        ({"scheme": "w3+kv8"}, "scheme must be one of"),
    ):
        with pytest.raises(QuantizationError, match=words):
            LiteBoostConfig(**arguments)
