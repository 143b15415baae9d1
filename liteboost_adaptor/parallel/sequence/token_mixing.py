"""Whether a model mixes tokens only in served attention: then a rank can do all else for its own tokens.

Determined by running it: with an attention that gives nothing, a change of the first token must change no
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ParallelError
from ...replacements import sequence
from ...replacements.sequence import AttentionCall

#: Number of tokens of the probe: more than a short convolution sees.
_TOKENS = 8
#: Relative difference from which on another token has changed. Two rows of a batch differ by rounding.
_CHANGED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class _NoAttention:
    """Attention that sees no key, and counts."""

    def __init__(self) -> None:
        self.calls = self.updates = 0

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls += 1
        batch, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(batch, tokens, heads, call.value.shape[-1])


@torch.no_grad()
def check_token_mixing(model: nn.Module, name: str, prompt: Tensor) -> None:
    """Run ``model`` on a few tokens of ``prompt``, its argument ``name``.

    Raises:
        ParallelError: It mixes tokens in another way.
    """
    given = prompt[:1, :_TOKENS].repeat_interleave(2, 0)
    first = given[1, 0]
    given[1, 0] = first + 1 if first.is_floating_point() else torch.where(first > 0, first - 1, first + 1)
    attention = _NoAttention()
    try:
        with sequence.use_distributed_attention(attention):
            output = type(model).forward(model, **{name: given}, use_cache=False)
    except ParallelError:
        raise
    except Exception as fault:
        raise _refused(model, f"it could not be tried ({type(fault).__name__}: {fault})") from fault
    found = _tensor_of(output)
    if found is None or not attention.calls:
        raise _refused(model, "no attention of it is served")
    others = found[:, 1:].float()
    difference = (others[0] - others[1]).norm() / others[0].norm().clamp_min(1e-30)
    if not difference <= _CHANGED.get(found.dtype, _CHANGED[torch.float32]):
        raise _refused(
            model,
            "it mixes tokens elsewhere than in attention that is served (a convolution, a recurrence, "
            "attention of another form)",
        )


def _tensor_of(output: Any) -> Tensor | None:
    found = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
    return next((tensor for tensor in found if isinstance(tensor, Tensor)), None)


def _refused(model: nn.Module, reason: str) -> ParallelError:
    return ParallelError(
        f"processes cannot share the prompts of {type(model).__name__}: {reason}. Start the script with "
        "LITEBOOST_SP=1 and LITEBOOST_CP=1."
    )
