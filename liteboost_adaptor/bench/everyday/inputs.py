"""What scripts are given: texts, tokens, a decoder. Imports nothing of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

#: Tokens of every model; those before the first are no words.
VOCAB, FIRST = 2048, 5


def tokenizer() -> Any:
    """One whose tokens are the words ``w5`` to ``w2047``, and one of letters, for stop strings."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<mask>", "abcdef"]
    vocab = {word: at for at, word in enumerate(special + [f"w{at}" for at in range(len(special), VOCAB)])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        unk_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        padding_side="left",
        chat_template="{% for m in messages %}<s> {{ m['content'] }} {% endfor %}",
    )


def words(count: int, seed: int = 0) -> str:
    """A text of ``count`` words of `tokenizer`."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{at}" for at in torch.randint(FIRST, VOCAB, (count,), generator=generator).tolist())


def prompt(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Tokens, ``[rows, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST, VOCAB, (rows, length), generator=generator)


def decoder(folder: Path, **options: Any) -> Any:
    """The decoder of a folder, as scripts load it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)
