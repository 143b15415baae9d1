"""What a layer of a family launches for a token at level 2, and that it computes the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cann_sim.trace import Trace
from npu.marks import decoded
from support import tiny_models
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import liteboost_adaptor
from liteboost_adaptor import config
from liteboost_adaptor.report import report

#: Launches a layer (of all kinds on average), what is among them in each layer, and what is not.
BARS: dict[str, tuple[float, str, str]] = {
    "llama": (10, "AddRmsNorm", "Add"),
    "qwen2": (10, "AddRmsNorm", "Add"),
    "qwen3": (12, "AddRmsNorm", "Add"),
    "gemma3_text": (14, "AddRmsNorm", "Add"),
    "gemma2": (17, "Tanh", "InplaceCopy"),
    "mixtral": (15, "MoeGatingTopKSoftmaxV2", "IndexSelect"),
    "qwen3_moe": (16, "MoeGatingTopKSoftmaxV2", "IndexSelect"),
    "gpt_oss": (18, "FusedInferAttentionScoreV4", "IndexSelect"),
    "qwen3_next": (37.75, "RmsNorm", "ReduceSum"),
    "qwen3_5_text": (26.25, "RmsNorm", "ReduceSum"),
    "qwen3_5_moe_text": (36.25, "RmsNorm", "ReduceSum"),
}
#: Layers of which each repeats one pattern of kinds: three with a gated delta rule before one with attention.
PERIODS = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 4)
#: Of the first tier; the others are in the second.
COUNTED, COMPARED = "gpt_oss", "gemma2"
PROMPT, NEW = 12, 36  # steps are recorded when 32 have been made
RECORDED = 34

pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def families(sample: str) -> list[Any]:
    return [pytest.param(each, marks=[] if each == sample else [pytest.mark.full]) for each in BARS]


def model_of(family: str, layers: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """With heads of 64, on the CPU; windows are not reached, so that no layer moves what it keeps."""
    config = copy.deepcopy(tiny_models.tiny_config(family, tiny_models.sizes(family, 64, 4, 2)))
    config.num_hidden_layers, config.vocab_size = layers, 1024
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        config.sliding_window = 128
        config.layer_types = ["sliding_attention", "full_attention"] * (layers // 2)
    elif "linear_attention" in (getattr(config, "layer_types", None) or ()):
        config.layer_types = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    elif getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def a_token(family: str, layers: int) -> Trace:
    return decoded(model_of(family, layers).npu(), PROMPT, NEW, before=0)


@pytest.mark.parametrize("family", families(COUNTED))
def test_launches_of_a_layer(family: str, record_property: Any) -> None:
    liteboost_adaptor.apply(level=2)
    steps = report.counter("step.program")
    served = steps.calls
    period = PERIODS.get(family, 2)
    fewer, more = a_token(family, period), a_token(family, 2 * period)
    assert steps.calls > served, dict(steps.fallbacks)
    a_layer = (len(more.launches) - len(fewer.launches)) / period
    record_property("launches a layer", a_layer)
    most, has, has_not = BARS[family]
    inside = more.ops[more.ops.index("aclnnScatterPaKvCache") :]
    inside = inside[: len(inside) - inside[::-1].index("aclnnScatterPaKvCache")]
    assert a_layer <= most, more.ops
    assert inside.count(f"aclnn{has}") >= 3 and f"aclnn{has_not}" not in inside, inside


class Forced(LogitsProcessor):
    """The tokens that are given, whatever a model would choose."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.tokens[input_ids.shape[1] - PROMPT]
        return torch.full_like(scores, -1.0).index_fill(1, chosen.to(scores.device).view(1), 1.0)


class Changed(LogitsProcessor):
    """A weight of the second layer, changed behind torch's back when a step has been recorded."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self.weight = model.model.layers[1].get_parameter(name)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == PROMPT + RECORDED:
            self.weight.data[::2].sub_(4.0)
        return scores


def generated(
    model: torch.nn.Module, level: int, tokens: torch.Tensor | None = None, changed: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits after a prompt, of a copy of ``model``."""
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=level)
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).npu()
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    settings |= {
        "attention_mask": torch.ones_like(ids),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    copied = copy.deepcopy(model).npu()
    processors = LogitsProcessorList([] if tokens is None else [Forced(tokens)])
    processors += [Changed(copied, changed)] if changed else []
    found = copied.generate(ids, logits_processor=processors, **settings)
    return found.sequences[0, PROMPT:].cpu(), torch.cat(found.logits).cpu().double()


@pytest.mark.parametrize("family", families(COMPARED))
def test_recorded_steps_compute_the_same(family: str) -> None:
    """Tokens are those of level 0 in fp32; in bf16 logits are as near to fp32's as the original's."""
    model = model_of(family, PERIODS.get(family, 2), torch.float32)
    tokens, exact = generated(model, 0)
    steps = report.counter("step.program")
    served = steps.calls
    found, near = generated(model, 2)
    assert steps.calls > served, dict(steps.fallbacks)
    assert torch.equal(found, tokens) and torch.allclose(near, exact, atol=1e-4, rtol=0)
    model = model.bfloat16()
    errors = []
    for level in (0, 2):
        served = steps.calls
        logits = generated(model, level, tokens)[1]
        assert steps.calls > served or not level, dict(steps.fallbacks)
        distances = (logits - exact)[RECORDED:].norm(dim=-1) / exact[RECORDED:].norm(dim=-1)
        errors.append(distances.median().item())
    assert errors[1] <= 1.5 * errors[0], errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "weight"),
    [("gemma3_text", "input_layernorm.weight"), ("qwen3_next", "linear_attn.A_log")],
)
def test_a_weight_that_is_changed_between_two_tokens_is_read(family: str, weight: str) -> None:
    model = model_of(family, PERIODS.get(family, 2), torch.float32)
    kept, changed = (generated(model, 0, changed=each)[1] for each in ("", weight))
    steps = report.counter("step.program")
    served = steps.calls
    found = generated(model, 2, changed=weight)[1]
    assert steps.calls > served, dict(steps.fallbacks)
    assert torch.allclose(found, changed, atol=1e-4, rtol=0)
    assert not torch.allclose(kept, changed, atol=1e-2)


@pytest.fixture
def short_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States of the gated delta rule are kept in bf16."""
    monkeypatch.setenv("LITEBOOST_DELTA_STATE", "bf16")
    config.settings.cache_clear()
    yield
    monkeypatch.undo()
    config.settings.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize(("family", "launches"), [("qwen3_next", 31.75), ("qwen3_5_text", 20.25)])
def test_launches_with_states_in_bf16(family: str, launches: float, short_states: None) -> None:
    """A token takes a norm and one operator where it takes ten, in three of four layers."""
    liteboost_adaptor.apply(level=2)
    fewer, more = a_token(family, PERIODS[family]), a_token(family, 2 * PERIODS[family])
    assert (len(more.launches) - len(fewer.launches)) / PERIODS[family] == launches, more.ops
    assert more.ops.count("aclnnRecurrentGatedDeltaRule") == 6


@pytest.mark.full
def test_states_in_bf16_cost_digits(short_states: None, record_property: Any) -> None:
    """Logits are as near to those in fp32 as the original's in bf16, but for half as much again."""
    model = model_of("qwen3_next", 4, torch.float32)
    tokens, exact = generated(model, 0)
    model = model.bfloat16()
    errors = []
    for level in (0, 2):
        logits = generated(model, level, tokens)[1]
        distances = (logits - exact)[RECORDED:].norm(dim=-1) / exact[RECORDED:].norm(dim=-1)
        errors.append(distances.median().item())
    record_property("errors", errors)
    assert errors[1] <= 1.5 * errors[0], errors
