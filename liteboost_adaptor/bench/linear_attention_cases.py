"""The gated delta rule and the causal convolution beside the code of ``modeling_qwen3_next``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..ops.registry import ops as references
from .op_case import DELTA_KEY_HEADS, DELTA_VALUE_HEADS, HEAD_DIM, Case, case


def _delta_inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value, g, beta and state of a layer of Qwen3-Next-80B-A3B."""
    heads = {"query": DELTA_KEY_HEADS, "key": DELTA_KEY_HEADS, "value": DELTA_VALUE_HEADS}
    query, key, value = (torch.randn(1, rows, count, HEAD_DIM).to(dtype) for count in heads.values())
    g = -torch.rand(1, rows, DELTA_VALUE_HEADS)
    beta = torch.rand(1, rows, DELTA_VALUE_HEADS).to(dtype)
    return query, key, value, g, beta, torch.randn(1, DELTA_VALUE_HEADS, HEAD_DIM, HEAD_DIM)


def _delta_case(
    name: str, original: Callable[..., object], rows: int, dtype: torch.dtype, copies: bool
) -> Case:
    """``original``: of ``modeling_qwen3_next``. ``copies``: the op gets a state of its own to change."""
    *inputs, state = _delta_inputs(rows, dtype)
    scaling = HEAD_DIM**-0.5
    forms = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def run(op: Callable[..., object], *tensors: Tensor) -> object:
        *rest, memory = tensors
        memory = memory.clone() if copies else memory
        result = op(*rest, memory, scaling=scaling, normalize=True)
        return (result, memory) if copies else result

    exact = [x.double() for x in (*inputs, state)]
    return Case(
        name,
        f"{list(inputs[1].shape)}, {list(inputs[2].shape)}",
        dtype,
        lambda: run(getattr(torch.ops.liteboost, name), *inputs, state),
        lambda: original(*inputs, initial_state=state, **forms),
        lambda: run(references()[name].reference, *exact),
    )


def recurrent_delta_rule(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    original = modeling.torch_recurrent_gated_delta_rule
    yield _delta_case("recurrent_gated_delta_rule", original, rows, dtype, copies=True)


def chunk_delta_rule(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    original = modeling.torch_chunk_gated_delta_rule
    yield _delta_case("chunk_gated_delta_rule", original, rows, dtype, copies=False)


def _causal_conv_inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer of the same model convolves, its weight, and a state."""
    channels = (2 * DELTA_KEY_HEADS + DELTA_VALUE_HEADS) * HEAD_DIM
    x = torch.randn(1, rows, channels).to(dtype).transpose(1, 2)
    return x, torch.randn(channels, 4).to(dtype), torch.randn(1, channels, 4).to(dtype)


def causal_conv1d(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    x, weight, _ = _causal_conv_inputs(rows, dtype)
    original = modeling.causal_conv1d_fn
    yield case("causal_conv1d", str(list(x.shape)), original, x, weight, None, "silu")


def causal_conv1d_update(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    x, weight, state = _causal_conv_inputs(rows, dtype)
    ours, original = torch.ops.liteboost.causal_conv1d_update, modeling.causal_conv1d_update
    exact = references()["causal_conv1d_update"].reference

    def run(op: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs, memory, weights = tensors
        memory = memory.clone()
        return op(inputs, memory, weights, None, "silu"), memory

    yield Case(
        "causal_conv1d_update",
        str(list(x.shape)),
        dtype,
        lambda: run(ours, x, state, weight),
        lambda: run(original, x, state, weight),
        lambda: run(exact, x.double(), state.double(), weight.double()),
    )
