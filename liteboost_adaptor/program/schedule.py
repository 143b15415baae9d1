"""When a recording pays for itself, counted in steps, not measured.

How many replays a recording costs, and why that is so for any model: decision 59
(``docs/decisions/0059-recordings-that-pay.md``).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

#: The first step behind a prompt moves the cache, the second is watched.
_EARLIEST = 3
#: So many programs that have not paid are ignored; each further one doubles the steps seen before the next
#: recording, `_DOUBLED` times at most.
_FREE, _DOUBLED = 1, 5
_GENERATION = "transformers.generation.utils"
#: Where candidates are checked several at a time: steps of one token are few, however long the text is. Of
#: steps of several, as many come as if half of the candidates were right.
_ASSISTED = "_assisted_decoding"
#: Where continuous batching calls a model.
_BATCHING = "transformers.generation.continuous_batching.model_runner"


def recorded_at(seen: int, to_come: int, wait: int, in_vain: int) -> int:
    """At which count a step that has come ``seen`` times is recorded, if now or the next time; else 0.

    Args:
        to_come: How many more may come (`steps_to_come`): they count as if they had.
        wait: As often as it has come, it is likely to come again: then a recording pays.
        in_vain: Programs of the same model that have served fewer steps than that.
    """
    wait <<= min(max(0, in_vain - _FREE), _DOUBLED)
    first = max(min(_EARLIEST, wait), wait - to_come)
    return max(seen, first) if first <= seen + 1 else 0


def steps_to_come(count: int = 1) -> int:
    """How many more steps of ``count`` tokens a running ``generate`` may make; 0 where there is none.

    Nobody hands this to a model's forward: it is read where ``generate`` has it.
    """
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_globals.get("__name__") == _BATCHING:
            return _batches_to_come(frame.f_locals.get("self"))
        if frame.f_globals.get("__name__") != _GENERATION:
            continue
        names = frame.f_locals
        most, ids = getattr(names.get("generation_config"), "max_length", None), names.get("input_ids")
        is_assisted = frame.f_code.co_name == _ASSISTED
        if is_assisted != (count > 1):
            return 0  # of prompts in parts, too
        if type(most) is int and isinstance(ids, torch.Tensor):
            return max(0, most - ids.shape[-1]) * 2 // (count + 1)
    return 0


def _batches_to_come(runner: Any) -> int:
    """How many more tokens the request that is furthest from its end may get."""
    batch = getattr(getattr(runner, "inputs_and_outputs", None), "requests_in_batch", [])
    states = [each.state for each in batch]
    return max(
        [each.max_new_tokens - len(each.generated_tokens) for each in states if each.max_new_tokens],
        default=0,
    )
