"""Decode steps of ``generate`` captured as NPUGraphs: the same tokens, few launches, faults that are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cann_sim.trace import Trace, recording
from npu.marks import launched_by_a_replay
from npu.test_steps import at_level, llama, prompt, tokens
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import liteboost_adaptor
from liteboost_adaptor import native_npu
from liteboost_adaptor.kv_cache import buffers
from liteboost_adaptor.program.graph import _FIRST as FIRST
from liteboost_adaptor.program.graph import CAPTURED_AT, RULE, Graph
from liteboost_adaptor.quantization import LiteBoostConfig, quantize_model
from liteboost_adaptor.report import report
from liteboost_adaptor.selftest import first_use

pytestmark = pytest.mark.usefixtures("no_grad", "undone")

#: Steps after which one is captured, with some more.
UNTIL = CAPTURED_AT + 38
AGAIN = "captured again: the cache or a weight lies elsewhere"


def one_step(model: torch.nn.Module, length: int) -> Trace:
    """What happens in a step that was captured."""
    cache = model(**prompt(1, length), use_cache=True).past_key_values
    token = torch.full((1, 1), 5, device="npu")
    for at in range(UNTIL):
        position = torch.full((1, 1), length + at, device="npu")
        with recording() as trace:
            model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True)
    return trace


def replays() -> int:
    return report.counter(RULE).calls


def reasons() -> dict[str, int]:
    return dict(report.counter(RULE).fallbacks)


def windowed(window: int) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        **{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        **{"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "sliding_window": window},
        pad_token_id=0,
    )
    model = MistralForCausalLM(config).bfloat16().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(8)
    return model.npu()


@pytest.mark.full
def test_300_tokens_over_a_growing_cache_are_those_of_level_one() -> None:
    inputs, new, model = prompt(1, 9), 300, llama()
    expected = at_level(1, lambda: tokens(model, inputs, new))
    liteboost_adaptor.apply(level=2)
    before, again = replays(), reasons().get(AGAIN, 0)
    assert torch.equal(tokens(model, inputs, new), expected)
    # Not the steps before it is captured, nor the two in which the cache grows.
    assert replays() - before >= new - UNTIL - 2, reasons()
    assert reasons()[AGAIN] - again == 2


def test_a_users_stream_may_be_of_the_pool_that_ours_come_from() -> None:
    user = torch.npu.Stream()
    in_pool = 1
    while torch.npu.Stream() != user:
        in_pool += 1
    for _ in range(in_pool - 1):
        torch.npu.Stream()  # the next one is the user's again
    inputs, model, before = prompt(1, 9), llama(), replays()
    with torch.npu.stream(user):
        expected = at_level(1, lambda: tokens(model, inputs, UNTIL + 4))
        found = at_level(2, lambda: tokens(model, inputs, UNTIL + 4))
    assert torch.equal(found, expected) and replays() > before, reasons()


def test_a_cache_that_is_full_is_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # A kind that nothing before has compared: within a renewal it could not be.
    monkeypatch.setattr(buffers, "LEAST_SPACE", 24)
    inputs, new = prompt(1, 9), 60
    model = llama(num_attention_heads=4, num_key_value_heads=2, head_dim=48).half()
    expected = at_level(1, lambda: tokens(model, inputs, new))
    liteboost_adaptor.apply(level=2)
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    assert replays() - before >= new - 20, reasons()


def test_keys_that_become_many_are_compared_before_they_are_captured() -> None:
    assert native_npu.load().loaded
    inputs, new = prompt(1, torch.ops.liteboost._npu_long_from() - 14), 24
    model = llama(num_key_value_heads=2, head_dim=32, max_position_embeddings=4096).half()
    expected = at_level(1, lambda: tokens(model, inputs, new))
    liteboost_adaptor.apply(level=2)
    before, first = replays(), reasons().get(FIRST, 0)
    assert torch.equal(tokens(model, inputs, new), expected)
    # One of two lengths is a token ahead of the other.
    assert reasons()[FIRST] - first == 3 and replays() - before >= new - 12, reasons()


def test_an_attention_that_was_refused_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(op: str, kind: str, device: str) -> Any:
        if op == "attention" and "head-80" in kind:
            raise torch.OutOfMemoryError("planted")  # kept for this process alone
        return compare(op, kind, device)

    compare = first_use.compare
    monkeypatch.setattr(first_use, "compare", refusing)
    inputs, model = prompt(1, 9), llama(num_key_value_heads=2, head_dim=80)
    expected = at_level(1, lambda: tokens(model, inputs, UNTIL))
    liteboost_adaptor.apply(level=2)
    before = replays()
    assert torch.equal(tokens(model, inputs, UNTIL), expected)
    assert replays() == before
    refused = "not captured: liteboost: the reference of attention would be called for each token: "
    assert any(why.startswith(refused) and why.endswith("planted") for why in reasons()), reasons()


def test_another_batch_and_another_prompt_are_captured_for_themselves() -> None:
    model = llama()
    cases = [prompt(1, 9), prompt(3, 9), prompt(1, 20)]
    expected = at_level(1, lambda: [tokens(model, each, UNTIL + 4) for each in cases])
    liteboost_adaptor.apply(level=2)
    for _ in range(2):
        for inputs, own in zip(cases, expected, strict=True):
            before = replays()
            assert torch.equal(tokens(model, inputs, UNTIL + 4), own)
            assert replays() > before, reasons()


def test_a_padded_batch_is_captured() -> None:
    inputs, new, model = prompt(3, 9, 4), UNTIL + 20, llama()
    expected = at_level(1, lambda: tokens(model, inputs, new))
    liteboost_adaptor.apply(level=2)
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    assert replays() - before >= 20, reasons()


@pytest.mark.parametrize("padding", [pytest.param(0, marks=pytest.mark.full), 4])
def test_a_window_is_crossed(padding: int) -> None:
    inputs, new, model = prompt(2 if padding else 1, 9, padding), 100, windowed(60)
    expected = at_level(1, lambda: tokens(model, inputs, new))
    liteboost_adaptor.apply(level=2)
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    assert replays() - before >= new - UNTIL - 10, reasons()


@pytest.mark.full
def test_a_window_of_integers_is_crossed() -> None:
    """Integers and scales are read where they lie, wherever the window begins."""
    inputs, new, model = prompt(1, 9), 100, windowed(60)
    expected = at_level(2, lambda: tokens(model, inputs, new), quant="kv8", disable="step.*")
    liteboost_adaptor.apply(level=2, quant="kv8")
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    assert replays() - before >= new - UNTIL - 10, reasons()


@pytest.mark.parametrize("layers", [2, pytest.param(28, marks=pytest.mark.full)])
def test_the_host_launches_five_times_for_a_step_and_renews_each_attention(layers: int) -> None:
    check_launches(llama(layers), layers)


@pytest.mark.full
def test_a_cache_of_integers_takes_no_further_launch_of_the_host() -> None:
    captured = check_launches(llama(2), 2, quant="kv8")
    # Two are rounded; integers are appended in one launch, scales in two.
    assert [captured.count(f"aclnn{op}") for op in ("DynamicQuant", "ScatterPaKvCache")] == [4, 2]
    assert captured.count("aclnnScatterNdUpdate") == 4


def check_launches(model: LlamaForCausalLM, layers: int, **settings: Any) -> list[str]:
    """What the host launches for a step of ``model``, and what is captured of it."""
    liteboost_adaptor.apply(level=2, **settings)
    step = one_step(model, 9)
    around = [launch.op for launch in step.launches if not launch.graph]
    # Token and position are copied in, the place in the cache is written; the graph; logits are copied out.
    host = len(around) - len(launched_by_a_replay()) + len(step.of("replay"))
    assert host <= 5 and len(step.of("replay")) == 1, around
    assert len(step.of("update")) == layers and all(each.fields["tasks"] == 1 for each in step.of("update"))
    captured = [launch.op for launch in step.launches if launch.graph]
    assert captured.count("aclnnFusedInferAttentionScoreV3") == layers
    assert not step.synchronisations and not step.of("allocate")
    assert not [copy for way in ("d2h", "h2d", "d2d") for copy in step.copies(way)]
    return captured


def test_results_are_not_written_by_the_next_step() -> None:
    model, inputs = llama(), prompt(1, 9)
    settings = {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    settings |= {"do_sample": False, "max_new_tokens": UNTIL}
    expected = at_level(1, lambda: model.generate(**inputs, **settings).logits)
    liteboost_adaptor.apply(level=2)
    before = replays()
    found = model.generate(**inputs, **settings).logits
    assert replays() > before, reasons()
    assert all(torch.allclose(*pair, atol=0.1, rtol=0.05) for pair in zip(found, expected, strict=True))
    assert len({float(each.float().sum()) for each in found}) > UNTIL // 2


def test_other_memory_of_a_weight_is_captured_again() -> None:
    model, inputs = llama(), prompt(1, 9)

    def changed() -> torch.Tensor:
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.data = weight.data.clone().mul_(0.5)
        return tokens(model, inputs, UNTIL)

    kept = {name: value.clone() for name, value in model.state_dict().items()}
    expected = at_level(1, changed)
    model.load_state_dict(kept)
    liteboost_adaptor.apply(level=2)
    tokens(model, inputs, UNTIL)
    before = replays()
    assert torch.equal(changed(), expected)
    assert replays() > before, reasons()


@pytest.mark.parametrize(
    ("how", "by"), [({"graph": "0"}, "LITEBOOST_GRAPH=0"), ({"disable": RULE}, f"LITEBOOST_DISABLE={RULE}")]
)
def test_graphs_can_be_turned_off(how: dict[str, str], by: str) -> None:
    model, inputs = llama(), prompt(1, 9)
    before = replays()
    liteboost_adaptor.apply(level=2, **how)
    tokens(model, inputs, UNTIL)
    assert replays() == before
    (row,) = (row for row in liteboost_adaptor.status().rules if row.id == RULE)
    assert (row.state, row.reason) == ("disabled", f"turned off by {by}")


def test_what_cannot_be_captured_is_told() -> None:
    model, inputs = llama().float(), prompt(1, 9)
    expected = at_level(1, lambda: tokens(model, inputs, UNTIL))
    liteboost_adaptor.apply(level=2)
    assert torch.equal(tokens(model, inputs, UNTIL), expected)
    reason = "keys and values of attention in fp32 are copied for each token"
    assert any(reason in each for each in reasons()), reasons()


def test_a_capture_that_fails_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(self: Graph, tasks: int) -> None:
        torch.npu.current_stream().synchronize()  # forbidden: it ends with the capture, which raises

    model, inputs = llama(), prompt(1, 9)
    expected = at_level(1, lambda: tokens(model, inputs, UNTIL))
    liteboost_adaptor.apply(level=2)
    monkeypatch.setattr(Graph, "_launch", waiting)
    before = replays()
    assert torch.equal(tokens(model, inputs, UNTIL), expected)
    assert replays() == before and any("capture_end" in why for why in reasons()), reasons()
    monkeypatch.undo()
    torch.npu.manual_seed(3)
    drawn = torch.randn(5, device="npu")
    torch.npu.manual_seed(3)
    assert torch.equal(torch.randn(5, device="npu"), drawn)
    torch.npu.empty_cache()
    launched_by_a_replay()  # and others are captured


PROGRAM = """
import torch
from cann_sim.faults import failing
from npu.test_captured_steps import UNTIL, llama, prompt, replays, tokens
import liteboost_adaptor
from liteboost_adaptor.errors import DeviceFaultError
from liteboost_adaptor.program import step
step.RECORDED_AT = 4
liteboost_adaptor.apply(level=2)
model, inputs = llama(), prompt(1, 9)
with torch.no_grad():
    tokens(model, inputs, UNTIL)
    assert replays()
    planted = failing({fault})
    planted.__enter__()
    print(tokens(model, inputs, UNTIL).tolist())
"""


@pytest.mark.full
@pytest.mark.parametrize("quant", ["w8a16", "w4a16", "w8a8"])
def test_quantized_layers_are_captured(quant: str) -> None:
    inputs, new, model = prompt(1, 9), UNTIL + 10, llama()
    quantize_model(model.cpu(), LiteBoostConfig(quant))
    model.npu()
    liteboost_adaptor.apply(level=2, graph="0")
    expected = tokens(model, inputs, new)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=2)
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    assert replays() - before >= 10, reasons()


@pytest.mark.full
@pytest.mark.parametrize("padding", [0, 4])
def test_a_cache_of_integers_is_captured(padding: int) -> None:
    inputs, new, model = prompt(3, 9, padding), 160, llama(num_attention_heads=4, num_key_value_heads=2)
    liteboost_adaptor.apply(level=2, quant="kv8", graph="0")
    expected = tokens(model, inputs, new)
    liteboost_adaptor.undo()
    liteboost_adaptor.apply(level=2, quant="kv8")
    before = replays()
    assert torch.equal(tokens(model, inputs, new), expected)
    # It grows once.
    assert replays() - before >= new - UNTIL - 2, reasons()


@pytest.mark.full
@pytest.mark.parametrize("ends", [None, 127])
@pytest.mark.parametrize("sampled", [{"do_sample": False}, {"do_sample": True, "top_k": 20, "top_p": 0.9}])
def test_the_host_waits_once_for_a_token_however_it_is_chosen(
    sampled: dict[str, Any], ends: int | None
) -> None:
    model, inputs = llama(), prompt(3, 9, 4)
    settings = sampled | {"eos_token_id": ends, "min_new_tokens": UNTIL + 20 if ends else None}
    liteboost_adaptor.apply(level=2)
    tokens(model, inputs, UNTIL + 4, **settings)
    found = []
    for new in (UNTIL, UNTIL + 4):
        before = replays()
        with recording() as trace:
            tokens(model, inputs, new, **settings)
        assert replays() - before >= new - 8, reasons()
        found.append([len(trace.copies("d2h")), len(trace.synchronisations), len(trace.copies("h2d"))])
    copies, waits, sent = (after - before for before, after in zip(*found, strict=True))
    assert (copies, waits, sent) == (4, 4, 0)


@pytest.mark.full
def test_a_fault_in_a_replay_is_told_and_the_next_process_works() -> None:
    def run(fault: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(fault=fault)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1], timeout=300
        )

    failed = run("'aclnnSwiGlu@device:507015'")
    assert failed.returncode != 0
    assert "aclnnSwiGlu" in failed.stderr and "the device was lost with 507015" in failed.stderr, (
        failed.stderr
    )
    assert run("").returncode == 0
