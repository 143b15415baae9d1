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
    """``sdpa_mask`` whose mask of one token is the padding of those that it sees.

    It sees all before it, or all of an encoder's text. transformers reads on the host whether anything is
    padded, at every token and for each kind of mask. In ``generate`` of a decoder alone the answer is known,
    for it drops a mask of ones at the beginning; elsewhere a mask of ones is right, too. Of a sliding window
    the cache keeps no more tokens than the last one sees.
    """
    counter = report.counter("npu.generate_mask")

    @functools.wraps(original)
    def sdpa_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        if args or not _is_of_one_token(kwargs) or not (_sees_a_text(kwargs) or _last_sees_all(kwargs)):
            return original(*args, **kwargs)
        counter.count_served()
        return kwargs["attention_mask"][:, None, None, kwargs["kv_offset"] :]

    return sdpa_mask


def text_mask(original: Any) -> Any:
    """``eager_mask`` that does not ask whether an encoder's text is padded: if not, zeros are added."""
    counter = report.counter("npu.generate_mask")

    @functools.wraps(original)
    def eager_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        if args or not _is_of_one_token(kwargs) or not _sees_a_text(kwargs):
            return original(*args, **kwargs)
        counter.count_served()
        return original(**kwargs | {"allow_is_bidirectional_skip": False})

    return eager_mask


def _is_of_one_token(arguments: dict[str, Any]) -> bool:
    """Whether a mask is asked for of one token on an NPU, and padding is all that may hide others from it."""
    mask, length = arguments.get("attention_mask"), arguments.get("kv_length")
    offset, start = arguments.get("q_offset"), arguments.get("kv_offset")
    # In a step that is recorded lengths are symbols.
    is_recorded = buffers.is_recorded()
    numbers = (int, torch.SymInt) if is_recorded else (int,)
    return (
        (type(mask) is torch.Tensor or (is_recorded and isinstance(mask, torch.Tensor)))
        and mask.device.type == "npu"
        and mask.ndim == 2
        and mask.dtype == torch.bool
        and arguments.get("q_length") == 1
        and (type(offset) in numbers and type(start) in numbers and type(length) in numbers)
        and bool(start + length == mask.shape[1])
        and mask.shape[0] == arguments.get("batch_size")
    )


def _sees_a_text(arguments: dict[str, Any]) -> bool:
    """Whether the token sees every token of a text that is not its own (an encoder's), but for padding."""
    from transformers import masking_utils

    # Before 5.0 transformers makes masks of encoders elsewhere.
    everything = getattr(masking_utils, "bidirectional_mask_function", None)
    is_whole = everything is not None and arguments.get("mask_function") is everything
    return is_whole and arguments.get("local_size") is None and bool(arguments["kv_offset"] == 0)


def _last_sees_all(arguments: dict[str, Any]) -> bool:
    """Whether the token is the last and sees all of ``kv_length`` from ``kv_offset`` on, but for padding."""
    from transformers import masking_utils

    start, length = arguments["kv_offset"], arguments["kv_length"]
    if arguments.get("allow_is_bidirectional_skip") or arguments["q_offset"] + 1 != start + length:
        return False
    mask_function, window = arguments.get("mask_function"), arguments.get("local_size")
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
