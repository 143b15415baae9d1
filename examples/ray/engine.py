"""A model in a worker of Ray: whole, or the part of one rank of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Engine:
    """A model and its tokenizer.

    Args:
        folder: Where every node finds the model.
        rank, size: Which of how many processes (ranks) this is, that hold a part of the model each.
        address, port: Where rank 0 listens for the others.
    """

    def __init__(
        self,
        folder: str,
        dtype: str,
        device: str,
        rank: int = 0,
        size: int = 1,
        address: str = "",
        port: int = 0,
    ) -> None:
        if size > 1:
            # What torchrun would set, and that these ranks share one model, whatever they are asked.
            # Read when liteboost_adaptor is imported: a worker of Ray that is an actor has not done so yet.
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LITEBOOST_TP": str(size)}
            os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        import liteboost_adaptor  # isort: skip
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        end = self.model.generation_config.eos_token_id
        self.ends = {end} if isinstance(end, int) else {*(end or ())}

    def encode(self, prompt: str, new_tokens: int) -> list[int]:
        """The tokens of ``prompt``.

        Raises:
            ValueError: There are none, or the model has no room for them and so many new ones.
        """
        found = self.tokenizer(prompt)["input_ids"]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not found:
            raise ValueError("the prompt has no tokens")
        if room is not None and len(found) + new_tokens > room:
            raise ValueError(f"{len(found)} tokens and {new_tokens} new ones; the model has room for {room}")
        return found

    def decode(self, tokens: list[int]) -> str:
        """Their text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def generate(
        self,
        prompts: Sequence[list[int]],
        new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        streamer: Any = None,
    ) -> list[list[int]]:
        """New tokens for each prompt, with the one that ends it. All ranks are given the same.

        Args:
            temperature: 0 takes the most likely token.
            streamer: Is told each token as it is made; one rank's own.
        """
        import torch

        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
        if seed is not None:
            torch.manual_seed(seed)
        inputs = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.model.device)
        ids = self.model.generate(
            **inputs,
            **sampling,
            max_new_tokens=new_tokens,
            pad_token_id=self.tokenizer.pad_token_id,
            streamer=streamer,
        )
        return [self._ended(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def _ended(self, tokens: list[int]) -> list[int]:
        """Without what ``generate`` has padded a text with that ended before others."""
        last = next((place for place, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: last + 1]

    def status(self) -> str:
        """What liteboost_adaptor has served in this process, as JSON."""
        import liteboost_adaptor

        return liteboost_adaptor.status().to_json()


def runtime_env() -> dict[str, Any]:
    """What workers on every node are given: this folder, and the settings of this shell (``LITEBOOST_*``)."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("LITEBOOST_")}
    return {"working_dir": str(Path(__file__).parent), "env_vars": settings}
