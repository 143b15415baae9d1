"""Marks in the trace of the simulator where ``generate`` goes on to the next token."""

from __future__ import annotations

import torch
from cann_sim.trace import mark
from transformers import LogitsProcessor


class Marks(LogitsProcessor):
    """Marks where the work for a token ends."""

    def __init__(self) -> None:
        self.token = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.token += 1
        mark(f"token {self.token}")
        return scores
