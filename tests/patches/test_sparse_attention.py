"""Block-sparse attention in models: on request only, in long plain prompts, counted, listed, taken back."""

from __future__ import annotations

import copy

import pytest
import torch
from support import state, tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor.errors import ConfigError
from liteboost_adaptor.replacements import sparse_attention
from liteboost_adaptor.replacements.sparse_attention import RULE
from liteboost_adaptor.report import Row, report

pytestmark = pytest.mark.usefixtures("no_grad")

TOKENS = 200
ASKED = "0.6,block=16,min_length=100"
#: As many blocks as there are, so that nothing is left out.
ALL = "0.6,block=16,window=99,min_length=100"


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_models.build("llama", seed=1)


@pytest.fixture(autouse=True)
def fresh_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse_attention.counter.calls = 0
    sparse_attention.counter.fallbacks.clear()


def prompt(tokens: int = TOKENS, batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (batch, tokens), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "use_cache": False}


def logits(model: nn.Module, **inputs: object) -> torch.Tensor:
    return model(**(prompt() | inputs)).logits


def listed() -> list[Row]:
    return [row for row in liteboost_adaptor.status().rules if row.id == RULE]


def test_off_unless_asked_for(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama)
    before = logits(llama)
    assert not listed() and not report.counters[RULE].calls and not report.counters[RULE].fallbacks
    liteboost_adaptor.apply(llama, sparse=0)
    assert torch.equal(logits(llama), before) and not listed()


def test_long_prompts_are_served_and_counted(llama: nn.Module) -> None:
    layers = llama.config.num_hidden_layers
    liteboost_adaptor.apply(llama)
    dense = logits(llama)
    status = liteboost_adaptor.apply(llama, sparse=ASKED)
    found = logits(llama)
    assert not torch.equal(found, dense)
    # What nothing is left out for is the same: the first three blocks of 16.
    torch.testing.assert_close(found[:, :48], dense[:, :48], rtol=2e-5, atol=2e-5)
    assert any(row.id == RULE for row in status.rules)
    (row,) = listed()
    assert (row.state, row.targets, row.calls, row.fallbacks) == ("applied", layers, layers, {})
    assert row.title == "Block-sparse attention of long prompts (LITEBOOST_SPARSE)"
    assert RULE in str(liteboost_adaptor.status())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_nothing_left_out_it_is_dense(llama: nn.Module, dtype: torch.dtype) -> None:
    model = copy.deepcopy(llama).to(dtype)
    expected = logits(model)
    exact = logits(copy.deepcopy(llama).double())
    liteboost_adaptor.apply(model, sparse=ALL)
    found = logits(model)
    assert sparse_attention.counter.calls == llama.config.num_hidden_layers
    if dtype == torch.float32:
        assert (found - expected).norm() <= 2e-5 * expected.norm()
    else:
        assert (found.double() - exact).norm() <= 1.5 * (expected.double() - exact).norm()


def test_generation_decodes_densely(llama: nn.Module) -> None:
    layers = llama.config.num_hidden_layers
    liteboost_adaptor.apply(llama, sparse=ALL)
    form = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    sparse = llama.generate(prompt()["input_ids"], **form)
    assert (sparse_attention.counter.calls, dict(sparse_attention.counter.fallbacks)) == (layers, {})
    liteboost_adaptor.undo(llama)
    assert torch.equal(llama.generate(prompt()["input_ids"], **form), sparse)


def test_what_it_does_not_serve_is_dense_and_counted(llama: nn.Module) -> None:
    layers = llama.config.num_hidden_layers
    padded = torch.ones(2, TOKENS, dtype=torch.int64)
    padded[1, :7] = 0
    forms = {
        "a prompt shorter than min_length": prompt(99),
        "a mask": prompt(batch=2) | {"attention_mask": padded},
    }
    for reason, form in forms.items():
        liteboost_adaptor.apply(llama)
        dense = llama(**form).logits
        liteboost_adaptor.apply(llama, sparse=ASKED)
        sparse_attention.counter.fallbacks.clear()
        assert torch.equal(llama(**form).logits, dense)
        assert (sparse_attention.counter.calls, dict(sparse_attention.counter.fallbacks)) == (
            0,
            {reason: layers},
        )
    (row,) = listed()
    assert row.fallbacks == {"a mask": layers}


def test_attention_that_is_not_causal_is_dense(llama: nn.Module) -> None:
    liteboost_adaptor.apply(llama, sparse=ASKED)
    logits(llama, is_causal=False)
    assert dict(sparse_attention.counter.fallbacks) == {
        "attention that is not causal": llama.config.num_hidden_layers
    }


def test_in_grad_mode_the_original_runs(llama: nn.Module) -> None:
    model = copy.deepcopy(llama)
    expected = logits(model)
    liteboost_adaptor.apply(model, sparse=ASKED)
    with torch.enable_grad():
        found = logits(model)
        found.sum().backward()
    torch.testing.assert_close(found.detach(), expected)
    assert not sparse_attention.counter.calls and model.lm_head.weight.grad is not None


def test_a_window_is_a_mask() -> None:
    model = tiny_models.build("mistral", seed=1)
    model.config.sliding_window = 64
    liteboost_adaptor.apply(model, sparse=ASKED)
    logits(model)
    assert not sparse_attention.counter.calls and set(sparse_attention.counter.fallbacks) == {"a mask"}


def test_one_model_alone(llama: nn.Module) -> None:
    other = copy.deepcopy(llama)
    liteboost_adaptor.apply(llama, sparse=ASKED)
    liteboost_adaptor.apply(other)
    logits(other)
    assert not sparse_attention.counter.calls and not sparse_attention.counter.fallbacks
    logits(llama)
    assert sparse_attention.counter.calls == llama.config.num_hidden_layers


def test_undo(llama: nn.Module) -> None:
    before = [type(part) for part in llama.modules()]
    expected = logits(llama)
    liteboost_adaptor.apply(llama, sparse=ASKED)
    logits(llama)
    liteboost_adaptor.undo(llama)
    assert [type(part) for part in llama.modules()] == before and not listed()
    assert torch.equal(logits(llama), expected)
    liteboost_adaptor.apply(llama)  # the classes of another binding know nothing of it
    calls = sparse_attention.counter.calls
    logits(llama)
    assert sparse_attention.counter.calls == calls and not listed()
    state.pristine()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"level": 1}, "needs level 2, level 1 is set"),
        ({"disable": "attention.sparse"}, "turned off by LITEBOOST_DISABLE=attention.sparse"),
    ],
)
def test_turned_off(llama: nn.Module, options: dict[str, object], reason: str) -> None:
    liteboost_adaptor.apply(llama, sparse=ASKED, **options)
    logits(llama)
    (row,) = listed()
    assert (row.state, row.reason, row.calls) == ("disabled", reason, 0)
    assert not sparse_attention.counter.calls


def test_wrong_values_are_errors(llama: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"sparse must be a share from 0 \(off\) to below 1"):
        liteboost_adaptor.apply(llama, sparse=1.5)
    assert not listed()


def test_compiled_models_run_dense(llama: nn.Module) -> None:
    """While it is traced, transformers makes a mask of every prompt."""
    model = copy.deepcopy(llama)
    liteboost_adaptor.apply(model)
    expected = logits(model)
    liteboost_adaptor.apply(model, sparse=ASKED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**prompt()).logits, expected, rtol=2e-5, atol=2e-5)
