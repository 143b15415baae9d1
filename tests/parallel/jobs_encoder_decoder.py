"""Encoder-decoders: embeddings of the encoder and the decoder and the output layer often share a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from parallel.jobs import _quiet
from parallel.jobs_load import PLAN, class_of
from support.numbers import relative

INPUTS = {
    "input_ids": torch.arange(5, 29).reshape(2, 12),
    "decoder_input_ids": torch.tensor([[2, 200, 7, 130], [2, 9, 255, 64]]),
}
LENGTH = 6


@torch.no_grad()
def outputs(model: Any) -> tuple[torch.Tensor, list[Any]]:
    """Logits of `INPUTS`, and the text behind them."""
    text = model.generate(
        INPUTS["input_ids"], max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, num_beams=1
    )
    return model(**INPUTS).logits, text.tolist()


def loaded(folder: str, names: list[str]) -> dict[str, Any]:
    """Each model of ``folder``, sharded as it is loaded, beside what one process has written."""
    _quiet()
    found = {}
    for name in names:
        expected = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        model = class_of(f"{folder}/{name}").from_pretrained(f"{folder}/{name}", dtype=torch.float32).eval()
        logits, text = outputs(model)
        plan = vars(model).get(PLAN)
        found[name] = {
            "sharded": plan is not None,
            "vocabulary": [each for each, role in plan.roles.items() if role in ("embedding", "head")],
            "distance": relative(logits, expected["logits"]),
            "same text": text == expected["text"],
        }
    return found
