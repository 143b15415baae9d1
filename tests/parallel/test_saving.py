"""A sharded model is saved as one checkpoint, the same as that of the unsharded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel import jobs_save, ranks
from parallel.test_loading import save
from support import families, tiny_models
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("native_only")

#: Ties, fused layers, experts in a file of their own each, biases that rank 0 has alone.
FIRST = ("gemma3_text", "phi3", "mixtral", "gpt_oss", "gpt2")


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_files_are_those_of_the_undivided_model(tmp_path: Path) -> None:
    save(tmp_path, FIRST)
    before = {path.name for path in tmp_path.iterdir()}
    results = ranks.run(2, "parallel.jobs_save:saves", str(tmp_path), FIRST)
    for rank, found in enumerate(results):
        assert all(found[name] == "nothing raised" for name in (*FIRST, "again")), found
        # Rank 0 says what hindered it, the other that rank 0 could not.
        said = "ParallelError: rank 0 has failed, and the others end with it. " if rank else ""
        assert found["impossible"].startswith(f"{said}FileExistsError")
        said = "" if rank else "ParallelError: rank 1 has failed, and the others end with it. "
        kept = "ParallelError: rank 0 has failed, and the others end with it. " if rank else ""
        assert found["no memory"] == f"{kept}MemoryError: planted"
        assert found["other"] == f"{said}OSError: planted"
        assert "needs the whole model" in found["state_dict"]
    for name in FIRST[1:]:
        assert files(tmp_path / name) == files(tmp_path / f"{name} saved")
    saved = tmp_path / f"{FIRST[0]} saved"
    assert (
        len(list(saved.glob("model-*-of-*.safetensors"))) > 2 and not (saved / "model.safetensors").exists()
    )
    plain = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    wanted = tiny_models.build(FIRST[0]).state_dict()
    assert plain.keys() == wanted.keys()
    assert all(torch.equal(plain[name], wanted[name]) for name in wanted)
    assert {path.name for path in tmp_path.iterdir()} == before | {f"{name} saved" for name in FIRST}


def test_layers_that_a_script_has_replaced_are_saved_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    replaced = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    jobs_save.replace(replaced)
    with torch.no_grad():
        wanted = replaced(input_ids=torch.arange(8)[None]).logits
    replaced.save_pretrained(tmp_path / "wanted")
    results = ranks.run(
        2, "parallel.jobs_save:saves_replaced", str(tmp_path / "llama"), str(tmp_path / "saved")
    )
    for found in results:
        assert found["saved"] == "nothing raised"
        assert torch.allclose(torch.tensor(found["logits"]), wanted, atol=1e-5)
        assert "on rank 0 otherwise than on rank 1" in found["one rank"]
        assert "lm_head.weight of this LlamaForCausalLM was replaced by a tensor of" in found["parameter"]
    assert files(tmp_path / "saved") == files(tmp_path / "wanted")
    assert not (tmp_path / "saved never").exists()


@pytest.mark.full
def test_every_family_is_saved_as_it_was(tmp_path: Path) -> None:
    names = tuple(name for name in families.buildable() if 2 in families.world_sizes(name))
    save(tmp_path, names)
    found = ranks.run(2, "parallel.jobs_save:saves", str(tmp_path), names, timeout=3600)[0]
    assert {name: text for name, text in found.items() if name in names and text != "nothing raised"} == {}
    different = [name for name in names[1:] if files(tmp_path / name) != files(tmp_path / f"{name} saved")]
    assert different == []
