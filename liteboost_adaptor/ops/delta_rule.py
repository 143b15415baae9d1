"""The gated delta rule: linear attention with a state that decays and corrects itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .checks import check_dtype, check_same_device, check_same_dtype, check_same_shape, dtype_name, shape_text
from .registry import define

EPS = 1e-6
#: Tokens that the reference of `chunk_gated_delta_rule` takes at once.
CHUNK = 64


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scaling: float,
    normalize: bool = False,
) -> Tensor:
    """Run the rule over each token, with ``state`` updated in place: for decoding, and short steps.

    For each value head, with its state ``S`` as a ``[k_dim, v_dim]`` matrix, token by token::

        S     = exp(g) * S
        delta = beta * (v - S^T k)
        S     = S + k delta^T
        out   = S^T (scaling * q)

    Args:
        query: ``[batch, tokens, k_heads, k_dim]``, fp32/bf16/fp16 (here also fp64). Any strides.
        key: Shape and dtype of ``query``. Any strides.
        value: ``[batch, tokens, v_heads, v_dim]``, dtype of ``query``. Any strides. ``v_heads`` is a multiple
            of ``k_heads``: each key head serves as many consecutive value heads.
        g: ``[batch, tokens, v_heads]``, the logarithm of the decay, meant to be at most 0; dtype of ``value``
            or fp32.
        beta: ``[batch, tokens, v_heads]``, how far the state is corrected; dtype of ``value`` or fp32.
        state: ``[batch, v_heads, k_dim, v_dim]``, fp32 or bf16 (here also fp64), updated in place. Any
            strides.
        scaling: Factor of the query, ``k_dim**-0.5`` in the models.
        normalize: Divide query and key by their lengths first: ``x * rsqrt(sum(x**2) + 1e-6)``.

    Returns:
        Shape and dtype of ``value``, contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not in the list above.
        DeviceError: The tensors are on different devices.

    Numerics:
        All in fp32 (fp64 for fp64), rounded once, and so is a state in bf16. On an NPU one token with a state
        in bf16, as ``[v_dim, k_dim]`` in memory, is one operator and a norm, which rounds query and key to
        bf16 once they are divided; any other is computed as here. The native kernel takes a few tokens at
        once (``kernels/delta_rule/delta_rule.h``): other sums of the same terms.

    Source:
        Yang et al. 2024, arXiv:2412.06464; ``torch_recurrent_gated_delta_rule`` of transformers 5.23, with
        its ``use_qk_l2norm_in_kernel`` as ``normalize``.
    """
    op = "recurrent_gated_delta_rule"
    _check_inputs(op, query, key, value, g, beta)
    _check_state(op, "state", state, key, value, or_bfloat16=True)
    q, k, v, decay, rate = _by_heads(query, key, value, g, beta, scaling, normalize)
    decay = decay.exp()
    memory, outputs = state.to(v.dtype), []
    for t in range(value.shape[1]):
        memory = memory * decay[:, :, t, None, None]
        known = (memory * k[:, :, t, :, None]).sum(-2)
        delta = (v[:, :, t] - known) * rate[:, :, t, None]
        memory = memory + k[:, :, t, :, None] * delta[:, :, None, :]
        outputs.append((memory * q[:, :, t, :, None]).sum(-2))
    if not outputs:
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    state.copy_(memory)
    return torch.stack(outputs, 1).to(value.dtype)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    scaling: float,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The rule of `recurrent_gated_delta_rule` over many tokens at once: for prompts.

    Args:
        query: As in `recurrent_gated_delta_rule`.
        key: As there.
        value: As there.
        g: As there.
        beta: As there.
        initial_state: As ``state`` there, but left as it is; None for zeros.
        scaling: As there.
        normalize: As there.

    Returns:
        The output, shape and dtype of ``value``, and the state behind the last token,
        ``[batch, v_heads, k_dim, v_dim]`` in fp32. Both contiguous.

    Raises:
        ShapeError: The shapes do not fit together.
        DTypeError: The dtypes differ, or are not those of `recurrent_gated_delta_rule`.
        DeviceError: The tensors are on different devices.

    Numerics:
        As `recurrent_gated_delta_rule`. Here chunks of 64 tokens, in which the corrections solve a triangular
        system, as in the models; the native kernel takes chunks of a few. There NaN and infinities travel as
        in `recurrent_gated_delta_rule`, to no token before, and ``g`` of -inf is a decay of 0; here what a
        token does not see is multiplied by 0, and logarithms are subtracted, so that both are NaN.

    Source:
        Yang et al. 2024, arXiv:2406.06484; ``torch_chunk_gated_delta_rule`` of transformers 5.23.
    """
    op = "chunk_gated_delta_rule"
    _check_inputs(op, query, key, value, g, beta)
    if initial_state is not None:
        _check_state(op, "initial_state", initial_state, key, value)
    q, k, v, decay, rate = _by_heads(query, key, value, g, beta, scaling, normalize)
    batch, heads, tokens, v_dim = v.shape
    state = (
        v.new_zeros(batch, heads, k.shape[-1], v_dim) if initial_state is None else initial_state.to(v.dtype)
    )
    out = v.new_empty(batch, tokens, heads, v_dim)
    for begin in range(0, tokens, CHUNK):
        part = slice(begin, begin + CHUNK)
        result, state = _chunk(
            q[:, :, part], k[:, :, part], v[:, :, part], decay[:, :, part], rate[:, :, part], state
        )
        out[:, part] = result.transpose(1, 2)
    if state is initial_state:
        state = state.clone(memory_format=torch.contiguous_format)
    return out.to(value.dtype), state.contiguous()


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk ``[batch, heads, tokens, dim]``: its output, and the state behind it."""
    tokens = q.shape[2]
    since = decay.cumsum(-1)  # log of the decays from the chunk's first token on
    between = since[..., :, None] - since[..., None, :]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, float("-inf")).exp()
    known = since.exp()[..., None] * (k @ state)
    system = rate[..., None] * (k @ k.transpose(-1, -2)) * between
    # The diagonal is not read: it is 1.
    delta = torch.linalg.solve_triangular(
        system, rate[..., None] * (v - known), upper=False, unitriangular=True
    )
    out = since.exp()[..., None] * (q @ state) + ((q @ k.transpose(-1, -2)) * between) @ delta
    kept = k * (since[..., -1:] - since).exp()[..., None]
    return out, state * since[..., -1].exp()[..., None, None] + kept.transpose(-1, -2) @ delta


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scaling: float, normalize: bool
) -> tuple[Tensor, ...]:
    """All as ``[batch, v_heads, tokens, ...]`` in fp32 or fp64, with scaled queries."""
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    q, k, v, decay, rate = (x.transpose(1, 2).to(dtype) for x in (query, key, value, g, beta))
    if normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
    if k.shape[1] != v.shape[1]:
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    return q * scaling, k, v, decay, rate


def _check_inputs(op: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> None:
    for name, tensor, heads in (("query", query, "k"), ("key", key, "k"), ("value", value, "v")):
        if tensor.dim() != 4:
            raise ShapeError(
                f"liteboost::{op}: {name} must have shape [batch, tokens, {heads}_heads, dim], got "
                f"{shape_text(tensor.shape)}; do not transpose tokens and heads"
            )
    check_dtype(op, "value", value)
    for name, tensor in (("query", query), ("key", key)):
        check_same_dtype(op, name, tensor, "value", value)
        check_same_device(op, name, tensor, "value", value)
    check_same_shape(op, "key", key, "query", query)
    if query.shape[:2] != value.shape[:2]:
        raise ShapeError(
            f"liteboost::{op}: query must have batch and tokens of value {shape_text(value.shape)}, got "
            f"{shape_text(query.shape)}; pass the query of the same tokens"
        )
    k_heads, v_heads = query.shape[2], value.shape[2]
    if v_heads and (not k_heads or v_heads % k_heads):
        raise ShapeError(
            f"liteboost::{op}: value must have a multiple of the {k_heads} heads of query, got {v_heads}; "
            "do not repeat key heads before the call"
        )
    for name, tensor in (("g", g), ("beta", beta)):
        check_same_dtype(op, name, tensor, "value", value, or_float32=True)
        check_same_device(op, name, tensor, "value", value)
        if tensor.shape != value.shape[:3]:
            raise ShapeError(
                f"liteboost::{op}: {name} must have shape [batch, tokens, v_heads] = "
                f"{shape_text(value.shape[:3])}, got {shape_text(tensor.shape)}; pass one number for each "
                "value head of each token"
            )


def _check_state(
    op: str, name: str, state: Tensor, key: Tensor, value: Tensor, or_bfloat16: bool = False
) -> None:
    is_double = value.dtype == torch.float64 and state.dtype == torch.float64
    is_short = or_bfloat16 and state.dtype == torch.bfloat16
    if state.dtype != torch.float32 and not is_double and not is_short:
        raise DTypeError(
            f"liteboost::{op}: {name} must be float32{' or bfloat16' if or_bfloat16 else ''}, got "
            f"{dtype_name(state.dtype)}; keep the state in float32, small updates are lost in 16 bits"
        )
    check_same_device(op, name, state, "value", value)
    shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    if state.shape != shape:
        raise ShapeError(
            f"liteboost::{op}: {name} must have shape [batch, v_heads, k_dim, v_dim] = {shape_text(shape)}, "
            f"got {shape_text(state.shape)}; pass the state of this layer, not transposed"
        )


define(
    "recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
    "Tensor(a!) state, *, float scaling, bool normalize=False) -> Tensor",
    recurrent_gated_delta_rule,
)
define(
    "chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
    "Tensor? initial_state=None, *, float scaling, bool normalize=False) -> (Tensor, Tensor)",
    chunk_gated_delta_rule,
)
