"""Ranks that have changed their model in different ways do not share it: each has the text of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel import ranks
from parallel.jobs_model_edits import CHANGES
from parallel.test_loading import save

pytestmark = pytest.mark.usefixtures("native_only")
_JOB = "parallel.jobs_model_edits:changed"


@pytest.mark.parametrize("name", CHANGES)
def test_each_rank_gets_what_its_own_model_gives(name: str, tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    folder = str(tmp_path / "llama")
    alone = [ranks.start(1, _JOB, folder, name, rank, WORLD_SIZE="1", LITEBOOST_TP="1") for rank in (0, 1)]
    together = ranks.start(2, _JOB, folder, name)
    expected = [ranks.result(ranks.finish(each)[0][1]) for each in alone]
    for (code, text), right in zip(ranks.finish(together), expected, strict=True):
        assert code == 0, text[-3000:]
        found = ranks.result(text)
        assert (found["before"], found["texts"]) == (right["before"], right["texts"])
        assert found["parted"] == (0 if name == "the_same" else 1)
    is_seen = expected[0]["texts"] != expected[1]["texts"]
    assert is_seen or name == "the_same"
