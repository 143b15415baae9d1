"""Where a `generate` cannot be speculated, so that the original runs: each reason in words."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ... import config
from ...kv_cache.names import KV_CACHES
from ...replacements.attention import is_forward_replaced
from .loop import PREFILL

#: Texts of fewer new tokens cannot pay.
LEAST_NEW_TOKENS = 16
#: Processors of transformers whose result follows from the text and the scores alone. Each is called for
#: candidates as well, also for those that are rejected, so one that counts its calls would go wrong.
STATELESS = frozenset(
    {
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
_PROCESSORS = "transformers.generation.logits_process"
#: Inputs of a forward that assisted decoding carries on over several tokens.
_TEXT_INPUTS = frozenset(
    {
        *KV_CACHES,
        "attention_mask",
        "cache_position",
        "decoder_attention_mask",
        "decoder_position_ids",
        "encoder_outputs",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
#: What `_sample` is given beside inputs of the forward.
_OTHERS = frozenset(
    {
        "assistant_tokenizer",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
    }
)
#: Rotations that depend on the longest position of a call, which candidates are.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
#: What the first releases with `PREFILL` had beside it: positions that it counts in a way of its own.
_POSITIONS = "_get_initial_cache_position"
_ROPE = ("rope_parameters", "rope_scaling")


def why_not(model: Any, input_ids: Tensor, given: Mapping[str, Any]) -> str:
    """Why a call of `_sample` with these arguments is the original's, or an empty string.

    Args:
        given: What `_sample` gets by name: settings, processors, streamer, and inputs of the forward.
    """
    return (
        _of_process()
        or _of_model(model)
        or _of_settings(input_ids, given["generation_config"], given)
        or _of_cache(next((found for name in KV_CACHES if (found := given.get(name)) is not None), None))
        or _of_inputs(model, input_ids, given)
        or _of_processors(given["logits_processor"])
    )


def _of_process() -> str:
    from torch import distributed

    launched = config.launched()
    is_group = distributed.is_available() and distributed.is_initialized()
    processes = launched[1] if launched else distributed.get_world_size() if is_group else 1
    return "several processes" if processes > 1 else ""


def _of_model(model: Any) -> str:
    if hasattr(model, PREFILL) and hasattr(model, _POSITIONS):
        return "a transformers of the first 5.x releases"
    if model.training:
        return "the model is in training mode"
    if getattr(model, "_is_stateful", False):
        return "the model keeps a state that cannot be taken back"
    text = model.config.get_text_config(decoder=True)
    if any(each in _LENGTH_DEPENDENT for name in _ROPE for each in _words(getattr(text, name, None))):
        return "a rotary embedding that depends on the longest position of a call"
    if getattr(text, "expert_capacity", None):
        return "experts that take so many tokens of a call"
    if "prepare_inputs_for_generation" in vars(model):
        return "somebody has replaced how the model prepares its inputs"
    if _is_own(type(model).prepare_inputs_for_generation):
        return "the model prepares its inputs in code of its own"
    # It may keep a state, as one that counts its calls does.
    if _is_own(type(model).forward) or _is_own(type(model)._update_model_kwargs_for_generation):
        return "the model's forward is code of its own"
    if is_forward_replaced(model):
        return "somebody has replaced the model's forward"
    return ""


def _is_own(method: Any) -> bool:
    """Whether a method of a model's class is not transformers' own."""
    return not inspect.unwrap(method).__module__.startswith("transformers.")


def _words(value: Any) -> Iterator[str]:
    """All texts in ``value``."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _words(each)


def _of_settings(input_ids: Tensor, settings: Any, given: Mapping[str, Any]) -> str:
    asked = [name for name in ("output_attentions", "output_hidden_states") if getattr(settings, name, None)]
    if (settings.num_return_sequences or 1) > 1:
        return "num_return_sequences is above 1"
    if input_ids.shape[0] > 1:
        return "a batch of several sequences"
    if not given.get("use_cache"):
        return "use_cache is off"
    if settings.max_length - input_ids.shape[1] < LEAST_NEW_TOKENS:
        return f"fewer than {LEAST_NEW_TOKENS} new tokens"
    if given.get("synced_gpus"):
        return "synced_gpus"
    if asked and settings.return_dict_in_generate:
        return " and ".join(asked)
    return ""


def _of_cache(cache: Any) -> str:
    from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

    if type(cache) is EncoderDecoderCache:
        cache = cache.self_attention_cache
    if type(cache) is not DynamicCache:
        return "no cache that can be cropped"
    if getattr(cache, "offloading", False):
        return "an offloaded cache"
    layers = getattr(cache, "layers", None)
    if layers is None:
        return "no cache that can be cropped"
    classes = {type(layer) for layer in layers} or {getattr(cache, "layer_class_to_replicate", None)}
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        return "a cache with a sliding window"
    return "" if classes == {DynamicLayer} else "no cache that can be cropped"


def _of_inputs(model: Any, input_ids: Tensor, given: Mapping[str, Any]) -> str:
    settings = given["generation_config"]
    if given.get("inputs_embeds") is not None or not input_ids.shape[1]:
        return "inputs_embeds"
    others = sorted(
        name
        for name, value in given.items()
        if name not in _OTHERS | _TEXT_INPUTS and value is not None and value is not False
    )
    if others:
        return f"inputs beside the text: {', '.join(others)}"
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() > 2:
        return "positions in several dimensions"
    name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    mask = given.get(name)
    if isinstance(mask, Tensor) and (mask.dim() != 2 or mask.shape[1] != input_ids.shape[1]):
        return "a mask of another length than the tokens"
    if settings.prefill_chunk_size is not None and not hasattr(model, PREFILL):
        return "prefill_chunk_size"
    return ""


def _of_processors(processors: Any) -> str:
    for each in processors:
        if type(each).__module__ != _PROCESSORS or type(each).__name__ not in STATELESS:
            return f"{type(each).__name__} may keep a state"
    return ""


def why_draft_not(model: Any, input_ids: Tensor, given: Mapping[str, Any]) -> str:
    """Why a draft model cannot make the candidates of a text that may have some, or an empty string."""
    settings = given["generation_config"]
    if not hasattr(model, PREFILL):  # its drafts raise where a least length is asked for
        return "a draft model needs transformers 5"
    if getattr(settings, "assistant_ensemble_weight", None) is not None:
        return "assistant_ensemble_weight changes the distribution"
    cache = next(found for name in KV_CACHES if (found := given.get(name)) is not None)
    mask = given.get("attention_mask")
    seen = mask.shape[1] if isinstance(mask, Tensor) else getattr(settings, "_mask_length", None)
    if cache.get_seq_length() and seen != input_ids.shape[1]:
        return "the text before a kept cache is not given, which a draft model needs"
    return ""
