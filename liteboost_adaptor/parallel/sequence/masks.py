"""Masks while ranks share a prompt: of a rank's tokens against those before, or none."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ParallelError
from ...huggingface.runtime import runtime
from ...replacements import sequence
from .token_shards import TokenShards

_MASKS = "transformers.masking_utils"
_NAMES = ("sdpa", "eager")
_OFF = "Start the script with LITEBOOST_SP=1 and LITEBOOST_CP=1."


class ShardsMasks:
    """What makes masks while it is active; see `of_shared`.

    Attributes:
        tokens: Who holds which.
        padding: The mask of all tokens that the model was given, ``[batch, tokens]`` bool; None: all count.
    """

    tokens: TokenShards
    padding: Tensor | None


def install() -> None:
    """Ask us for masks first, until `undo`."""
    for name in _NAMES:
        if not hasattr(_mapping()[name], "__liteboost_shared__"):
            made = _asking(_mapping()[name])
            runtime.hooks.set_item(_mapping(), name, made, f"{_MASKS}:AttentionMaskInterface[{name!r}]")


def _mapping() -> dict[str, Any]:
    return importlib.import_module(_MASKS).AttentionMaskInterface._global_mapping


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        shared = sequence.active_distributed_attention()
        if not isinstance(shared, ShardsMasks):
            return original(*args, **kwargs)
        if args:
            raise ParallelError(f"processes cannot share a prompt: masks are made in an unknown way. {_OFF}")
        return of_shared(shared, original, kwargs)

    mask.__liteboost_shared__ = True
    return mask


def of_shared(shared: ShardsMasks, original: Callable[..., Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What a model is given for a mask while ``shared`` is active.

    The rows are those of all ranks that exchange heads, the columns all keys up to their last token. None
    stands for causality alone; one row for causality beside padding.

    Raises:
        ParallelError: The model wants something else of a mask than causality, padding and a window.
    """
    from transformers.masking_utils import causal_mask_function

    local = kwargs.get("local_size")
    is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if (
        not (is_causal or local is not None)
        or kwargs.get("use_vmap")
        or not kwargs.get("allow_is_causal_skip", True)
    ):
        raise ParallelError(
            f"the model hides keys in a way of its own, and processes cannot share its prompts. {_OFF}"
        )
    tokens, padding = shared.tokens, shared.padding
    first, last = tokens.of_ulysses_group(tokens.mesh.context.rank)
    padding = None if padding is None else padding[:, :last]
    if local == 0:  # of a model that has windows in no layer: nobody reads it, and it may be long
        return torch.zeros(1, 1, 1, last, dtype=torch.bool, device=kwargs.get("device"))
    if is_causal or local >= tokens.length:
        return None if padding is None else padding[:, None, None]
    if tokens.mesh.heads.size > 1 and padding is not None:
        _check_padding(tokens, padding)
    changes = {
        "q_length": last - first,
        "q_offset": first,
        "kv_length": last,
        "attention_mask": padding,
        "allow_is_causal_skip": False,
    }
    return original(**{**kwargs, **changes})


def _check_padding(tokens: TokenShards, padding: Tensor) -> None:
    """Raise `ParallelError` where a rank sees padding only, behind which a window may begin."""
    first_part = tokens.bound(tokens.mesh.context.rank * tokens.mesh.heads.size + 1)
    if not bool(padding[:, :first_part].any(-1).all()):
        raise ParallelError(
            "a row of the batch has more padding than a process has tokens, and attention has a window. Use "
            "LITEBOOST_CP in place of LITEBOOST_SP, or sort rows by their lengths."
        )
