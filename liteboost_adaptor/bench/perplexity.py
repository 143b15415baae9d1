"""Perplexity of a model over a text: what a change of numerics costs on real input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Perplexity:
    """A mean loss, and what it is the mean of.

    Attributes:
        loss: Mean negative log likelihood of a token, in nats, over all blocks.
        blocks: Blocks read; each predicts all its tokens but the first.
    """

    loss: float
    blocks: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)


def tokenize(folder: Path | str, text: Path | str, block: int = 256) -> torch.Tensor:
    """Cut a text into blocks of tokens.

    Args:
        folder: With the tokenizer.
        text: A UTF-8 text file.
        block: Tokens in a block. What is left over at the end is dropped.

    Returns:
        ``[blocks, block]``, int64.

    Raises:
        ConfigError: The text is shorter than one block.
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # One piece, without special tokens: the boundaries of the blocks are the only cuts.
    encoded = tokenizer(Path(text).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    blocks = len(encoded) // block
    if blocks == 0:
        raise ConfigError(
            f"perplexity needs a text of at least one block of {block} tokens; found {len(encoded)} "
            f"in {text}. Use a longer text or a smaller block."
        )
    return torch.tensor(encoded[: blocks * block]).view(blocks, block)


def evaluate(model: PreTrainedModel, blocks: torch.Tensor, batch: int = 1) -> Perplexity:
    """Mean loss of ``model`` over ``blocks``, each read from an empty past.

    Args:
        model: A causal language model.
        blocks: ``[blocks, block]`` token ids.
        batch: Blocks in one forward pass.

    Returns:
        The loss is computed in fp32 from the model's logits and summed in double.
    """
    import torch
    from torch.nn.functional import cross_entropy

    total = 0.0
    with torch.inference_mode():
        for input_ids in blocks.split(batch):
            logits = model(input_ids.to(model.device), use_cache=False).logits[:, :-1].float()
            targets = input_ids[:, 1:].flatten().to(logits.device)
            total += cross_entropy(logits.flatten(0, 1), targets, reduction="none").double().sum().item()
    return Perplexity(total / (blocks.shape[0] * (blocks.shape[1] - 1)), blocks.shape[0])


def perplexity(
    folder: Path | str,
    text: Path | str,
    dtype: str = "float32",
    block: int = 256,
    max_blocks: int | None = None,
    batch: int = 1,
) -> Perplexity:
    """Load a model and evaluate it over a text.

    Args:
        folder: Of the model and its tokenizer.
        text: A UTF-8 text file.
        dtype: Of weights and activations.
        block: Tokens in a block.
        max_blocks: Read only so many; ``None`` for all.
        batch: Blocks in one forward pass.
    """
    import torch
    from transformers import AutoModelForCausalLM

    blocks = tokenize(folder, text, block)[:max_blocks]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return evaluate(model.eval(), blocks, batch)
