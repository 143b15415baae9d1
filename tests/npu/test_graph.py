"""A decode step captured as an NPUGraph and replayed gives the tokens of the steps it was captured from."""

from __future__ import annotations

import torch
from cann_sim.trace import recording
from support import llamas
from transformers import StaticCache

from liteboost_adaptor import native_npu

PROMPT, STEPS, LENGTH = 7, 7, 32


class Decoder:
    """A model with a static cache after its prompt, and a step whose tensors stay where they are."""

    def __init__(self) -> None:
        sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
        sizes |= {"intermediate_size": 128, "num_hidden_layers": 2}
        self.model = llamas.llama(torch.bfloat16, factor=8, **sizes)
        self.prompt = torch.randint(0, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0)).npu()
        self.cache = StaticCache(config=self.model.config, max_cache_len=LENGTH)
        self.token = torch.zeros(1, 1, dtype=torch.long, device="npu")
        self.position = torch.zeros(1, dtype=torch.long, device="npu")

    def start(self) -> int:
        """Fill the cache with the prompt; returns the first token."""
        self.cache.reset()
        logits = self.model(self.prompt, past_key_values=self.cache, use_cache=True).logits
        return int(logits[0, -1].argmax())

    def step(self) -> torch.Tensor:
        """The logits after `token` at `position`."""
        positions = self.position[None]
        out = self.model(self.token, past_key_values=self.cache, position_ids=positions, use_cache=True)
        return out.logits[0, -1]

    def decode(self, run: object) -> tuple[list[int], torch.Tensor]:
        """Tokens and logits of `STEPS` steps from the prompt on; ``run()`` gives the logits of one."""
        tokens, logits = [self.start()], []
        for position in range(PROMPT, PROMPT + STEPS):
            self.token.fill_(tokens[-1])
            self.position.fill_(position)
            logits.append(run().float().cpu())
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)


def test_a_captured_step_is_the_step(level: int) -> None:
    decoder = Decoder()
    tokens, logits = decoder.decode(decoder.step)
    assert len(set(tokens)) > 2
    decoder.start()
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        captured = decoder.step()
    if level:
        torch.ops.liteboost._npu_forget_counts()

    def replay() -> torch.Tensor:
        graph.replay()
        return captured

    with recording() as trace:
        replayed, again = decoder.decode(replay)
    assert replayed == tokens
    assert torch.equal(again, logits)
    if level:
        replays = [launch.op for launch in trace.launches if launch.graph]
        assert replays.count("aclnnFusedInferAttentionScoreV3") == 2 * STEPS
        # Only the prompt went through the ops; the steps are the graph's.
        assert {op: n for op, reason, n in native_npu.calls() if not reason}["attention"] == 2
