"""Replicas share the rows of a batch: the same text as by one process, in the same order, on every rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from parallel import ranks
from parallel.test_loading import save
from parallel.test_offline import shard
from support import tiny_models
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("native_only")


def check(results: list[dict[str, Any]], replicas: int) -> None:
    for found in results:
        for batch in (1, 2, 3, 5):
            assert found[f"batch {batch}"], batch
        assert found["positional"] and found["beams"] and found["after"]
        one, shared = found["ends"]
        assert one == shared
        dicts = found["dicts"]
        assert dicts["same class"] and dicts["sequences"] and dicts["beam indices"] and dicts["no cache"]
        assert max(dicts["scores"], dicts["logits"], dicts["beam scores"]) <= 1e-5 and dicts["steps"] == 4
        assert "different settings" in found["a streamer of one"]
        assert "different inputs" in found["other inputs"] and "LITEBOOST_DP" in found["other inputs"]
        assert found["whole"] == {"streamed": True, "tokens": True, "rows of states": 3, "noted": True}
        assert found["sampled"] == results[0]["sampled"]
    # Rows with the same prompt are sampled differently, by one replica and by different ones.
    for rows in results[0]["sampled"]["drawn"]:
        assert len({tuple(row) for row in rows}) == 4
    assert results[0]["sampled"]["drawn"][0] != results[0]["sampled"]["drawn"][1]
    # Each did its rows; of a batch smaller than the number of replicas, one or none.
    size = len(results) // replicas
    for batch in (1, 2, 3, 5):
        done = [found[f"own rows of {batch}"] for found in results[::size]]
        assert sum(done) == batch and max(done) - min(done) <= 1


def check_saved(folder: Path) -> None:
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved")
    whole = tiny_models.build("llama")
    assert all((saved.state_dict()[name] == value).all() for name, value in whole.state_dict().items())


def test_two_replicas(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    folder = tmp_path / "llama"
    results = ranks.run(2, "parallel.jobs_replicas:replicas", str(folder), LITEBOOST_DP="2")
    check(results, replicas=2)
    assert results[0]["held"] == sum(p.numel() for p in tiny_models.build("llama").parameters())
    check_saved(folder)


def test_two_replicas_of_two_parts(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    folder = tmp_path / "llama"
    sharded = tmp_path / "llama sharded"
    shard(folder, sharded, "--tp", 2)
    results = ranks.run(4, "parallel.jobs_replicas:replicas", str(folder), str(sharded), LITEBOOST_DP="2")
    check(results, replicas=2)
    assert results[0]["held"] < 0.51 * sum(p.numel() for p in tiny_models.build("llama").parameters())
    check_saved(folder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"DP": 2, "CP": 2},
        pytest.param({"DP": 2, "SP": 2}, marks=pytest.mark.full),
        pytest.param({"DP": 2, "SP": 2, "TP": 2}, marks=pytest.mark.full),
        pytest.param({"DP": 2, "CP": 2, "TP": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_replicas_whose_ranks_share_prompts(tmp_path: Path, sizes: dict[str, int]) -> None:
    save(tmp_path, ("llama",))
    folder = tmp_path / "llama"
    asked = {f"LITEBOOST_{name}": str(size) for name, size in sizes.items()}
    results = ranks.run(math.prod(sizes.values()), "parallel.jobs_replicas:replicas", str(folder), **asked)
    check(results, replicas=2)
    part = 0.51 if "TP" in sizes else 1
    assert results[0]["held"] <= part * sum(p.numel() for p in tiny_models.build("llama").parameters())
    check_saved(folder)


def test_sizes_multiply_to_the_number_of_processes() -> None:
    for said in ranks.run(2, "parallel.jobs_replicas:sizes"):
        expected = (
            ("LITEBOOST_DP=3", "a multiple of 3"),
            ("LITEBOOST_TP=2, LITEBOOST_DP=2", "Start 4"),
            ("LITEBOOST_SP=2, LITEBOOST_CP=2", "a multiple of 4"),
            ("LITEBOOST_CP=4", "Start 4"),
        )
        assert len(said) == len(expected)
        for text, (asked, start) in zip(said, expected, strict=True):
            assert text.startswith("ParallelError") and "2 processes have been started" in text
            assert asked in text and start in text
