"""One `generate` in transformers' assisted decoding, with what `_sample` gives: text, stream, cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import utils
from transformers.generation.stopping_criteria import StoppingCriteriaList

#: What a result has for each token.
_PER_TOKEN = (
    "scores",
    "logits",
    "attentions",
    "hidden_states",
    "decoder_attentions",
    "decoder_hidden_states",
    "cross_attentions",
)
#: By it transformers computes a prompt, from 5.0 on; what a kept cache has is left out.
PREFILL = "_prefill"
#: Whether `_sample` lets a streamer hear of a token before criteria, which may ask the streamer, as it did in
#: releases without this class.
_HEARS_FIRST = not hasattr(utils, "StopCheck")


class StopAtToken(StoppingCriteriaList):
    """Asks ``criteria`` behind every token, as `_sample` does, not once behind all tokens of a step.

    A stop string, or whatever else ends a text, may lie inside of what was accepted at once. Tokens are
    streamed one by one, none behind the end.

    Attributes:
        checked: Length of the text behind the last token that was streamed and asked about.
        end: Length of the text where it ends, or 0.
    """

    def __init__(self, criteria: StoppingCriteriaList, prompt: int, streamer: Any) -> None:
        super().__init__(criteria)
        self.criteria, self.prompt, self.streamer = criteria, prompt, streamer
        self.candidates: Any = None
        self.checked, self.end = prompt, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        length = input_ids.shape[1]
        if not self.checked < length <= self.candidates.verified:  # older releases ask about candidates, too
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        stops: Any = None
        for end in range(self.checked + 1, length + 1):
            is_last = end == length
            text = input_ids if is_last else input_ids[:, :end]
            seen = scores if is_last or scores is None else scores[: end - self.prompt]
            self.checked = end
            if _HEARS_FIRST:
                self._put(input_ids, end)
            stops = self.criteria(text, seen, **kwargs)
            if not _HEARS_FIRST:
                self._put(input_ids, end)
            if bool(stops.all()):
                self.end = end
                break
        return stops

    def _put(self, input_ids: Tensor, end: int) -> None:
        if self.streamer is not None:
            self.streamer.put(input_ids[:, end - 1].cpu())


class Caller:
    """Stands for a model as ``self`` of its assisted decoding.

    The prompt is computed as `_sample` computes it, and the candidates are ours. No attribute of the model
    is touched, for another thread may generate with it.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        candidates: Callable[..., Any],
        stops: StopAtToken,
        checking: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._model, self._generation_config = model, generation_config
        self._candidates, self._stops, self._checking = candidates, stops, checking
        self._prompt: tuple[Tensor, dict[str, Any]] | None = None
        self._decoding = contextlib.ExitStack()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *fault: Any) -> None:
        self._decoding.__exit__(*fault)

    def _get_candidate_generator(self, **given: Any) -> Any:
        self._stops.candidates = made = self._candidates(**given)
        return made

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if kwargs.get("is_first_iteration") and hasattr(self._model, PREFILL):
            # What of it is behind a kept cache is for `_prefill` to say: assisted decoding computes it again.
            drop = ("is_first_iteration", "next_sequence_length")
            self._prompt = input_ids, {name: value for name, value in kwargs.items() if name not in drop}
            return {}
        return self._model.prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if self._prompt is None:
            # As `_sample` calls it, so that both run the same recorded steps.
            with self._checking() if self._stops.candidates.pending else contextlib.nullcontext():
                return self._model(*args, **{**inputs, "return_dict": True})
        (input_ids, kwargs), self._prompt = self._prompt, None
        outputs = self._model._prefill(input_ids, self._generation_config, kwargs)
        for_decoding = getattr(self._model, "_optimize_model_for_decode", None)
        if for_decoding is not None:
            self._decoding.enter_context(for_decoding())
        return outputs


def take_back(cache: Any, length: int) -> None:
    """Crop ``cache``, where a call was interrupted, to what comes before the last of ``length`` tokens."""
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        surplus = layer.get_seq_length() - (length - 1)
        if surplus > 0:
            layer.crop(-surplus)


def cut(result: Any, cache: Any, end: int) -> Any:
    """``result``, and the ``cache`` behind it, of a text that ends at ``end``."""
    sequences = result if isinstance(result, Tensor) else result.sequences
    surplus = sequences.shape[1] - end
    if not end or surplus <= 0:
        return result
    cache.crop(-surplus)
    if isinstance(result, Tensor):
        return result[:, :end]
    result.sequences = sequences[:, :end]
    for name in _PER_TOKEN:
        if isinstance(found := getattr(result, name, None), tuple):
            setattr(result, name, found[:-surplus])
    return result
