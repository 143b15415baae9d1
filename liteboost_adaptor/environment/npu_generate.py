"""Level 1 on an NPU: what ``generate`` asks of the NPU between two tokens, with fewer launches and one copy.

Between two forward passes transformers launches some twenty operators on tensors of one element a row
(stopping criteria, positions, masks), each of which costs an NPU as much host time as an operator of a layer.
What is known on the host is decided there, and what the device has to tell is copied once a token. Results
are the same to the bit; other devices, and criteria and models that are not known here, get the original.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..kv_cache import buffers
from ..report import report

#: Attribute of position ids that ``generate`` made itself: every one of them is smaller than this.
BELOW = "_liteboost_below"


def stopping(original: Any) -> Any:
    """``StoppingCriteriaList.__call__`` that launches one operator, or two for several end tokens."""
    from transformers.generation import stopping_criteria as criteria

    counter = report.counter("npu.generate_stop")
    of_length = (criteria.MaxLengthCriteria, criteria.MaxTimeCriteria)  # they look at no token
    known = {*of_length, criteria.EosTokenCriteria}

    @functools.wraps(original)
    def __call__(self: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.device.type != "npu" or kwargs or not all(type(each) in known for each in self):
            return original(self, input_ids, scores, **kwargs)
        counter.count_served()
        rows = input_ids.shape[0]
        on_host = torch.zeros((), dtype=input_ids.dtype).expand(input_ids.shape)
        # A list, for each criterion is asked: one may warn.
        if any([bool(each(on_host, scores).any()) for each in self if type(each) in of_length]):
            return torch.ones(rows, dtype=torch.bool, device=input_ids.device)
        ends = [_has_ended(each, input_ids) for each in self if type(each) is criteria.EosTokenCriteria]
        if not ends:
            return torch.zeros(rows, dtype=torch.bool, device=input_ids.device)
        return functools.reduce(torch.Tensor.logical_or, ends)

    return __call__


def _has_ended(criterion: Any, input_ids: torch.Tensor) -> torch.Tensor:
    criterion.eos_token_id = criterion.eos_token_id.to(input_ids.device)
    ends = criterion.eos_token_id.reshape(-1)
    is_end = input_ids[:, -1:] == ends
    return is_end.squeeze(-1) if ends.shape[0] == 1 else is_end.any(dim=-1)


def stop_check(original: Any) -> Any:
    """``StopCheck.__call__`` that reads the unfinished rows, and a streamer's tokens, in one copy."""
    counter = report.counter("npu.generate_stop")

    @functools.wraps(original)
    def __call__(self: Any, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        same = tokens.shape == unfinished_sequences.shape and tokens.dtype == unfinished_sequences.dtype
        if unfinished_sequences.device.type != "npu" or not same:
            return original(self, unfinished_sequences, tokens, length)
        counter.count_served()
        if self.streamer is None:
            return not any(unfinished_sequences.tolist())
        unfinished, streamed = torch.stack((unfinished_sequences, tokens)).cpu()
        self.streamer.put(streamed)
        return not any(unfinished.tolist())

    return __call__


def sampling(original: Any, inside: list[int]) -> Any:
    """``_sample`` that says, while it runs, that position ids are read only for the next token."""

    @functools.wraps(original)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside.append(id(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.remove(id(self))  # not the last: threads may generate at the same time

    return _sample


def first_positions(original: Any) -> Any:
    """``_prepare_position_ids_for_generation`` that notes a bound: they count tokens, or ones of a mask.

    A mask may hold other numbers than 0 and 1, which transformers sums up all the same: the largest position
    is read, once a ``generate``.
    """

    @functools.wraps(original)
    def _prepare_position_ids_for_generation(*args: Any, **kwargs: Any) -> torch.Tensor:
        position_ids = original(*args, **kwargs)
        if (
            type(position_ids) is torch.Tensor
            and position_ids.device.type == "npu"
            and position_ids.numel()
            and int(position_ids.max()) < position_ids.shape[-1]
        ):
            setattr(position_ids, BELOW, position_ids.shape[-1])
        return position_ids

    return _prepare_position_ids_for_generation


def next_positions(original: Any, inside: list[int]) -> Any:
    """``_update_model_kwargs_for_generation`` that makes the next position alone, where no other is read.

    ``_sample`` with a cache runs the model on the last token. What prepares its inputs takes the last of the
    position ids, so that the earlier ones need not be carried along.
    """
    from transformers.generation.utils import GenerationMixin

    counter = report.counter("npu.generate_positions")

    @functools.wraps(original)
    def _update_model_kwargs_for_generation(
        self: Any,
        outputs: Any,
        model_kwargs: dict[str, Any],
        is_encoder_decoder: bool = False,
        num_new_tokens: int = 1,
    ) -> dict[str, Any]:
        positions = model_kwargs.get("position_ids")
        if (
            type(positions) is not torch.Tensor
            or positions.device.type != "npu"
            or is_encoder_decoder
            or num_new_tokens != 1
            or not model_kwargs.get("use_cache")
            or id(self) not in inside
            or type(self).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        ):
            return original(self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
        counter.count_served()
        model_kwargs["position_ids"] = None
        model_kwargs = original(self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
        following = positions[..., -1:] + 1
        if below := getattr(positions, BELOW, 0):
            setattr(following, BELOW, below + 1)
        model_kwargs["position_ids"] = following
        return model_kwargs

    return _update_model_kwargs_for_generation


def decoding_mask(original: Any) -> Any:
    """``sdpa_mask`` whose mask of one token after all others is the padding of those that it sees.

    transformers reads on the host whether anything is padded, at every token and for each kind of mask. In
    ``generate`` the answer is known, for it drops a mask of ones at the beginning; elsewhere a mask of ones
    is right, too. Of a sliding window the cache keeps no more tokens than the last one sees.
    """
    counter = report.counter("npu.generate_mask")

    @functools.wraps(original)
    def sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        mask, length = kwargs.get("attention_mask"), kwargs.get("kv_length")
        offset, start = kwargs.get("q_offset"), kwargs.get("kv_offset")
        # In a step that is recorded lengths are symbols.
        is_recorded = buffers.is_recorded()
        numbers = (int, torch.SymInt) if is_recorded else (int,)
        if (
            args
            or not (type(mask) is torch.Tensor or (is_recorded and isinstance(mask, torch.Tensor)))
            or mask.device.type != "npu"
            or mask.ndim != 2
            or mask.dtype != torch.bool
            or kwargs.get("q_length") != 1
            or kwargs.get("allow_is_bidirectional_skip")
            or not (type(offset) in numbers and type(start) in numbers and type(length) in numbers)
            or not offset + 1 == start + length == mask.shape[1]
            or mask.shape[0] != kwargs.get("batch_size")
            or not _last_sees_all(kwargs.get("mask_function"), kwargs.get("local_size"), start, length)
        ):
            return original(*args, **kwargs)
        counter.count_served()
        return mask[:, None, None, start:]

    return sdpa_mask


def _last_sees_all(mask_function: Any, window: Any, start: Any, length: Any) -> bool:
    """Whether the last token sees all of ``length`` that begin at ``start``, but for padding."""
    from transformers import masking_utils

    if window is None:
        is_causal = mask_function is None or mask_function is masking_utils.causal_mask_function
        return is_causal and bool(start == 0)
    if type(window) is not int or length > window:
        return False
    return _parts(mask_function) == _parts(masking_utils.sliding_window_causal_mask_function(window))


def _parts(function: Any) -> Any:
    """The code of a function and what it encloses: those of two are the same where both compute the same."""
    if not isinstance(function, types.FunctionType):
        return function
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__, [[_parts(part) for part in _listed(each)] for each in enclosed]


def _listed(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)
