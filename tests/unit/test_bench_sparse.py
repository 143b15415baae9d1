"""``bench --sparse``: gain and loss of block-sparse attention. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from liteboost_adaptor import cli
from liteboost_adaptor.bench import sparse
from liteboost_adaptor.config import Sparse

SHAKESPEARE = Path(__file__).parents[2] / "examples" / "models" / "shakespeare-llama"


def test_sparse_attention_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--sparse",
        "0.5,block=32",
        "--prompt",
        "300",
        "--repeats",
        "1",
        "--threads",
        "1",
        "--json",
        "-",
    ]
    threads = torch.get_num_threads()
    try:
        assert cli.main(["bench", *options]) == 0
        found = json.loads(capsys.readouterr().out)
    finally:
        torch.set_num_threads(threads)
    gain = found["gain"]
    assert 0.5 <= gain["density"] <= 0.75 and 0 < gain["error"] < 1.5 and 0 < gain["selection"] < 1
    assert gain["dense_ms"] > 0 and gain["sparse_ms"] > 0 and gain["ratio"] > 0 and found["losses"] == []
    losses = sparse.losses(Sparse(0.5), SHAKESPEARE, SHAKESPEARE / "heldout.txt", 1)
    assert [loss.tokens for loss in losses] == [1024, 512, 256] and {loss.block for loss in losses} == {16}
    for loss in losses:  # something is lost, and not much: a model that guesses is at 6.9
        assert 0 < loss.error < 0.2 and loss.dense != loss.sparse and abs(loss.sparse - loss.dense) < 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sparse", "2"], "sparse must be a share from 0 (off) to below 1"),
        (["--sparse", "0"], "give a share above 0"),
        (["--sparse", "0.5", "--arch", "examples"], "found 'examples'. Choose one."),
        (["--sparse", "0.5", "--trained", "no/such"], "there is no no/such/heldout.txt"),
    ],
)
def test_sparse_attention_says_what_is_wrong(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *options, "--prompt", "64", "--repeats", "1"]) == 1
    assert words in " ".join(capsys.readouterr().err.split())
