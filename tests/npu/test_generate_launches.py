"""Level 1 on an NPU, from the simulator's trace: launches, copies and waits a generated token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cann_sim.trace import recording
from support import llamas

import liteboost_adaptor
from liteboost_adaptor import native_npu

#: Half of what transformers launches outside of the layers for a token in bf16 without an end token.
HALF = 18


@dataclass(frozen=True)
class PerToken:
    """Launches outside of the layers, copies to the host and waits of the host, for one more token."""

    outside: float
    copies: float
    waits: float


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def totals(layers: int, tokens: int, padding: int, dtype: torch.dtype, ends: Any) -> tuple[int, int, int]:
    sizes = llamas.WIDE | {"intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": layers}
    model = llamas.llama(dtype, pad_token_id=0, **sizes)
    ids = torch.randint(3, 512, (2 if padding else 1, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    inputs = {"input_ids": ids.npu(), "attention_mask": mask.npu()}
    arguments = {"do_sample": False, "eos_token_id": ends}
    model.generate(**inputs, max_new_tokens=2, **arguments)
    with recording() as recorded:
        out = model.generate(**inputs, max_new_tokens=tokens, **arguments)
    assert out.shape[1] == 8 + tokens
    return len(recorded.launches), len(recorded.copies("d2h")), len(recorded.synchronisations)


def per_token(level: int, *case: Any) -> PerToken:
    liteboost_adaptor.apply(level=level)
    few, more = ([totals(layers, tokens, *case) for layers in (1, 2)] for tokens in (3, 7))
    liteboost_adaptor.undo()
    one, two = ([(b - a) / 4 for a, b in zip(x, y, strict=True)] for x, y in zip(few, more, strict=True))
    return PerToken(2 * one[0] - two[0], max(one[1], two[1]), max(one[2], two[2]))


@pytest.mark.parametrize(
    ("padding", "dtype", "ends"),
    [(0, torch.bfloat16, None), (0, torch.float32, 511), (3, torch.bfloat16, None)],
    ids=["bf16", "fp32 with an end token", "bf16 padded"],
)
def test_a_token_costs_few_launches_and_one_copy(padding: int, dtype: torch.dtype, ends: Any) -> None:
    theirs, ours = per_token(0, padding, dtype, ends), per_token(1, padding, dtype, ends)
    assert ours.copies <= 1 and ours.waits <= 1
    assert theirs.outside - ours.outside >= 16
    if native_npu.load().loaded:  # the final norm is one launch
        assert ours.outside <= HALF
