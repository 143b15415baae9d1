"""Go on with a line of Shakespeare: an ordinary transformers script, and one line more."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import liteboost_adaptor

FOLDER = Path(__file__).parent / "models" / "shakespeare-llama"

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def continue_text(prompt: str, new_tokens: int) -> str:
    """Return ``prompt`` and what the model finds most likely after it."""
    inputs = tokenizer(prompt, return_tensors="pt")
    outputs = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(outputs[0], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", default="ROMEO:\nWhat light is this, that")
    parser.add_argument("--new-tokens", type=int, default=100)
    options = parser.parse_args()
    print(continue_text(options.prompt, options.new_tokens))
