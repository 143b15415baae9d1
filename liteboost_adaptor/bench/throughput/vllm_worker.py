"""vLLM in a process of its own, asked as ``worker.py`` is. Started by path, by a Python that has vLLM."""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any


class Engine:
    """A loaded model, and rounds of requests."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self._options = options
        self._sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=options["new"], ignore_eos=True, detokenize=False
        )
        self._engine = vllm.LLM(
            options["model"],
            dtype=options["dtype"],
            skip_tokenizer_init=True,
            max_model_len=options["prompt"] + options["new"],
            max_num_seqs=options["most_requests"],
            enable_prefix_caching=False,
        )
        self._vocab_size = self._engine.llm_engine.model_config.get_vocab_size()
        self._drawn = random.Random(0)

    def batch(self, requests: int) -> dict[str, Any]:
        """Seconds that so many texts took."""
        prompts = [
            {"prompt_token_ids": self._drawn.choices(range(self._vocab_size), k=self._options["prompt"])}
            for _ in range(requests)
        ]
        begin = time.perf_counter()
        answers = self._engine.generate(prompts, self._sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        made = sum(len(answer.outputs[0].token_ids) for answer in answers)
        if made != requests * self._options["new"]:
            raise RuntimeError(f"asked for {requests} texts of {self._options['new']} tokens; made {made}")
        return {"seconds": seconds}


def main() -> None:
    """Serve over this process's standard streams."""
    common = runpy.run_path(str(Path(__file__).parents[1] / "worker.py"))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handlers: dict[str, Any] = {}

    def load(options: dict[str, Any]) -> dict[str, Any]:
        handlers["batch"] = Engine(options).batch
        return {}

    handlers["load"] = load
    handlers["finish"] = lambda: {"peak_rss_mb": common["peak_rss_mb"](), "status": None}
    common["serve"](handlers, sys.stdin, replies)


if __name__ == "__main__":
    main()
