"""Attention functions of families without sdpa, biases beside the mask, look-alikes refused, whole models."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support import calls, numbers, planted, state, tiny_models
from torch import Tensor, nn
from transformers.utils import logging

import liteboost_adaptor
from liteboost_adaptor.engine.catalogue import Rule
from liteboost_adaptor.engine.fingerprint import fingerprint
from liteboost_adaptor.huggingface.runtime import load_catalogue
from liteboost_adaptor.replacements import attention
from liteboost_adaptor.report import CallCounter

pytestmark = pytest.mark.usefixtures("no_grad")

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 24
#: Everything else, so that what differs comes from attention.
OTHERS = "norm.*,rope.*,mlp.*,experts.*,linear.*,cache.*,causal_conv.*,delta_rule.*"
#: Family -> rule that serves its eager function, size of a value's head, grouped heads or not.
EAGER = {
    "gemma2": ("attention.eager", DIM, True),
    "bigbird_pegasus": ("attention.eager_plain", DIM, False),
    "git": ("attention.eager_plain", DIM, False),
    "clap": ("attention.eager_plain", DIM, False),
    "nllb_moe": ("attention.eager_plain", DIM, False),
    "longt5": ("attention.eager_biased", DIM, False),
    "gpt_oss": ("attention.eager_sinks", DIM, True),
    "granite_swa": ("attention.eager_sinks", DIM, True),
    "flint": ("attention.eager_sinks", DIM, True),
    "mimo_v2_flash": ("attention.eager_sinks", 10, True),
    "openai_privacy_filter": ("attention.eager_sinks", DIM, True),
    "inkling2": ("attention.eager_query_sinks", DIM, True),
}
#: Lengths of queries and keys: prefill, decode, a part of a prompt.
LENGTHS = [(7, 7), (1, 33), (5, 70)]


def modeling(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def rule_of(function: Callable[..., Any]) -> Rule:
    """The function rule that lists the body."""
    digest = fingerprint(function).digest
    (rule,) = (r for r in load_catalogue(())[0] if r.kind == "function" and digest in r.bodies)
    return rule


def states(q_len: int, kv_len: int, kv_heads: int, value_dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (
        (BATCH, HEADS, q_len, DIM),
        (BATCH, kv_heads, kv_len, DIM),
        (BATCH, kv_heads, kv_len, value_dim),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def padded_mask(q_len: int, kv_len: int, dtype: torch.dtype) -> Tensor:
    """Causal, the second row padded on the left; bool, or additive in the way eager attention gets it."""
    ages = torch.arange(q_len)[:, None] + kv_len - q_len - torch.arange(kv_len)
    shown = (ages >= 0).expand(BATCH, 1, q_len, kv_len).clone()
    shown[1, :, :, :2] = False
    shown[1, :, :, 2] = True  # a row that sees nothing has no meaning of its own
    if dtype == torch.bool:
        return shown
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


def check_near(ours: Tensor, original: Tensor, exact: Tensor) -> None:
    """Ours is as near to float64 as the original is, up to half again."""
    assert ours.dtype == original.dtype and ours.shape == original.shape
    distance, own = (ours.double() - exact).norm(), (original.double() - exact).norm()
    floor = {torch.float32: 2e-6, torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13}[ours.dtype]
    assert distance <= 1.5 * own + floor * exact.norm()


def arguments_of(rule: Rule, q_len: int, kv_len: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)
    found: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0}
    if "softcap" in rule.parameters:
        found["softcap"] = 2.0
    if "bias" in rule.parameters:
        found["position_bias"] = torch.randn(BATCH, HEADS, q_len, kv_len, generator=generator).to(dtype)
    if "query_sinks" in rule.parameters:
        found["sinks"] = torch.randn(BATCH, HEADS, q_len, 1, generator=generator).to(dtype)
    return found


def stub(groups: int, dtype: torch.dtype, with_sinks: bool = True) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups, module.head_dim = groups, DIM
    generator = torch.Generator().manual_seed(7)
    module.sinks = torch.randn(HEADS, generator=generator).to(dtype) if with_sinks else None
    return module.eval()


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", EAGER)
def test_eager_functions_are_served(family: str, dtype: torch.dtype) -> None:
    original = modeling(family).eager_attention_forward
    rule_id, value_dim, is_grouped = EAGER[family]
    rule, counter, served = rule_of(original), CallCounter(), 0
    assert rule.id == rule_id
    ours = attention.eager(original, counter, **rule.parameters)
    kv_heads = KV_HEADS if is_grouped else HEADS
    for q_len, kv_len in LENGTHS:
        inputs = states(q_len, kv_len, kv_heads, value_dim, dtype)
        keywords = arguments_of(rule, q_len, kv_len, dtype)
        for mask in (None, padded_mask(q_len, kv_len, dtype)):
            module, exact_module = (stub(HEADS // kv_heads, kind) for kind in (dtype, torch.float64))
            exact_mask = None if mask is None else padded_mask(q_len, kv_len, torch.float64)
            found, weights = ours(module, *inputs, mask, **keywords)
            served += 1
            expected = original(module, *inputs, mask, **keywords)[0]
            exact_keywords = {name: wide(value) for name, value in keywords.items()}
            exact = original(exact_module, *map(wide, inputs), exact_mask, **exact_keywords)[0]
            check_near(found, expected, exact.double())
            assert weights is None
    assert counter.calls == served and not counter.fallbacks


def test_a_layer_without_its_optional_sinks_is_served() -> None:
    original = modeling("mimo_v2_flash").eager_attention_forward
    counter = CallCounter()
    ours = attention.eager(original, counter, sinks="sinks")
    inputs, module = states(5, 9, KV_HEADS, 10, torch.float32), stub(2, torch.float32, with_sinks=False)
    found = ours(module, *inputs, None, scaling=0.3)[0]
    torch.testing.assert_close(found, original(module, *inputs, None, scaling=0.3)[0])
    assert counter.calls == 1


@pytest.mark.parametrize("family", ["bigbird_pegasus", "nllb_moe", "longt5"])
def test_a_scaling_that_is_left_out_is_that_of_the_head_size(family: str) -> None:
    original = modeling(family).eager_attention_forward
    counter = CallCounter()
    ours = attention.eager(original, counter, **rule_of(original).parameters)
    inputs, module = states(5, 9, HEADS, DIM, torch.float32), stub(1, torch.float32)
    torch.testing.assert_close(ours(module, *inputs, None)[0], original(module, *inputs, None)[0])
    assert counter.calls == 1


def test_a_softcap_is_no_business_of_a_body_without_one() -> None:
    original = modeling("git").eager_attention_forward
    ours = attention.eager(original, CallCounter(), **rule_of(original).parameters)
    inputs, module = states(5, 9, HEADS, DIM, torch.float32), stub(1, torch.float32)
    found = ours(module, *inputs, None, scaling=0.3, softcap=0.1)[0]
    torch.testing.assert_close(found, original(module, *inputs, None, scaling=0.3, softcap=0.1)[0])


def test_weights_that_sdpa_does_not_give(caplog: pytest.LogCaptureFixture) -> None:
    """It is served, and says that there are none, once, as the original does."""
    model = tiny_models.build("llama")
    logger = logging.get_logger("transformers.integrations.sdpa_attention")

    def warnings() -> list[str]:
        caplog.clear()
        logger.warning_once.cache_clear()
        output = model(**tiny_models.example_inputs(model), output_attentions=True)
        assert not output.attentions
        return [each.message for each in caplog.records if each.name == logger.name]

    expected = warnings()
    liteboost_adaptor.apply(model, level=1)
    with calls.served() as served:
        found = warnings()
    assert served.rules["attention.sdpa"] and not served.fallbacks
    assert len(found) == len(expected) == 1 and "output_attentions=True" in found[0] and "eager" in found[0]


def test_queries_may_have_no_sinks() -> None:
    original, counter = modeling("inkling2").eager_attention_forward, CallCounter()
    ours = attention.eager(original, counter, **rule_of(original).parameters)
    inputs, module = states(5, 9, HEADS, DIM, torch.float32), stub(1, torch.float32)
    module.config = modeling("inkling2").Inkling2TextConfig()
    found = ours(module, *inputs, None, scaling=0.3)[0]
    torch.testing.assert_close(found, original(module, *inputs, None, scaling=0.3)[0])
    assert counter.calls == 1


Changes = Callable[[nn.Module, dict[str, Any]], None]
HANDED_BACK: dict[str, tuple[str, Changes, str]] = {
    "a bool mask": (
        "git",
        lambda module, given: given.update(attention_mask=padded_mask(5, 9, torch.bool)),
        "a bool mask, which eager attention adds",
    ),
    "a mask of one dimension": (
        "git",
        lambda module, given: given.update(attention_mask=torch.randn(9)),
        "a mask that is no tensor of two to four dimensions",
    ),
    "dropout": ("git", lambda module, given: given.update(dropout=0.5), "dropout"),
    "sinks of another dtype": (
        "gpt_oss",
        lambda module, given: setattr(module, "sinks", module.sinks.bfloat16()),
        "sinks of dtype bfloat16",
    ),
    "one sink for all heads": (
        "gpt_oss",
        lambda module, given: setattr(module, "sinks", module.sinks[:1]),
        "sinks of another shape",
    ),
    "sinks of the keys' heads": (
        "inkling2",
        lambda module, given: given.update(sinks=given["sinks"][:, :1]),
        "sinks of another shape",
    ),
    "a part that sdpa serves": (
        "inkling2",
        lambda module, given: setattr(module, "config", modeling("inkling2").Inkling2VisionConfig()),
        "eager attention was asked for",
    ),
    "a bias of another length": (
        "longt5",
        lambda module, given: given.update(position_bias=given["position_bias"][..., :2]),
        "a mask of another length",
    ),
}


@pytest.mark.parametrize("case", HANDED_BACK)
def test_calls_that_the_original_takes(case: str) -> None:
    family, change, reason = HANDED_BACK[case]
    original = modeling(family).eager_attention_forward
    rule, counter = rule_of(original), CallCounter()
    kv_heads = KV_HEADS if EAGER[family][2] else HEADS
    query, key, value = states(5, 9, kv_heads, DIM, torch.float32)
    module = stub(HEADS // kv_heads, torch.float32).eval()
    given = {"attention_mask": None, **arguments_of(rule, 5, 9, torch.float32)}
    change(module, given)

    def outcome(function: Callable[..., Any]) -> Tensor | str:
        try:
            return function(module, query, key, value, **given)[0]
        except RuntimeError as error:
            return str(error)

    expected = outcome(original)
    found = outcome(attention.eager(original, counter, **rule.parameters))
    assert counter.calls == 0 and dict(counter.fallbacks) == {reason: 1}
    assert found == expected if isinstance(expected, str) else torch.equal(found, expected)


BIASES = {
    "of each row": (BATCH, HEADS),
    "shared by rows": (1, HEADS),
    "shared by heads": (BATCH, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "none, not causal", "bool", "additive"])
@pytest.mark.parametrize("bias", BIASES)
def test_a_position_bias_beside_the_mask_of_sdpa(bias: str, kind: str, dtype: torch.dtype) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as original

    counter = CallCounter()
    ours = attention.sdpa(original, counter)
    module = stub(HEADS // KV_HEADS, dtype)
    module.is_causal = kind != "none, not causal"
    module.__dict__["__liteboost__"] = SimpleNamespace(registries=(attention.REGISTRY,))
    for q_len, kv_len in LENGTHS:
        inputs = states(q_len, kv_len, KV_HEADS, DIM, dtype)
        mask_dtype = {"bool": torch.bool, "additive": dtype}.get(kind)
        mask = None if mask_dtype is None else padded_mask(q_len, kv_len, mask_dtype)
        wide_mask = padded_mask(q_len, kv_len, torch.float64) if kind == "additive" else mask
        generator = torch.Generator().manual_seed(8)
        given = torch.randn(*BIASES[bias], q_len, kv_len, generator=generator).to(dtype)
        found, _ = ours(module, *inputs, mask, scaling=0.3, position_bias=given)
        expected, _ = original(module, *inputs, mask, scaling=0.3, position_bias=given)
        exact, _ = original(module, *map(wide, inputs), wide_mask, scaling=0.3, position_bias=given.double())
        check_near(found, expected, exact)
    assert counter.calls == len(LENGTHS) and not counter.fallbacks


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "a bias"])
@pytest.mark.parametrize("q_len, kv_len", [(7, 7), (9, 5), (40, 1), (5, 9)])
def test_causality_without_a_mask_is_counted_from_the_first(q_len: int, kv_len: int, bias: bool) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as original

    counter = CallCounter()
    module = stub(HEADS // KV_HEADS, torch.float32)  # as Mllama's cross-attention, without ``is_causal``
    module.__dict__["__liteboost__"] = SimpleNamespace(registries=(attention.REGISTRY,))
    inputs = states(q_len, kv_len, KV_HEADS, DIM, torch.float32)
    generator = torch.Generator().manual_seed(10)
    given = torch.randn(BATCH, HEADS, q_len, kv_len, generator=generator) if bias else None
    found, _ = attention.sdpa(original, counter)(module, *inputs, None, scaling=0.3, position_bias=given)
    expected, _ = original(module, *inputs, None, scaling=0.3, position_bias=given)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert counter.calls == 1 and not counter.fallbacks


#: Masks that broadcast: shape beside 5 queries and 9 keys.
SHAPES = ((5, 9), (1, 9), (HEADS, 5, 9), (1, 1, 5, 9), (BATCH, 1, 1, 9), (BATCH, HEADS, 1, 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["eager, additive", "sdpa, additive", "sdpa, bool"])
def test_masks_that_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    generator = torch.Generator().manual_seed(9)
    mask, counter = torch.randn(shape, generator=generator), CallCounter()
    mask = mask > -1.5 if kind == "sdpa, bool" else mask
    inputs, module = states(5, 9, KV_HEADS, DIM, torch.float32), stub(HEADS // KV_HEADS, torch.float32)
    if kind.startswith("eager"):
        original = modeling("gemma2").eager_attention_forward
        ours = attention.eager(original, counter, softcap="softcap")
    else:
        original = sdpa_attention_forward
        module.__dict__["__liteboost__"] = SimpleNamespace(registries=(attention.REGISTRY,))
        ours = attention.sdpa(original, counter)
    found, expected = (function(module, *inputs, mask, scaling=0.3)[0] for function in (ours, original))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert counter.calls == 1 and not counter.fallbacks


def planted_model(family: str, model_type: str, folder: Path, old: str, new: str) -> nn.Module:
    """A tiny model of a family's own code with ``old`` replaced, with the family's tiny weights."""
    text = inspect.getsource(modeling(family))
    text = re.sub(r"^from \.\.\.(\w)", r"from transformers.\1", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.\.\. import", "from transformers import", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.\.(\w)", r"from transformers.models.\1", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.(\w)", rf"from transformers.models.{family}.\1", text, flags=re.MULTILINE)
    assert old in text, f"transformers' {family} has no {old!r} any more"
    original = tiny_models.build(model_type)
    module = planted.load(text.replace(old, new), folder)
    model = getattr(module, type(original).__name__)(original.config)
    model.load_state_dict(original.state_dict())
    return model.eval()


NEAR_MISSES = {
    "Granite-SWA, the sink added": ("granite_swa", "(lse - module.sinks", "(lse + module.sinks"),
    "Granite-SWA, no sink": ("granite_swa", "attn_output * sink_scale", "attn_output + 0 * sink_scale"),
    "BigBird-Pegasus, softmax over queries": (
        "bigbird_pegasus",
        "softmax(attn_weights, dim=-1)\n    attn_weights = nn.functional.dropout(",
        "softmax(attn_weights, dim=-2)\n    attn_weights = nn.functional.dropout(",
    ),
    "Flint, the sink stays among the weights": (
        "flint",
        "dim=-1), dim=-1)[..., :-1]",
        "dim=-1), dim=-1)[..., 1:]",
    ),
    "MiMo, half of the sink": ("mimo_v2_flash", "= module.sinks.reshape", "= 0.5 * module.sinks.reshape"),
    "Inkling-2, the bias taken away": (
        "inkling2",
        "attn_weights = attn_weights + position_bias",
        "attn_weights = attn_weights - position_bias",
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_look_alikes_are_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    family, old, new = NEAR_MISSES[case]
    model_type = {"inkling2": "inkling2_text"}.get(family, family)
    model = planted_model(family, model_type, tmp_path, old, new)
    inputs = tiny_models.example_inputs(model, padding=3)
    with torch.no_grad():
        expected = model(**inputs).logits
        liteboost_adaptor.apply(model, disable=OTHERS)
        with calls.served() as served:
            assert torch.equal(model(**inputs).logits, expected)
    assert served.rules == {}
    reasons = [row.reason for row in state.rows("attention").get("refused", [])]
    assert reasons and all("not in the catalogue" in reason for reason in reasons)


#: Model type -> rule that serves its attention.
FAMILIES = {
    "bigbird_pegasus": "attention.eager_plain",
    "flint": "attention.eager_sinks",
    "granite_swa": "attention.eager_sinks",
    "granitemoe_swa": "attention.eager_sinks",
    "inkling_text": "attention.sdpa",
    "inkling2_text": "attention.eager_query_sinks",
    "mimo_v2_flash": "attention.eager_sinks",
}


def in_bf16(model: nn.Module) -> nn.Module:
    """As ``from_pretrained`` casts it; every expert is used, so that rounding cannot choose another."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.bfloat16()
    for part in model.modules():
        if hasattr(part, "top_k"):
            part.top_k = part.num_experts
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_the_original(family: str) -> None:
    ours, originals, wanted = [], [], []
    for seed in (0, 1):
        model = in_bf16(tiny_models.build(family, seed))
        inputs = numbers.padded_inputs(model, seed=seed)
        real = inputs["attention_mask"].bool()
        with torch.no_grad():
            wanted.append(copy.deepcopy(model).float()(**inputs).logits[real].double())
            originals.append(model(**inputs).logits[real].double())
            liteboost_adaptor.apply(model, disable=OTHERS)
            with calls.served() as served:
                ours.append(model(**inputs).logits[real].double())
        assert served.rules.keys() == {FAMILIES[family]} and served.fallbacks == {}
        liteboost_adaptor.undo()
    exact = torch.cat(wanted)
    distance, own = ((torch.cat(found) - exact).norm() / exact.norm() for found in (ours, originals))
    assert distance <= max(1.5 * own.item(), numbers.ULP[torch.bfloat16])
