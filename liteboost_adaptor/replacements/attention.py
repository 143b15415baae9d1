"""The attention core, as transformers' ``AttentionInterface`` calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..eligibility import autocast, autocast_dtype, is_castable, unserved
from ..kv_cache import int8_tensor
from ..kv_cache.int8_tensor import Int8KVTensor, dequantized_kv
from ..report import CallCounter
from ..setting_values import Sparse
from . import sequence, sparse_attention
from .latent_attention import LatentKVTensor, expanded_kv

ops = torch.ops.liteboost
REGISTRY = "transformers.modeling_utils:AttentionInterface"
#: Arguments that change what is computed and that the op does not take.
_UNSERVED_ARGUMENTS = (
    "cache",
    "head_mask",
    "indices",
    "block_table",
    "relative_position_bias",
)


def sdpa(original: Callable[..., Any], counter: CallCounter) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The registry's ``sdpa`` entry. Modules of models that are not bound get the original."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        liteboost_refusal: str = "",
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        mark = getattr(module, "__liteboost__", None)
        if mark is not None and REGISTRY in mark.registries:
            bias = kwargs.get("position_bias")
            shared = sequence.active_distributed_attention()
            if type(key) is LatentKVTensor:
                is_whole = shared is None and not liteboost_refusal
                if is_whole and _is_absorbed(query, key, value, attention_mask, bias, dropout, kwargs):
                    counter.count_served()
                    mask = None if attention_mask is None else _four_dimensional(attention_mask)
                    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
                    causal = causal and mask is None and query.shape[2] > 1
                    return key.latents.attend(query, mask, _scale(query, scaling), causal), None
            key, value = expanded_kv(key), expanded_kv(value)
            key, value = _alike(key, value, shared is None)
            if shared is not None:
                options = {**kwargs, "is_causal": is_causal}
                states = (query, key, value)
                return _shared(
                    shared,
                    module,
                    states,
                    attention_mask,
                    scaling,
                    None,
                    dropout,
                    options,
                    refusal=liteboost_refusal,
                )
            states = (query, key, value)
            is_cast = _is_cast(*states, attention_mask, bias)
            reason = liteboost_refusal or _unserved(
                *states, None, attention_mask, bias, dropout, kwargs, is_cast
            )
            # The original refuses a softcap; sliding windows reach it in the mask, so they do here.
            reason = reason or ("argument softcap" if kwargs.get("softcap") is not None else "")
            if not reason:
                counter.count_served()
                if kwargs.get("output_attentions"):
                    _say_there_are_no_weights()
                causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
                choice = sparse_attention.choice_of(module) if query.shape[2] > 1 else None
                if is_cast:
                    states = _cast(query), _cast(key), _cast(value)
                return _run(*states, attention_mask, bias, scaling, causal, None, None, choice), None
            counter.count_fallback(reason)
            key, value = dequantized_kv(key), dequantized_kv(value)
        return original(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )

    # Where processes share the tokens, the original would see a part of them.
    vars(attention)["takes_refusal"] = True
    return attention


def eager(
    original: Callable[..., Any],
    counter: CallCounter,
    *,
    softcap: str = "",
    bias: str = "",
    sinks: str = "",
    query_sinks: str = "",
) -> Callable[..., tuple[torch.Tensor, Any]]:
    """A family's own ``eager_attention_forward``, where eager is what the family uses unasked.

    Bound only where `eager_is_default`: who asks a family with sdpa support for eager gets eager.

    Args:
        softcap: Argument that bounds the logits, or empty: the body has none.
        bias: Argument that is added to the logits beside the mask, or empty.
        sinks: Attribute of the module that holds one sink logit a head (or None), or empty.
        query_sinks: Argument that holds one sink logit a query, ``[batch, heads, q_len, 1]``, or empty.
    """
    served_by_sdpa = _configs_with_sdpa(original)

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        liteboost_refusal: str = "",
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        sink_logits: Any = None
        if query_sinks or sinks:
            sink_logits = kwargs.get(query_sinks) if query_sinks else getattr(module, sinks)
        added = kwargs.get(bias) if bias else None
        shared = sequence.active_distributed_attention()
        key, value = _alike(key, value, shared is None)
        if shared is not None:
            options = {name: value for name, value in kwargs.items() if name not in ("dropout", "scaling")}
            options |= {"position_bias": added}
            cap = options.pop(softcap, None) if softcap else None
            if query_sinks and sink_logits is not None:
                sink_logits = sink_logits.squeeze(-1)
            scaling, dropout = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
            states = (query, key, value)
            return _shared(
                shared,
                module,
                states,
                attention_mask,
                scaling,
                sink_logits,
                dropout,
                options,
                cap or 0.0,
                liteboost_refusal,
            )
        is_asked_for = type(getattr(module, "config", None)) in served_by_sdpa
        reason = liteboost_refusal or _eager_unserved(module, args, kwargs, is_asked_for)
        dropout = kwargs.get("dropout", 0.0)
        reason = reason or _unserved(query, key, value, sink_logits, attention_mask, added, dropout, kwargs)
        reason = reason or _sinks_unserved(query, sink_logits, query_sinks)
        if not reason and attention_mask is not None and attention_mask.dtype == torch.bool:
            reason = "a bool mask, which eager attention adds"
        if reason:
            counter.count_fallback(reason)
            key, value = dequantized_kv(key), dequantized_kv(value)
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        counter.count_served()
        if query_sinks and sink_logits is not None:
            sink_logits = sink_logits.squeeze(-1)
        cap = kwargs.get(softcap) if softcap else None
        # Eager attention knows no implied causality: without a mask every query sees every key.
        scaling = kwargs.get("scaling")
        return _run(query, key, value, attention_mask, added, scaling, False, cap, sink_logits), None

    vars(attention)["takes_refusal"] = True
    return attention


def _say_there_are_no_weights() -> None:
    """As the original does, by its logger, once."""
    from transformers.utils import logging

    logging.get_logger("transformers.integrations.sdpa_attention").warning_once(
        "output_attentions=True: sdpa gives no attention weights. Load the model with "
        "attn_implementation='eager' for them."
    )


def _eager_unserved(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], is_asked_for: bool
) -> str:
    """Why the call, whatever its tensors, is not served; or an empty string."""
    if args:
        return "positional arguments beyond the mask"
    if is_asked_for:
        return "eager attention was asked for"
    if kwargs.get("output_attentions") or _weights_wanted() or has_readers(module):
        return "attention weights wanted"
    return ""


def _alike(key: torch.Tensor, value: torch.Tensor, reads_integers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as rows of integers, where they are and can be read; else both as values."""
    if reads_integers and type(key) is type(value):
        return key, value
    return dequantized_kv(key), dequantized_kv(value)


def _shared(
    shared: sequence.DistributedAttention,
    module: torch.nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
    softcap: float = 0.0,
    refusal: str = "",
) -> tuple[torch.Tensor, None]:
    """Attention of tokens that several processes share; ``options``: what else the call was given."""
    query, key, value = states
    reason = refusal or _unserved(query, key, value, sinks, None, None, dropout, options)
    for name in ("softcap", "position_bias"):
        if not reason and options.get(name) is not None:
            reason = f"argument {name}"
    if options.get("is_causal") is False:
        reason = "it sees later tokens"
    mask = mask if mask is None else _four_dimensional(mask)
    call = sequence.AttentionCall(
        module, query, key, value, mask, _scale(query, scaling), softcap, sinks, reason
    )
    return shared.attend(call), None


def eager_is_default(function: Any) -> bool:
    """Whether no model class beside ``function`` supports sdpa, so that eager is what users get unasked."""
    supported = _sdpa_support_beside(function)
    return bool(supported) and not any(supported)


def eager_is_default_of_a_part(function: Any) -> bool:
    """Whether some model class beside ``function`` does not support sdpa; others, as a vision tower, may."""
    return not all(_sdpa_support_beside(function))


def _configs_with_sdpa(function: Any) -> frozenset[type]:
    """Configurations of parts beside ``function`` that sdpa serves: who calls it there asked for eager."""
    return frozenset(cls.config_class for cls in _models_beside(function) if cls._supports_sdpa)


def _sdpa_support_beside(function: Any) -> list[bool]:
    """Of each model class in the module of ``function``, whether it supports sdpa."""
    return [cls._supports_sdpa for cls in _models_beside(function)]


def _models_beside(function: Any) -> list[Any]:
    return [
        value
        for value in function.__globals__.values()
        if isinstance(value, type)
        and value.__module__ == function.__module__
        and hasattr(value, "_supports_sdpa")
    ]


def _weights_wanted() -> bool:
    """Whether transformers is collecting attention weights in this context (``output_attentions=True``)."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = capturing._active_collector.get() if capturing is not None else None
    return collector is not None and any("attentions" in key for key in collector)


def has_readers(module: torch.nn.Module) -> bool:
    """Whether a hook or wrapper may read the weights; `_weights_wanted` asks transformers' collector."""
    if is_forward_replaced(module):
        return True
    hooks = module._forward_hooks.values()
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks)


def is_forward_replaced(module: torch.nn.Module) -> bool:
    """Whether the instance has a ``forward`` of somebody's; one that accelerate put there is none."""
    # transformers up to 5.1 collects by wrapping forward on the instance, and leaves the class's own there.
    kept = module.__dict__.get("forward")
    if kept is None or getattr(kept, "__func__", None) is type(module).forward:
        return False
    return not _is_moving_weights(module, kept)


def _is_moving_weights(module: torch.nn.Module, forward: Any) -> bool:
    """Whether accelerate put ``forward`` there to move weights and inputs; it reads nothing."""
    function = getattr(forward, "func", None)
    hook = type(module.__dict__.get("_hf_hook"))
    names = (getattr(function, "__module__", ""), hook.__module__, hook.__name__)
    return names == ("accelerate.hooks", "accelerate.hooks", "AlignDevicesHook")


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
    choice: Sparse | None = None,
) -> torch.Tensor:
    mask = None if mask is None else _four_dimensional(mask)
    bias = None if bias is None else _four_dimensional(bias)
    causal = is_causal and mask is None and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:
        # A static cache in prefill: what lies behind the queries has not been written yet.
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        bias = None if bias is None else bias[..., : query.shape[2]]
    elif causal and key.shape[2] < query.shape[2]:
        # Cross-attention of a module that says nothing of causality: torch counts positions of queries and
        # keys from the first, the op from the last.
        mask, causal = _seen_from_the_first(query, key), False
    if choice is not None:
        sparse = _run_sparse(choice, query, key, value, mask, bias, scaling, causal)
        if sparse is not None:
            return sparse
    if bias is not None:
        mask = _with_bias(mask, bias, key.dtype)
    if mask is not None and mask.shape[2] != query.shape[2]:
        mask = mask.expand(-1, -1, query.shape[2], -1)
    options = (mask, _scale(query, scaling), causal, 0, softcap or 0.0, sinks)
    if type(key) is Int8KVTensor and type(value) is Int8KVTensor:
        return int8_tensor.attend(query, key, value, *options)
    return ops.attention(query, key, value, *options)


def _is_absorbed(query: torch.Tensor, key: LatentKVTensor, value: Any, *others: Any) -> bool:
    """Whether one query attends to compressed keys and values as they are; for others they are expanded."""
    if type(value) is not LatentKVTensor or value.latents is not key.latents:
        return False
    mask, bias, dropout, kwargs = others
    if bias is not None or kwargs.get("softcap") is not None or not key.latents.can_attend(query, mask):
        return False
    is_of_each_head = query.shape[1] == key.shape[1]
    return is_of_each_head and not _unserved(query, key, value, None, mask, None, dropout, kwargs)


def _run_sparse(
    choice: Sparse,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool,
) -> torch.Tensor | None:
    hides_by = "a mask" if mask is not None else "a bias" if bias is not None else ""
    if type(key) is Int8KVTensor:
        hides_by = "a cache of integers"
    if not hides_by and not is_causal:
        hides_by = "attention that is not causal"
    return sparse_attention.attend(choice, query, key, value, _scale(query, scaling), hides_by)


def _scale(query: torch.Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _four_dimensional(mask: torch.Tensor) -> torch.Tensor:
    """The mask with the dimensions it broadcasts over in front."""
    return mask if mask.ndim == 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _seen_from_the_first(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``[1, 1, q_len, kv_len]``: the mask for which ``is_causal`` stands in torch's own attention."""
    shape = (1, 1, query.shape[2], key.shape[2])
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril()


def _with_bias(mask: torch.Tensor | None, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask and a bias as one additive mask, as transformers' sdpa entry puts them together."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(dtype).min) if mask.dtype == torch.bool else bias + mask


def _sinks_unserved(query: torch.Tensor, sinks: torch.Tensor | None, of_queries: str) -> str:
    if sinks is None:
        return ""
    if sinks.dtype not in (query.dtype, torch.float32):
        return f"sinks of dtype {str(sinks.dtype).removeprefix('torch.')}"
    shape = (*query.shape[:3], 1) if of_queries else query.shape[1:2]
    return "" if sinks.shape == shape else "sinks of another shape"


def _unserved(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
    is_cast: bool = False,
) -> str:
    reason = unserved(query, *map(_memory, (key, value)), sinks, casts=is_cast)
    reason = reason or ("" if is_cast else autocast(query))
    if reason:
        return reason
    if dropout:
        return "dropout"
    for name in _UNSERVED_ARGUMENTS:
        if kwargs.get(name) is not None:
            return f"argument {name}"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return "a rank that is not served"
    if not is_cast and (query.dtype != key.dtype or query.dtype != value.dtype):
        return "mixed dtypes"
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3]:
        return "batch or heads that do not match"
    if query.shape[-1] != key.shape[-1]:
        return "head sizes that do not match"
    return _mask_unserved(query, key, mask) or _mask_unserved(query, key, bias)


def _is_cast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *added: torch.Tensor | None
) -> bool:
    """Whether autocast has the states multiplied in its dtype, and casts nothing of what is added."""
    if autocast_dtype(query) is None or not is_castable(query, key, value):
        return False
    return all(each is None or each.dtype == torch.bool for each in added)


def _cast(states: torch.Tensor) -> torch.Tensor:
    """As autocast hands them on; contiguous, so that a recording knows how they lie in any step."""
    dtype = torch.get_autocast_dtype("cpu" if states.is_cpu else states.device.type)
    return states if states.dtype is dtype else states.to(dtype, memory_format=torch.contiguous_format)


def _memory(states: torch.Tensor) -> torch.Tensor:
    """What keys or values are kept in."""
    if type(states) is LatentKVTensor:
        return states.latents.latent
    return states.rows if type(states) is Int8KVTensor else states


def _mask_unserved(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> str:
    if mask is None:
        return ""
    if not isinstance(mask, torch.Tensor) or not 2 <= mask.ndim <= 4:
        return "a mask that is no tensor of two to four dimensions"
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return f"mask dtype {str(mask.dtype).removeprefix('torch.')}"
    batch, heads, rows, columns = _four_dimensional(mask).shape
    if batch not in (1, query.shape[0]) or heads not in (1, query.shape[1]):
        return "a mask of another batch or head count"
    if rows not in (1, query.shape[2]) or columns not in (1, key.shape[2]):
        return "a mask of another length"
    return ""
