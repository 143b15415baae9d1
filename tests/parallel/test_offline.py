"""Checkpoints sharded into a file a rank: made, loaded, put together again, refused where not right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from parallel import ranks
from parallel.test_loading import check, save
from parallel.test_saving import files
from support import families, tiny_models
from transformers import AutoModelForCausalLM

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.errors import CheckpointError
from liteboost_adaptor.parallel.tensor.plan import ShardingPlan

pytestmark = pytest.mark.usefixtures("native_only")

FIRST = ("llama", "phi3", "mixtral", "gpt_oss")


def shard(*arguments: object) -> None:
    assert cli.main(["shard", *map(str, arguments)]) == 0


def there_and_back(folder: Path, names: tuple[str, ...], size: int) -> None:
    save(folder, names)
    for name in names:
        shard(folder / name, folder / f"{name} sharded", "--tp", size)
        shard("--merge", folder / f"{name} sharded", folder / f"{name} merged")
        assert files(folder / name) == files(folder / f"{name} merged"), name


def test_divided_loaded_and_merged(tmp_path: Path) -> None:
    there_and_back(tmp_path, FIRST, 2)
    results = ranks.run(2, "parallel.jobs_offline:of_families", str(tmp_path), FIRST)
    # Nothing is read but the part; of tiny models headers are a hundredth and more.
    for found in results:
        for each in found.values():
            each["held"] = 0
    check(results, FIRST, held=1, read=1.1)
    plan = ShardingPlan.from_json((tmp_path / "llama sharded" / "liteboost_strategy.json").read_text())
    assert plan.world_size == 2 and plan.model == "LlamaForCausalLM"


def test_a_divided_folder_with_a_cache_of_integers(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    shard(tmp_path / "llama", tmp_path / "llama sharded", "--tp", 2)
    for found in ranks.run(2, "parallel.jobs_offline:with_integers_in_the_cache", str(tmp_path)):
        assert found.pop("distance") <= 1e-4  # some states are near a tie
        assert found == {"sharded": True, "kept": "torch.int8", "heads": 1}


def test_several_files_are_merged_to_the_same_files(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    shard(tmp_path / "whole", tmp_path / "sharded", "--tp", 4)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 4
    shard("--merge", tmp_path / "sharded", tmp_path / "merged")
    assert files(tmp_path / "whole") == files(tmp_path / "merged")


def _faulty(folder: Path) -> None:
    save(folder, ("llama",))
    shard(folder / "llama", folder / "short", "--tp", 2)
    shard(folder / "llama", folder / "four", "--tp", 4)
    for name in ("changed", "renamed", "gone"):
        shutil.copytree(folder / "short", folder / name)
    file = folder / "short" / "rank_1.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    with open(folder / "changed" / "rank_1.safetensors", "r+b") as changed:
        changed.seek(-10, os.SEEK_END)
        changed.write(b"x")
    shutil.copyfile(folder / "changed" / "rank_0.safetensors", folder / "renamed" / "rank_1.safetensors")
    (folder / "gone" / "rank_1.safetensors").unlink()


def test_what_is_not_right_is_refused_by_name(tmp_path: Path) -> None:
    _faulty(tmp_path)
    for rank, found in enumerate(ranks.run(2, "parallel.jobs_offline:faults", str(tmp_path))):
        for name, says in {
            "short": "cut short",
            "changed": "is not what was written there",
            "gone": "is missing",
        }.items():
            assert says in found[name] and "rank_1.safetensors" in found[name], found[name]
            assert found[name].startswith("CheckpointError" if rank else "ParallelError: rank 1 has failed")
        assert "for 4 processes, and 2 have been started" in found["four"]
        assert f"shard --merge {tmp_path / 'four'} WHOLE`" in found["four"] and "--tp 2" in found["four"]
        assert "LITEBOOST_TP=1" in found["tp 1"]
        # The parts of both ranks look the same, and differ in what they hold.
        assert "rank_1.safetensors" in found["renamed"] and "not what was written" in found["renamed"]


def test_one_process_and_wrong_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, ("llama",))
    shard(tmp_path / "llama", tmp_path / "sharded", "--tp", 2)
    refused = pytest.raises(CheckpointError, match=r"for 2 processes, and 1 has been started.*shard --merge")
    # Whatever a test before this one has undone.
    with liteboost_adaptor.patched(level=2), refused:
        AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    for arguments, says in (
        (("llama", "sharded", "--tp", "2"), "exists and is not empty"),
        (("sharded", "again", "--tp", "2"), "is sharded already"),
        (("--merge", "llama", "again"), "is not sharded"),
        (("llama", "again", "--tp", "3"), "World sizes that work: 2, 4."),
    ):
        paths = [
            str(tmp_path / each) if each in ("llama", "sharded", "again") else each for each in arguments
        ]
        assert cli.main(["shard", *paths]) == 1
        assert says in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert cli.main(["shard", str(tmp_path / "llama"), str(tmp_path / "again")]) == 2
    index = tmp_path / "sharded" / "liteboost_shards.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"format": 99}))
    assert cli.main(["shard", "--merge", str(tmp_path / "sharded"), str(tmp_path / "again")]) == 1
    assert "format 99" in capsys.readouterr().err


@pytest.mark.full
def test_every_family_there_and_back(tmp_path: Path) -> None:
    names = tuple(name for name in families.buildable() if 2 in families.world_sizes(name))
    there_and_back(tmp_path, names, 2)
    results = ranks.run(2, "parallel.jobs_offline:of_families", str(tmp_path), names, timeout=3600)
    for found in results:
        for each in found.values():
            each["held"] = 0
    check(results, names, held=1, read=5)
