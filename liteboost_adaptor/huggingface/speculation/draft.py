"""The draft model of LITEBOOST_SPECULATE: loaded when it is first needed, once for a model."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from ...config import Settings
from ...engine import swap
from .pace import COST_OF_TOKEN

#: Where a model keeps it.
_DRAFT = f"{swap.PRIVATE}draft"
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Draft:
    """One that was loaded, or could not be.

    Attributes:
        model: The draft model, or ``None``.
        reason: Why there is none.
        cost: What one of its candidates costs, in steps of one token of the model that checks them.
    """

    model: Any = None
    reason: str = ""
    cost: float = 0.0


def draft_of(model: Any, settings: Settings) -> Draft:
    """The draft model for ``model``."""
    with _lock:
        found = vars(model).get(_DRAFT)
        if found is None:
            found = vars(model)[_DRAFT] = _load(model, settings)
        return found


def forget(model: torch.nn.Module) -> None:
    """Let the draft model of ``model`` go."""
    vars(model).pop(_DRAFT, None)


def _load(model: Any, settings: Settings) -> Draft:
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.config.is_encoder_decoder:
        return Draft(reason="a draft model is for a decoder alone")
    try:
        theirs = AutoConfig.from_pretrained(settings.speculate).get_text_config().vocab_size
        ours = model.config.get_text_config().vocab_size
        if theirs != ours:
            return Draft(reason=f"the draft model has a vocabulary of {theirs} tokens, the model of {ours}")
        made: Any = AutoModelForCausalLM.from_pretrained(settings.speculate, dtype=model.dtype)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as fault:
        return Draft(reason=f"the draft model cannot be loaded: {type(fault).__name__}: {fault}")
    made = made.to(model.device).eval()
    if getattr(made, "_is_stateful", False):
        return Draft(reason="the draft model keeps a state that cannot be taken back")
    from ..runtime import runtime  # which binds models to this

    if swap.mark_of(made) is None:  # only the model was applied, and models that are loaded are left alone
        runtime.bind(made, dataclasses.replace(settings, speculate="", quant=None))
    # transformers would write the number of candidates into its settings, and stop at unlikely ones.
    made.generation_config.num_assistant_tokens_schedule = "constant"
    made.generation_config.assistant_confidence_threshold = 0.0
    return Draft(made, cost=COST_OF_TOKEN + bytes_of(made) / max(bytes_of(model), 1))


def bytes_of(model: torch.nn.Module) -> int:
    """What its weights take."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
