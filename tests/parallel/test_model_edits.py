"""Ranks that have changed their model in different ways do not share it: each has the text of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel import ranks, test_encoder_decoder
from parallel.jobs_model_edits import CHANGES
from parallel.test_loading import save
from transformers import ViTConfig, ViTForImageClassification

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


def test_a_change_on_one_rank_is_an_error_where_ranks_must_share(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    for found in ranks.run(2, "parallel.jobs_model_edits:refused", str(tmp_path / "llama"), LITEBOOST_TP="2"):
        for change, said in found.items():
            assert said.startswith("ParallelError: the model was changed since it was loaded"), (change, said)
            assert "LITEBOOST_TP=1" in said


def test_images_of_their_own_make_ranks_part(tmp_path: Path) -> None:
    """As text of their own does: sums over parts of two images would be of neither."""
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**config, image_size=32, patch_size=8, num_labels=5)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    pixels = torch.randn(2, 3, 32, 32)
    torch.save(pixels, tmp_path / "images.pt")
    with torch.no_grad():
        expected = model(pixel_values=pixels).logits
    for rank, found in enumerate(ranks.run(2, "parallel.jobs_model_edits:images", str(tmp_path))):
        assert found["was sharded"] and found["parted"]
        torch.testing.assert_close(torch.tensor(found["logits"]), expected[rank], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", ["any", "2"])
def test_models_in_a_model_are_called_for_the_same_or_each_by_itself(size: str, tmp_path: Path) -> None:
    """A script may embed by the encoder alone: ranks with texts of their own shall not share it."""
    test_encoder_decoder.build("t5").save_pretrained(tmp_path)
    job = ("parallel.jobs_model_edits:parts", str(tmp_path))
    expected = [ranks.run(1, *job, rank, WORLD_SIZE="1", LITEBOOST_TP="1")[0] for rank in (0, 1)]
    if size == "2":
        for code, text in ranks.finish(ranks.start(2, *job, LITEBOOST_TP="2")):
            assert code and "the ranks have been given different inputs" in text
        return
    for rank, found in enumerate(ranks.run(2, *job)):
        assert found[f"parted {rank}"] and not (rank and found["parted 0"])
        for which in (0, rank):
            torch.testing.assert_close(
                torch.tensor(found[f"values {which}"]),
                torch.tensor(expected[rank][f"values {which}"]),
                rtol=1e-4,
                atol=1e-5,
            )


def test_what_a_shard_cannot_give_makes_the_model_whole(tmp_path: Path) -> None:
    """Attention weights of all heads, files of a part of the model; an error where ranks must share it."""
    save(tmp_path, ("llama",))
    job = ("parallel.jobs_model_edits:heads_and_parts", str(tmp_path / "llama"))
    (expected,) = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")
    close = torch.testing.assert_close
    for rank, found in enumerate(ranks.run(2, *job)):
        for name, (was_sharded, _, values) in expected.items():
            assert found[name][:2] == [True, False] and not was_sharded
            if name == "saved":
                assert found[name][2] == (values if rank == 0 else {})
            else:
                close(torch.tensor(found[name][2]), torch.tensor(values), rtol=1e-4, atol=1e-6)
    for found in ranks.run(2, *job, LITEBOOST_TP="2"):
        for name in expected:
            assert found[name][0] and "is sharded over processes, and" in found[name][1]


def test_branches_beside_each_other_are_seen_and_changed_as_without_us() -> None:
    """Attention and MLP of a Phi are summed together, unless somebody looks at one of them."""
    job = ("parallel.jobs_model_edits:beside", ["phi", "gpt_neox"])
    (expected,) = ranks.run(1, *job, False, WORLD_SIZE="1", LITEBOOST_TP="1")
    for found in ranks.run(2, *job, True, LITEBOOST_TP="1"):
        assert set(found) == set(expected)
        for name, values in found.items():
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5, msg=name
            )


def test_what_peft_wraps_is_whole(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    job = ("parallel.jobs_model_edits:adapted", str(tmp_path / "llama"))
    (expected,) = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")
    for found in ranks.run(2, *job):
        assert found["was sharded"] and not expected["was sharded"]
        for name in ("logits", "gradients"):
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-4, atol=1e-5
            )
    for found in ranks.run(2, *job, LITEBOOST_TP="2"):
        assert found["was sharded"] and "take no adapters" in found["refused"]
