"""What ``bench.ops`` times: each op beside the ATen sequence it replaces, at the sizes of Qwen3-0.6B.

Experts are those of a layer of Qwen3-30B-A3B, half of them to save memory; the gated delta rule has the heads
of Qwen3-Next-80B-A3B.

The sequences are those of transformers 5.23 (``modeling_qwen3``, and ``modeling_qwen3_next`` for the gated
norm), written out here because in this process the modeling files themselves may be patched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.block_selection import select_blocks
from .attention_part_case import attention_part
from .head_linear_case import head_linear
from .int8_attention_cases import int8_attention, quantize_kv
from .linear_attention_cases import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_delta_rule,
    recurrent_delta_rule,
)
from .op_case import (
    CONTEXT,
    EPS,
    EXPERT_HIDDEN,
    EXPERT_INTERMEDIATE,
    EXPERTS,
    EXPERTS_A_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYER_WEIGHTS,
    VOCABULARY,
    WEIGHT_BYTES,
    Case,
    case,
    exact_of,
)
from .quantize_weight_case import quantize_w4, quantize_w8
from .quantized_cases import experts_packed, linear_packed, linear_w4a8, linear_w8a8


def cases(rows: int, dtype: torch.dtype, names: set[str]) -> Iterator[Case]:
    """Every case of the ops called ``names``, with ``rows`` tokens: 1 to decode, more to prefill.

    A generator, so that only one case's weights are in memory.
    """
    for name, make in MAKERS.items():
        if name in names:
            yield from make(rows, dtype)


def linear_cases(
    rows: int, dtype: torch.dtype, shapes: dict[str, tuple[int, int]], weight_bytes: int = WEIGHT_BYTES
) -> Iterator[Case]:
    """`linear` with weights of these shapes, each call with another one, together ``weight_bytes``."""
    for label, (n, k) in shapes.items():
        x = torch.randn(1, rows, k).to(dtype)
        weight = torch.randn(n, k).to(dtype)
        copies = max(2, weight_bytes // weight.nbytes) - 1
        # One turn for both, so that neither finds in a cache what the other has just read.
        turn = itertools.cycle([weight, *(weight.clone() for _ in range(copies))])
        yield Case(
            "linear",
            f"{label}: [{rows}, {k}] x [{n}, {k}]",
            dtype,
            lambda x=x, turn=turn: torch.ops.liteboost.linear(x, next(turn)),
            lambda x=x, turn=turn: F.linear(x, next(turn)),
            # For the first outputs only: in float64 a vocabulary's weight takes more than a gigabyte.
            lambda x=x, weight=weight: exact_of("linear", x, weight[:1024]),
            turn,
            k,
        )


def _linear(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    # Prefill computes the logits of the last token alone, so the vocabulary's weight meets one row.
    shapes = dict(LAYER_WEIGHTS) | ({"vocabulary": (VOCABULARY, HIDDEN)} if rows == 1 else {})
    return linear_cases(rows, dtype, shapes)


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    hidden = x.to(torch.float32)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    hidden = hidden * torch.rsqrt(variance + eps)
    return weight * hidden.to(x.dtype)


def _rms_norm(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((1, rows, HIDDEN), (1, rows, HEADS, HEAD_DIM)):
        x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
        yield case("rms_norm", str(list(shape)), _plain_rms_norm, x, weight, EPS)


def _plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return _plain_rms_norm(total, weight, eps), total


def _add_rms_norm(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x, residual = (torch.randn(1, rows, HIDDEN).to(dtype) for _ in range(2))
    weight = torch.randn(HIDDEN).to(dtype)
    yield case("add_rms_norm", str(list(x.shape)), _plain_add_rms_norm, x, residual, weight, EPS)


def _plain_inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


def _inverse_rms(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(1, rows, HIDDEN).to(dtype)
    yield case("inverse_rms", str(list(x.shape)), _plain_inverse_rms, x, EPS)


def _plain_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = _plain_rms_norm(x, weight, eps)
    return (normed * F.silu(gate.to(torch.float32))).to(x.dtype)


def _gated_rms_norm(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x, gate = (torch.randn(rows * HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    weight = torch.randn(HEAD_DIM).to(dtype)
    yield case("gated_rms_norm", str(list(x.shape)), _plain_gated_rms_norm, x, gate, weight, EPS)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(1, rows, HIDDEN).to(dtype)
    weight, bias = (torch.randn(HIDDEN).to(dtype) for _ in range(2))
    yield case("layer_norm", str(list(x.shape)), _plain_layer_norm, x, weight, bias, EPS)


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)


def _rope(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    q, k = (torch.randn(1, rows, heads, HEAD_DIM).to(dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS))
    angles = torch.rand(1, rows, HEAD_DIM // 2).repeat(1, 1, 2) * 6.28
    shapes = f"{list(q.shape)}, {list(k.shape)}"
    yield case("rope", shapes, _plain_rope, q, k, angles.cos().to(dtype), angles.sin().to(dtype))


def _rope_in_place(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """On copies of q and k, whose making is part of the time."""
    q, k = (torch.randn(1, rows, heads, HEAD_DIM).to(dtype).transpose(1, 2) for heads in (HEADS, KV_HEADS))
    angles = torch.rand(1, rows, HEAD_DIM // 2).repeat(1, 1, 2) * 6.28
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def ours() -> tuple[Tensor, Tensor]:
        rotated = q.clone(), k.clone()
        torch.ops.liteboost.rope_(*rotated, cos, sin)
        return rotated

    def exact() -> tuple[Tensor, Tensor]:
        rotated = q.double(), k.double()
        exact_of("rope_", *rotated, cos, sin)
        return rotated

    shapes = f"{list(q.shape)}, {list(k.shape)}"
    yield Case("rope_", shapes, dtype, ours, lambda: _plain_rope(q, k, cos, sin), exact)


def _plain_gated_activation(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gated_activation(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    gate, up = (torch.randn(1, rows, INTERMEDIATE).to(dtype) for _ in range(2))
    yield case("gated_activation", str(list(gate.shape)), _plain_gated_activation, gate, up)


def _plain_gated_linear(x: Tensor, gate: Tensor, _: None, up: Tensor, __: None) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _gated_linear(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(1, rows, HIDDEN).to(dtype)
    gate, up = (torch.randn(INTERMEDIATE, HIDDEN).mul(HIDDEN**-0.5).to(dtype) for _ in range(2))
    shapes = f"{list(x.shape)} x 2 {list(gate.shape)}"
    yield case("gated_linear", shapes, _plain_gated_linear, x, gate, None, up, None)


def _plain_activation(x: Tensor, _: str) -> Tensor:
    # transformers' NewGELUActivation
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _activation(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x = torch.randn(1, rows, INTERMEDIATE).to(dtype)
    yield case("activation", str(list(x.shape)), _plain_activation, x, "gelu_tanh")


def _attention(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    context = max(rows, CONTEXT)
    query = torch.randn(1, rows, HEADS, HEAD_DIM).to(dtype).transpose(1, 2)
    key, value = (torch.randn(1, KV_HEADS, context, HEAD_DIM).to(dtype) for _ in range(2))
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=False)

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float) -> Tensor:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)[0]

    shapes = f"{list(query.shape)}, {list(key.shape)}"
    scaling = HEAD_DIM**-0.5
    yield case("attention", shapes, plain, query, key, value, None, scaling, is_causal=True)


def _paged_attention(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """One prompt, or a token of each of 8 requests, with keys in pages as long as transformers'."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    requests, queries, page_rows = (8, 1, 256) if rows == 1 else (1, rows, 256)
    pages = -(-max(rows, CONTEXT) // page_rows)
    context = pages * page_rows
    query = torch.randn(requests * queries, HEADS, HEAD_DIM).to(dtype)
    cache = torch.randn(2 * requests * pages, 2, page_rows, KV_HEADS, HEAD_DIM).to(dtype)
    table = torch.randperm(len(cache))[: requests * pages].reshape(requests, pages)
    ends = torch.arange(requests + 1)
    places = (table[..., None] * 2 * page_rows + torch.arange(page_rows)).flatten()
    owner, age = torch.arange(requests).repeat_interleave(context), torch.arange(context).repeat(requests)
    hidden = (torch.arange(requests).repeat_interleave(queries)[:, None] != owner) | (
        (context - queries + torch.arange(queries).repeat(requests))[:, None] < age
    )
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=False, training=False)
    flat = cache.view(-1, KV_HEADS, HEAD_DIM)

    def plain(query: Tensor, *_: object) -> Tensor:
        keys, values = (
            flat[half * page_rows :].index_select(0, places).transpose(0, 1)[None] for half in (0, 1)
        )
        states = (query.transpose(0, 1)[None], keys, values)
        return sdpa_attention_forward(module, *states, mask, scaling=HEAD_DIM**-0.5)[0][0]

    halves = (cache[:, 0], cache[:, 1])
    shapes = f"{list(query.shape)}, {requests} x {context} keys"
    sums = (ends * queries, ends * context)
    yield case("paged_attention", shapes, plain, query, *halves, *sums, table, HEAD_DIM**-0.5)


#: Positions in a block, and the share of the blocks left out, where the prompt has as many.
BLOCK, SPARSITY = 64, 0.75


def _block_sparse_attention(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    context = max(rows, CONTEXT)
    query = torch.randn(1, rows, HEADS, HEAD_DIM).to(dtype).transpose(1, 2)
    key, value = (torch.randn(1, KV_HEADS, context, HEAD_DIM).to(dtype) for _ in range(2))
    select_idx, select_num_idx = select_blocks(query, key, SPARSITY, BLOCK)
    chosen = torch.zeros(*select_idx.shape[:2], -(-context // BLOCK) + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, select_idx % chosen.shape[-1], True)[..., :-1]  # -1 comes to the one too many
    mask = chosen.transpose(0, 1).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    causal = torch.ones(rows, context, dtype=torch.bool).tril(context - rows)
    mask = (mask[:, :rows, :context] & causal)[None]

    def original(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

    yield case(
        "block_sparse_attention",
        f"{list(query.shape)}, {list(key.shape)}",
        original,
        query,
        key,
        value,
        select_idx,
        select_num_idx,
        [BLOCK, BLOCK],
        HEAD_DIM**-0.5,
        True,
    )


def _kv_append(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Into a cache with room for as many positions again, behind those that are attended to."""
    capacity = 2 * max(rows, CONTEXT)
    key, value = (torch.randn(1, rows, KV_HEADS, HEAD_DIM).to(dtype).transpose(1, 2) for _ in range(2))
    buffers = [
        [torch.zeros(1, KV_HEADS, capacity, HEAD_DIM, dtype=dtype) for _ in range(2)] for _ in range(3)
    ]
    position = torch.arange(CONTEXT - 1, CONTEXT - 1 + rows)

    def append(caches: list[Tensor]) -> list[Tensor]:
        torch.ops.liteboost.kv_append(*caches, key, value, position.unsqueeze(0))
        return caches

    def plain(caches: list[Tensor]) -> list[Tensor]:
        # transformers' StaticLayer
        for cache, added in zip(caches, (key, value), strict=True):
            cache.index_copy_(2, position, added)
        return caches

    def exact() -> list[Tensor]:
        caches = [cache.double() for cache in buffers[2]]
        exact_of("kv_append", *caches, key, value, position.unsqueeze(0))
        return caches

    shapes = f"{list(key.shape)} into {list(buffers[0][0].shape)}"
    yield Case("kv_append", shapes, dtype, lambda: append(buffers[0]), lambda: plain(buffers[1]), exact)


def _experts(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """All that experts do for their tokens: both products, the gate and the weighted sum."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    # Multiples of one expert: so many random numbers would take longer than the timing.
    factors = torch.randn(EXPERTS, 1, 1).to(dtype)
    gate_up = factors * torch.randn(2 * EXPERT_INTERMEDIATE, EXPERT_HIDDEN).to(dtype)
    down = factors * torch.randn(EXPERT_HIDDEN, EXPERT_INTERMEDIATE).to(dtype)
    x = torch.randn(rows, EXPERT_HIDDEN).to(dtype)
    index = torch.rand(rows, EXPERTS).topk(EXPERTS_A_TOKEN).indices
    scores = torch.rand(rows, EXPERTS_A_TOKEN).to(dtype)
    module = SimpleNamespace(
        gate_up_proj=gate_up,
        down_proj=down,
        num_experts=EXPERTS,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        _is_expert_parallel=False,
        _apply_gate=lambda states: _plain_gated_activation(*states.chunk(2, dim=-1)),
    )
    ours = torch.ops.liteboost

    def run() -> Tensor:
        gate, up = ours.experts_linear(x, gate_up, None, index).chunk(2, dim=-1)
        states = ours.experts_linear(ours.gated_activation(gate, up), down, None, index)
        return ours.experts_combine(states, scores)

    def exact() -> object:
        # Of the experts used and the first outputs: in float64 all weights take gigabytes.
        used, local = index.unique(return_inverse=True)
        states = exact_of("experts_linear", x, gate_up[used], None, local)
        states = exact_of("gated_activation", *states.chunk(2, dim=-1))
        return exact_of(
            "experts_combine", exact_of("experts_linear", states, down[used, :64], None, local), scores
        )

    yield Case(
        "experts_linear",
        f"{EXPERTS_A_TOKEN} of {EXPERTS} experts: [{rows}, {EXPERT_HIDDEN}] x {list(gate_up.shape[1:])}",
        dtype,
        run,
        lambda: grouped_mm_experts_forward(module, x, index, scores),
        exact,
    )


def _plain_combine(y: Tensor, scores: Tensor) -> Tensor:
    return (y * scores.unsqueeze(-1)).sum(dim=1).to(y.dtype)


def _combine(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    y = torch.randn(rows, EXPERTS_A_TOKEN, EXPERT_HIDDEN).to(dtype)
    scores = torch.rand(rows, EXPERTS_A_TOKEN).to(dtype)
    yield case("experts_combine", str(list(y.shape)), _plain_combine, y, scores)


MAKERS: dict[str, Callable[[int, torch.dtype], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "inverse_rms": _inverse_rms,
    "gated_rms_norm": _gated_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "rope_": _rope_in_place,
    "activation": _activation,
    "gated_activation": _gated_activation,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "linear_w8a8": linear_w8a8,
    "linear_packed": linear_packed,
    "linear_w4a8": linear_w4a8,
    "attention": _attention,
    "attention_part": attention_part,
    "int8_attention": int8_attention,
    "quantize_kv": quantize_kv,
    "paged_attention": _paged_attention,
    "block_sparse_attention": _block_sparse_attention,
    "kv_append": _kv_append,
    "experts_linear": _experts,
    "experts_combine": _combine,
    "experts_packed": experts_packed,
    "recurrent_gated_delta_rule": recurrent_delta_rule,
    "chunk_gated_delta_rule": chunk_delta_rule,
    "causal_conv1d": causal_conv1d,
    "causal_conv1d_update": causal_conv1d_update,
    "head_linear": head_linear,
    "quantize_w8": quantize_w8,
    "quantize_w4": quantize_w4,
}
