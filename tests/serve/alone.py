"""``PYTHONPATH=tests python -m serve.alone MODEL``: greedy texts of ``generate`` alone, without us.

Prompts are read from the standard input as JSON; written are, for each, the texts of 0, 1, 2, ... tokens.
"""

from __future__ import annotations

import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, tokens: int) -> None:
    """Print the texts of all prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    found = {}
    for prompt in json.load(sys.stdin):
        inputs = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        found[prompt] = [
            tokenizer.decode(new[:length], skip_special_tokens=True) for length in range(tokens + 1)
        ]
    assert "liteboost_adaptor" not in sys.modules
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
