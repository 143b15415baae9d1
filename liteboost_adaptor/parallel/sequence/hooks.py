"""Ranks share the tokens of a prompt: each runs the model on its own, as if those before had been seen.

Only attention communicates: the ranks of ``LITEBOOST_SP`` exchange heads (`ulysses`), those of
``LITEBOOST_CP`` pass keys and values on (`ring`). The KV cache stays where its tokens were computed. Later
tokens are computed by every rank, and their attention merges the partial results over the keys of each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ParallelError
from ...huggingface.runtime import runtime
from ...kv_cache.names import KV_CACHES
from ...replacements import sequence
from ...replacements.sequence import AttentionCall
from ..runtime.mesh import Mesh
from . import masks, ring, sharded_cache, token_mixing, token_shards, ulysses
from .sharded_cache import CacheShard
from .token_shards import TokenShards

_PROMPT = ("input_ids", "inputs_embeds")
#: Tensors that are cut along their tokens, in this dimension.
_CUT = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "cache_position": -1}
#: Outputs that are gathered along dimension 1.
_JOINED = ("logits", "last_hidden_state")
_OFF = "Start the script with LITEBOOST_SP=1 and LITEBOOST_CP=1."
_NOT_CACHED = "it sees keys that its cache does not hold"


class _RefusesUnsupported:
    """What both kinds of attention have in common.

    Attributes:
        updates: How often layers of the cache have been given keys.
        keeps_cache: Whether there will be tokens behind these.
    """

    def __init__(self, keeps_cache: bool = True) -> None:
        self.updates = self._seen = 0
        self.keeps_cache = keeps_cache
        #: Whether the first call of a module came behind an update.
        self._is_cached: dict[nn.Module, bool] = {}

    def check(self, call: AttentionCall) -> None:
        """Raise `ParallelError` where ``call`` is one that cannot be shared."""
        reason = call.reason or ("" if getattr(call.module, "is_causal", True) else "it sees later tokens")
        # A layer may see what another has put into the cache, or the same keys twice. One that attends before
        # it puts keys there sees some beside those of the cache, of all ranks (Dory's loops before the last).
        is_cached, self._seen = self.updates > self._seen, self.updates
        if not self._is_cached.setdefault(call.module, is_cached) and is_cached and self.keeps_cache:
            reason = reason or _NOT_CACHED
        if reason:
            raise _refusal(call, reason)


def _refusal(call: AttentionCall, reason: str) -> ParallelError:
    return ParallelError(
        f"attention of {type(call.module).__name__} cannot be shared by processes: {reason}. {_OFF}"
    )


class ShardedPromptAttention(_RefusesUnsupported, masks.ShardsMasks):
    """Attention while each rank has some tokens of a prompt."""

    def __init__(
        self, tokens: TokenShards, padding: Tensor | None, window: int | None, keeps_cache: bool
    ) -> None:
        super().__init__(keeps_cache)
        self.tokens, self.padding = tokens, padding
        self._wants_window = window is not None and window < tokens.length

    def attend(self, call: AttentionCall) -> Tensor:
        self.check(call)
        if self._wants_window and (call.mask is None or call.mask.shape[2] == 1):
            raise _refusal(call, "it has a window that only the cache knows of")
        heads = self.tokens.mesh.heads
        states, sinks, mask = (call.query, call.key, call.value), call.sinks, call.mask
        if heads.size > 1:
            count = call.query.shape[1] // heads.size
            own = slice(heads.rank * count, (heads.rank + 1) * count)
            states = ulysses.scatter_heads(states, self.tokens)
            if sinks is not None and sinks.ndim > 1:
                raise ParallelError(f"sinks of queries cannot be shared under LITEBOOST_SP. {_OFF}")
            sinks = None if sinks is None else sinks[own]
            mask = mask if mask is None or mask.shape[1] == 1 else mask[:, own]
        output = ring.ring_attention(states, self.tokens, mask, call.scaling, call.softcap, sinks)
        return ulysses.gather_heads(output, self.tokens) if heads.size > 1 else output


class ShardedCacheAttention(_RefusesUnsupported):
    """Attention of tokens that every rank computes, over a sharded KV cache."""

    def __init__(self, mesh: Mesh, held: CacheShard, first: int) -> None:
        super().__init__()
        self.mesh, self.held, self.first = mesh, held, first

    def attend(self, call: AttentionCall) -> Tensor:
        self.check(call)
        count, mask = call.query.shape[2], call.mask
        positions = self.held.positions.to(call.query.device)
        if call.key.shape[2] != len(positions):
            raise _refusal(call, _NOT_CACHED)
        if mask is not None:
            mask = mask.index_select(3, positions) if mask.shape[3] > 1 else mask
        elif count > 1:
            mask = ring.causal_mask(positions, self.first, count)
        part = torch.ops.liteboost.attention_part(
            call.query, call.key, call.value, mask, call.scaling, False, call.softcap
        )
        return ring.merge_over_ranks(*part, call.sinks, self.mesh.sequence).to(call.query.dtype)


class _Forward:
    """One forward of a model whose tokens are shared, between its two hooks."""

    def __init__(self, sharing: Any, tokens: TokenShards | None, kwargs: dict[str, Any]) -> None:
        self.context = sequence.use_distributed_attention(sharing)
        self.tokens = tokens
        self.cache = next(kwargs[each] for each in KV_CACHES if each in kwargs)
        self.last_only = kwargs.get("logits_to_keep") or 0
        self.keeps_cache = kwargs.get("use_cache") is not False


class PromptSharding:
    """Hooks around the forward of one model."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self._signature = inspect.signature(type(model).forward)
        self._forward: _Forward | None = None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut what the model is given to this rank's tokens, or leave later tokens to every rank."""
        self._check_state(model)
        kwargs = self._named(model, args, kwargs)
        name = next((each for each in _PROMPT if kwargs.get(each) is not None), None)
        if name is None:
            raise ParallelError(
                f"processes share {type(model).__name__}'s input_ids, and none are given. {_OFF}"
            )
        length = kwargs[name].shape[1]
        _check_arguments(kwargs)
        cache = self._cache(model, kwargs)
        held = sharded_cache.cache_shard_of(cache)
        if held is None:
            binding = runtime.binding_of(model)
            if not binding.mixes_in_attention_only:
                token_mixing.check_token_mixing(model, name, kwargs[name])
                binding.mixes_in_attention_only = True
            held = sharded_cache.shard_cache(
                cache, model.config.get_text_config(decoder=True).num_hidden_layers
            )
        if held.seen or length < self.mesh.sequence.size:
            first = held.seen
            held.keep_every_nth(length, self.mesh.sequence.rank, self.mesh.sequence.size)
            self._forward = _Forward(ShardedCacheAttention(self.mesh, held, first), None, kwargs)
        else:
            _check_length(kwargs, length)
            tokens = TokenShards(self.mesh, length)
            held.keep_range(*tokens.own, length)
            sharded_cache.set_reported_length(cache, tokens.own[0])
            padding = _padding(kwargs.get("attention_mask"))
            keeps_cache = kwargs.get("use_cache") is not False
            attention = ShardedPromptAttention(tokens, padding, held.window, keeps_cache)
            self._forward = _Forward(attention, tokens, kwargs)
            kwargs = {each: _cut(each, value, tokens) for each, value in kwargs.items()}
        self._forward.context.__enter__()
        return (), kwargs

    def after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Gather what each rank has for its tokens; also runs where the forward has raised."""
        forward, self._forward = self._forward, None
        if forward is None:
            return output
        forward.context.__exit__(None, None, None)
        if output is None:
            return output
        if forward.tokens is not None:
            sharded_cache.set_reported_length(forward.cache, forward.tokens.length)
            _join(output, forward)
        if not forward.keeps_cache:
            output = type(output)(**{each: output[each] for each in output if each not in KV_CACHES})
        return output

    def _named(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the forward is given, by name, and nothing that is None."""
        given = self._signature.bind(model, *args, **kwargs).arguments
        rest = [each.name for each in self._signature.parameters.values() if each.kind is each.VAR_KEYWORD]
        named = {**given, **(given.get(rest[0], {}) if rest else {})}
        left_out = {"self", *rest}
        return {name: value for name, value in named.items() if value is not None and name not in left_out}

    def _cache(self, model: nn.Module, kwargs: dict[str, Any]) -> Any:
        name = next((each for each in KV_CACHES if kwargs.get(each) is not None), None)
        if name is None:
            from transformers.cache_utils import DynamicCache

            name = _cache_parameter(model)
            kwargs[name] = DynamicCache(config=model.config)
        return kwargs[name]

    def _check_state(self, model: nn.Module) -> None:
        reason = ""
        if torch.is_grad_enabled():
            reason = "in grad mode (call generate, or use torch.no_grad())"
        elif torch.compiler.is_compiling():
            reason = "under torch.compile"
        elif runtime.binding_of(model) is None:
            reason = "while it is not served (after undo(), or at level 0)"
        if reason:
            raise ParallelError(
                f"processes cannot share the prompts of {type(model).__name__} {reason}. {_OFF}"
            )
        masks.install()  # undone with everything else by undo()


def _cache_parameter(model: nn.Module) -> str:
    """What the forward of ``model`` calls its cache, or an empty string."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((each for each in KV_CACHES if each in parameters), "")


def _keeps_keys(model: nn.Module) -> bool:
    """Whether any layer of the cache that ``model`` makes for itself keeps keys.

    Since 5.24 what holds nothing but states is called a cache, too.
    """
    from transformers.cache_utils import DynamicCache

    layers = DynamicCache(config=model.config).layers
    return not layers or any(hasattr(layer, "keys") for layer in layers)


def attach(model: nn.Module, mesh: Mesh) -> None:
    """Let the ranks of ``mesh.sequence`` share the prompts of ``model``.

    Raises:
        ParallelError: Its forward takes no cache, it has an encoder, or it is made of several models.
    """
    if not _cache_parameter(model):
        raise ParallelError(
            f"{type(model).__name__} takes no cache, and processes cannot share its prompts. {_OFF}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ParallelError(
            f"{type(model).__name__} has an encoder, and processes cannot share its prompts. {_OFF}"
        )
    if not hasattr(model.config.get_text_config(decoder=True), "num_hidden_layers"):
        raise ParallelError(
            f"{type(model).__name__} is made of several models, each with layers of its own, and processes "
            f"cannot share its prompts. {_OFF}"
        )
    if not _keeps_keys(model):
        raise ParallelError(
            f"{type(model).__name__} keeps no keys of tokens, and processes cannot share its prompts. {_OFF}"
        )
    sharer = PromptSharding(model, mesh)
    model.register_forward_pre_hook(sharer.before, with_kwargs=True)
    model.register_forward_hook(sharer.after, with_kwargs=True, always_call=True)


def _check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise `ParallelError` where tokens come with something that cannot be cut or gathered."""
    for name, value in kwargs.items():
        fits = name in _CUT or (name == "attention_mask" and isinstance(value, Tensor) and value.ndim == 2)
        if (isinstance(value, Tensor) and not fits) or (isinstance(value, dict) and value):
            raise ParallelError(f"a prompt cannot be shared by processes together with {name}. {_OFF}")
    for name in ("output_attentions", "output_router_logits"):
        if kwargs.get(name):
            raise ParallelError(f"{name} is not available where processes share a prompt. {_OFF}")
    if kwargs.get("return_dict") is False:
        raise ParallelError(f"return_dict=False is not available where processes share a prompt. {_OFF}")


def _check_length(kwargs: dict[str, Any], length: int) -> None:
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.shape[1] != length:
        raise ParallelError(f"attention_mask is {mask.shape[1]} tokens long, the prompt {length}. {_OFF}")


def _padding(mask: Tensor | None) -> Tensor | None:
    """The mask as bool, or None where every token counts."""
    return None if mask is None or bool(mask.bool().all()) else mask.bool()


def _cut(name: str, value: Any, tokens: TokenShards) -> Any:
    first, last = tokens.own
    if name == "attention_mask":
        return value[:, :last]
    if name not in _CUT or value.shape[_CUT[name]] != tokens.length:
        return value
    return value.narrow(_CUT[name], first, last - first)


def _join(output: Any, forward: _Forward) -> None:
    """Replace outputs for this rank's tokens by those for all tokens."""
    tokens, group = forward.tokens, forward.tokens.mesh.sequence
    lengths = [tokens.bound(place + 1) - tokens.bound(place) for place in range(group.size)]
    if output.get("attentions") is not None:
        raise ParallelError(f"attentions are not available where processes share a prompt. {_OFF}")
    for name in _JOINED:
        value = output.get(name)
        if value is None:
            continue
        if name == "logits" and forward.last_only == 1:
            output[name] = token_shards.broadcast_from_last(value, group)
        elif name == "logits" and forward.last_only:
            kept = [min(forward.last_only, length) for length in lengths]
            output[name] = token_shards.all_gather_tokens(value, kept, group)[:, -forward.last_only :]
        else:
            output[name] = token_shards.all_gather_tokens(value, lengths, group)
    states = output.get("hidden_states")
    if states is not None:
        output["hidden_states"] = tuple(
            token_shards.all_gather_tokens(state, lengths, group) for state in states
        )
