"""``bench.steps``: decode steps of one process in turn. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny_models

import liteboost_adaptor
from liteboost_adaptor.bench import steps
from liteboost_adaptor.bench.token_bytes import token_bytes


@pytest.mark.parametrize("quant", ["", "w8a16"])
def test_steps_of_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], quant: str) -> None:
    model = tiny_models.build("llama")
    model.save_pretrained(tmp_path)
    threads = torch.get_num_threads()
    options = ["--dtype", "float32", "--prompt", "8", "--batch", "2", "--context", "40", "--rounds", "3"]
    try:
        steps.main(["--arch", str(tmp_path), "--threads", "1", "--quant", quant, *options])
    finally:
        torch.set_num_threads(threads)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["batch 1, context 8", "batch 2, context 8", "batch 1, context 40"]
    text, head = model.config, model.get_output_embeddings().weight
    if quant:
        liteboost_adaptor.apply(model, quant=quant)
        counted = sum(token_bytes(model).values())
    weights = (
        counted
        if quant
        else sum(p.nbytes for p in model.parameters())
        - (0 if text.tie_word_embeddings else model.get_input_embeddings().weight.nbytes)
    )
    row = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * head.element_size()
    # The steps timed are those after the warm-up; the one in the middle is the average.
    first, longer = (weights + row * (context + steps.WARM_UP + 2) for context in (8, 40))
    assert [row[1] for row in rows[2:]] != ["0.000"] * 3
    assert float(rows[2][2]) == float(rows[2][3]) == float(rows[2][4]) == 1
    assert float(rows[4][3]) == pytest.approx(longer / first, abs=1e-3)
