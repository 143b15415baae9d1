"""Scripts that give each process its own work run as without us: ranks part, each with the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel import ranks
from parallel.test_loading import FIRST, save, with_agent

pytestmark = pytest.mark.usefixtures("native_only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save(made, FIRST)
    return made


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[str, Any]:
    """What one process computes."""
    job = ("parallel.jobs_kinds:reference", str(folder / "llama"))
    return ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")[0]


def test_models_are_whole_again(folder: Path) -> None:
    for found in ranks.run(2, "parallel.jobs_parts:whole_again", str(folder), FIRST):
        assert found.pop("sharded")
        assert set(found) == set(FIRST)
        assert all(all(each.values()) for each in found.values()), found


def test_ranks_part_at_any_call(folder: Path, right: dict[str, Any]) -> None:
    for rank, found in enumerate(ranks.run(2, "parallel.jobs_parts:later", str(folder / "llama"))):
        assert found["together"] == [right["tokens"]] * 2 and found["was sharded"]
        assert found["apart"] == right["others" if rank else "tokens"] and found["again"] == right["others"]
        assert len(found["warned"]) == 1 and "different inputs" in found["warned"][0]
        assert "filled while the model was sharded" in found["cache"]
        assert found["loaded whole"] and found["noted"]


@pytest.mark.parametrize("job", ["changed", "memory", "memory_seen_late"])
def test_what_cannot_be_whole_is_an_error_with_the_reason(folder: Path, job: str) -> None:
    for found in ranks.run(2, f"parallel.jobs_parts:{job}", str(folder / "llama")):
        assert found.startswith("ParallelError: the ranks have been given different inputs")
        assert ("was changed since it was loaded" if job == "changed" else "GB left") in found
        assert "LITEBOOST_TP=1" in found


def test_what_a_script_has_done_to_the_model_stays(folder: Path, right: dict[str, Any]) -> None:
    found = ranks.run(2, "parallel.jobs_parts:moved", str(folder / "llama"))
    assert found == [right["tokens"], right["others"]]


def test_a_vocabulary_that_grows_is_whole_again(folder: Path) -> None:
    for found in ranks.run(2, "parallel.jobs_parts:resized", str(folder / "llama")):
        assert found["was sharded"] and found["warned"] == 1
        assert found["rows"] == [300, 64, 300, 64] and found["sizes"] == [256, 300, 300]
        assert found["distance"] <= 1e-5 and found["new token"]


@pytest.mark.parametrize("how", ["sampled", "greedy", "loop"])
def test_ranks_with_seeds_of_their_own_draw_by_these(folder: Path, how: str) -> None:
    job = ("parallel.jobs_parts:seeded", str(folder / "llama"), how)
    alone = [ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1", SEED=str(rank))[0] for rank in range(2)]
    assert alone[0]["next"] != alone[1]["next"]
    for found, right in zip(ranks.run(2, *job), alone, strict=True):
        assert (found["tokens"], found["next"]) == (right["tokens"], right["next"])
        assert found["was sharded"] and found["sharded"] == (how == "greedy")
    for found in ranks.run(2, *job, SEED="1"):
        assert (found["tokens"], found["next"]) == (alone[1]["tokens"], alone[1]["next"]) and found["sharded"]


def test_ranks_that_are_to_share_a_model_draw_what_rank_0_draws(folder: Path) -> None:
    job = ("parallel.jobs_parts:seeded", str(folder / "llama"), "loop")
    right = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1", SEED="0")[0]
    for found in ranks.run(2, *job, LITEBOOST_TP="2"):
        assert (found["tokens"], found["next"]) == (right["tokens"], right["next"]) and found["sharded"]


def test_division_that_was_asked_for_stays(folder: Path) -> None:
    for found in ranks.run(2, "parallel.jobs_parts:moved", str(folder / "llama"), LITEBOOST_TP="1"):
        assert found
    asked = [{"LITEBOOST_TP": "2"}] * 2
    for code, text in with_agent(2, "parallel.jobs_parts:moved", str(folder / "llama"), each=asked):
        assert code == 1 and "ParallelError: the ranks have been given different inputs" in text, text


def test_wrappers_of_data_parallel_work_get_whole_models(folder: Path) -> None:
    job = ("parallel.jobs_parts:wrapped", str(folder / "llama"))
    found = ranks.run(2, *job)
    assert all(each["was sharded"] for each in found)
    # The mean over both processes: the same on each.
    assert found[0]["sum"] == pytest.approx(found[1]["sum"], rel=1e-6) and found[0]["sum"] > 0


@pytest.mark.parametrize(
    "variables",
    [
        {"ACCELERATE_MIXED_PRECISION": "no"},
        {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"},
    ],
    ids=["accelerate", "deepspeed"],
)
def test_launchers_of_data_parallel_work_divide_nothing(
    folder: Path, right: dict[str, Any], variables: dict[str, str]
) -> None:
    for found in ranks.run(2, "parallel.jobs_parts:launched", str(folder / "llama"), **variables):
        assert found == {"sharded": False, "met": False, "tokens": right["tokens"]}


@pytest.mark.parametrize("scheme", ["w8a16", pytest.param("w4a16", marks=pytest.mark.full)])
def test_integers_are_whole_again(folder: Path, scheme: str) -> None:
    job = ("parallel.jobs_parts:quantized", str(folder / "llama"))
    for found in ranks.run(2, *job, LITEBOOST_QUANT=scheme):
        assert all(found.values()), found
