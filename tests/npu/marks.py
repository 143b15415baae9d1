"""What the simulator's trace says of one token of ``generate``, and of one replay of a graph."""

from __future__ import annotations

import torch
from cann_sim.trace import Trace, mark, recording
from transformers import LogitsProcessor, LogitsProcessorList


class Marks(LogitsProcessor):
    """Marks where the work for a token ends."""

    def __init__(self) -> None:
        self.token = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.token += 1
        mark(f"token {self.token}")
        return scores


def decoded(model: torch.nn.Module, prompt: int, new: int, before: int = 1) -> Trace:
    """What happens for the last but one of ``new`` tokens after a prompt of so many.

    Args:
        before: How often the same is generated before, so that what is made once has been made.
    """
    ids = torch.randint(3, 1000, (1, prompt), generator=torch.Generator().manual_seed(0)).npu()
    arguments = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    arguments["attention_mask"] = torch.ones_like(ids)
    for _ in range(before):
        model.generate(ids, **arguments)
    with recording() as trace:
        model.generate(ids, logits_processor=LogitsProcessorList([Marks()]), **arguments)
    return trace.part(f"token {new - 1}")


def launched_by_a_replay() -> list[str]:
    """What torch_npu launches for any replay: 2.9.0 writes the seed and the offset of its generator."""
    x, graph = torch.ones(4).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + 1
    with recording() as trace:
        graph.replay()
    assert y.tolist() == [2.0] * 4
    return [launch.op for launch in trace.launches if not launch.graph]
