"""Functions of linear attention and state space layers: the gated delta rule, the convolution before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .. import config
from ..eligibility import autocast, unserved
from ..report import CallCounter

ops = torch.ops.liteboost

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
#: Arguments that tell packed sequences apart; the originals raise, or a package's kernel takes them.
PACKED = ("cu_seqlens", "seq_idx")


def recurrent_gated_delta_rule(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """``torch_recurrent_gated_delta_rule``: the state given is left as it is, and a new one returned."""

    def rule(state: torch.Tensor | None, inputs: tuple[torch.Tensor, ...], **form: Any) -> Any:
        if state is None:
            _, key, value, *_ = inputs
            shape = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
            state = _kept(torch.zeros(shape, dtype=torch.float32, device=value.device), value)
        else:  # a cache's own, perhaps, or one that beams share
            is_short = state.dtype == torch.bfloat16  # which lies otherwise
            state = state.clone(memory_format=torch.preserve_format if is_short else torch.contiguous_format)
        return ops.recurrent_gated_delta_rule(*inputs, state, **form), state

    return _delta_rule(original, counter, rule)


def chunk_gated_delta_rule(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """``torch_chunk_gated_delta_rule``; its ``chunk_size`` is a matter of speed, and ours is the kernel's."""

    def rule(state: torch.Tensor | None, inputs: tuple[torch.Tensor, ...], **form: Any) -> Any:
        state = state if state is None else state.float()
        out, state = ops.chunk_gated_delta_rule(*inputs, state, **form)
        return out, _kept(state, inputs[2])

    return _delta_rule(original, counter, rule)


def _kept(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``state`` as layers keep it: with ``delta_state="bf16"`` on an NPU in bf16, as ``[v_dim, k_dim]``."""
    is_short = config.settings().delta_state == "bf16" and value.device.type == "npu"
    if not is_short or value.dtype != torch.bfloat16:
        return state
    return state.to(torch.bfloat16).transpose(2, 3).contiguous().transpose(2, 3)


def _delta_rule(
    original: Callable[..., Any], counter: CallCounter, rule: Callable[..., Any]
) -> Callable[..., Any]:
    read = _reader(original)

    def apply(*args: Any, **kwargs: Any) -> Any:
        call = read(args, kwargs)
        reason = _delta_unserved(call)
        if reason:
            counter.count_fallback(reason)
            return original(*args, **kwargs)
        counter.count_served()
        inputs = tuple(call[name] for name in ("query", "key", "value", "g", "beta"))
        out, state = rule(
            call["initial_state"],
            inputs,
            scaling=inputs[1].shape[-1] ** -0.5,
            normalize=bool(call["use_qk_l2norm_in_kernel"]),
        )
        return out, state if call["output_final_state"] else None

    return apply


def _delta_unserved(call: dict[str, Any]) -> str:
    if not call:
        return "arguments that the function does not take"
    if any(call.get(name) is not None for name in PACKED):
        return "packed sequences"
    query, key, value, g, beta = (call[name] for name in ("query", "key", "value", "g", "beta"))
    state = call["initial_state"]
    reason = unserved(query, key, value, g, beta, state) or autocast(query)
    if reason:
        return reason
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "mixed dtypes"
    if any(rate.dtype not in (query.dtype, torch.float32) for rate in (g, beta)):
        return "g or beta in another dtype than query or fp32"
    if query.ndim != 4 or value.ndim != 4 or query.shape != key.shape or query.shape[:2] != value.shape[:2]:
        return "query, key and value of shapes that are not served"
    if not query.shape[2] or value.shape[2] % query.shape[2] or not query.shape[3]:
        return "query, key and value of shapes that are not served"
    if g.shape != value.shape[:3] or beta.shape != value.shape[:3]:
        return "g or beta of another shape"
    if state is None:
        return ""
    if state.dtype != torch.float32 and not (state.dtype == torch.bfloat16 and value.device.type == "npu"):
        return "a state that is not in fp32"
    if state.shape != (value.shape[0], value.shape[2], key.shape[3], value.shape[3]):
        return "a state of another shape"
    return ""


def causal_conv1d(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """``causal_conv1d_fn``: over a prompt, or over a state's columns and what follows them."""
    read = _reader(original)

    def apply(*args: Any, **kwargs: Any) -> Any:
        call = read(args, kwargs)
        reason = _conv_unserved(call)
        if reason:
            counter.count_fallback(reason)
            return original(*args, **kwargs)
        counter.count_served()
        activation = ACTIVATIONS[call["activation"]]
        return ops.causal_conv1d(call["hidden_states"], call["weight"], call["bias"], activation)

    return apply


def causal_conv1d_update(original: Callable[..., Any], counter: CallCounter) -> Callable[..., Any]:
    """``causal_conv1d_update``: the state, which is the cache's, is updated in place as in the original."""
    read = _reader(original)

    def apply(*args: Any, **kwargs: Any) -> Any:
        call = read(args, kwargs)
        reason = _conv_unserved(call) or _conv_state_unserved(call)
        if reason:
            counter.count_fallback(reason)
            return original(*args, **kwargs)
        counter.count_served()
        x, state = call["hidden_states"], call["conv_state"]
        activation = ACTIVATIONS[call["activation"]]
        return ops.causal_conv1d_update(x, state, call["weight"], call["bias"], activation)

    return apply


def _conv_unserved(call: dict[str, Any]) -> str:
    if not call:
        return "arguments that the function does not take"
    if any(call.get(name) is not None for name in PACKED):
        return "packed sequences"
    x, weight, bias = call["hidden_states"], call["weight"], call["bias"]
    reason = unserved(x, weight, bias) or autocast(x)
    if reason:
        return reason
    if not x.is_cpu:  # torch's own is two launches
        return f"device {x.device.type}"
    activation = call["activation"]
    if activation is not None and (type(activation) is not str or activation not in ACTIVATIONS):
        return "an activation that is not served"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "a weight of another dtype than x"
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[1] or not weight.shape[1]:
        return "shapes that are not served"
    return "shapes that are not served" if bias is not None and bias.shape != x.shape[1:2] else ""


def _conv_state_unserved(call: dict[str, Any]) -> str:
    x, state = call["hidden_states"], call["conv_state"]
    reason = unserved(state)
    if reason:
        return reason
    if state.dtype != x.dtype or state.device != x.device:
        return "a state of another dtype or device than x"
    if state.ndim != 3 or state.shape[:2] != x.shape[:2] or state.shape[2] < call["weight"].shape[1] - 1:
        return "a state of another shape"
    return ""


def _reader(
    original: Callable[..., Any],
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """A function that names the arguments of a call; nothing for a call that the original does not take.

    What goes into the original's ``**kwargs`` is in it too: nothing there changes what is computed.
    """
    parameters = inspect.signature(original).parameters.values()
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = tuple(p.name for p in plain)
    required = tuple(p.name for p in plain if p.default is p.empty)
    defaults = {p.name: p.default for p in plain if p.default is not p.empty}

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or any(name in kwargs for name in given):
            return {}
        call = {**defaults, **given, **kwargs}
        if any(name not in call for name in required):
            return {}
        return call if takes_more or len(call) == len(names) else {}

    return read
