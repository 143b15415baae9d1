"""What decoding a token launches, moves and waits for on an NPU, counted by the simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cann_sim.trace import Trace
from npu.marks import decoded, launched_by_a_replay
from support import llamas
from support.must_move import must_move
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaForCausalLM

import liteboost_adaptor

#: transformers on torch_npu (sdpa, bf16): launches a layer, and outside the layers, a token.
ORIGINAL_A_LAYER, ORIGINAL_OUTSIDE = 40, 36
PROMPT, NEW = 252, 5  # a cache of 256 when the last token but one is made


def llama(layers: int) -> LlamaForCausalLM:
    return llamas.llama(torch.bfloat16, num_hidden_layers=layers, **llamas.WIDE)


def deepseek(layers: int, dense: int | None = None) -> DeepseekV3ForCausalLM:
    """MLA of the sizes that DeepSeek V3 has for a head; behind ``dense`` layers (or all) with experts."""
    config = DeepseekV3Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        num_hidden_layers=layers,
        first_k_dense_replace=layers if dense is None else dense,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval().npu()


def a_token(model: torch.nn.Module) -> Trace:
    return decoded(model, PROMPT, NEW)


def test_launches_of_a_layer_and_outside_the_layers(level: int, record_property: Any) -> None:
    fewer, more = a_token(llama(2)), a_token(llama(3))
    a_layer = len(more.launches) - len(fewer.launches)
    outside = len(fewer.launches) - 2 * a_layer - len(fewer.of("replay")) * len(launched_by_a_replay())
    record_property("launches a layer, outside", (a_layer, outside))
    if level:
        assert a_layer <= (16 if level == 1 else 10), more.ops
        assert outside <= ORIGINAL_OUTSIDE / 2, fewer.ops
    else:
        # What is measured here is what the figures of the original were measured by.
        assert (a_layer, outside) == (ORIGINAL_A_LAYER, ORIGINAL_OUTSIDE), more.ops


@pytest.mark.parametrize(("dense", "most"), [(None, 20), (0, 30)], ids=["dense", "experts"])
def test_launches_of_a_layer_with_mla(level: int, dense: int | None, most: int, record_property: Any) -> None:
    if level != 2:
        pytest.skip("programs are of level 2")
    fewer, more = (decoded(deepseek(layers, dense), 12, 40) for layers in (1, 2))
    a_layer = len(more.launches) - len(fewer.launches)
    record_property("launches a layer", a_layer)
    assert a_layer <= most, more.ops


def test_the_host_waits_for_the_device_at_most_once_a_token(level: int) -> None:
    if not level:
        pytest.skip("level 0 leaves generate as it is")
    fewer, more = a_token(llama(2)), a_token(llama(3))
    for one, layers in ((fewer, 2), (more, 3)):
        assert len(one.copies("d2h")) <= 1, layers
        assert len(one.copies("d2h")) == len(fewer.copies("d2h")), "a layer copies to the host"
        assert len(one.synchronisations) == len(fewer.synchronisations), "a layer waits"


def test_bytes_are_counted_against_what_must_move(level: int, record_property: Any) -> None:
    model = llama(3)
    moved = a_token(model).bytes
    least = must_move(model.config, PROMPT + NEW - 1).total
    record_property("bytes over what must move", moved / least)
    # Activations come on top, and at level 1 the cache is copied for each token.
    assert moved > least
    if level:
        assert moved < (1.5 if level == 1 else 1.05) * least


def test_the_cache_is_neither_copied_nor_joined_at_level_2(no_grad: None) -> None:
    model = llama(2)
    liteboost_adaptor.apply(model, level=2)
    one_cache = PROMPT * model.config.num_key_value_heads * model.config.head_dim * 2
    for launch in a_token(model).launches:
        assert launch.written < one_cache / 4, launch
        assert "Attention" in launch.op or "Mm" in launch.op or launch.read < one_cache / 4, launch
