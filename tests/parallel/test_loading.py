"""A model is sharded as it is loaded: each rank reads its part of the files, and no more."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import ranks
from support import families, stored_weights, tiny_models

pytestmark = pytest.mark.usefixtures("native_only")

#: On 2 ranks in the first tier: experts that are put together (also with a bias), fused layers, ties,
#: latent attention, transposed weights, norms over all heads.
FIRST = ("llama", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "gemma3_text", "gpt2", "olmo2", "sarvam_moe")


def save(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        tiny_models.build(name).save_pretrained(folder / name)


def check(results: list[dict[str, dict]], names: tuple[str, ...], held: float, read: float) -> None:
    for found in results:
        assert set(found) == set(names)
        wrong = {
            name: each
            for name, each in found.items()
            if "fault" in each
            or not (each["sharded"] and each["same"])
            or not each["distance"] <= 1e-5
            or not each["read"] <= read
        }
        assert not wrong
    assert results[0]["llama"]["held"] < held


def test_families_are_read_in_parts(tmp_path: Path) -> None:
    save(tmp_path, FIRST)
    results = ranks.run(2, "parallel.jobs_load:of_families", str(tmp_path), FIRST)
    check(results, FIRST, held=0.51, read=1.1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_experts_that_become_floating_point_while_they_are_read(tmp_path: Path, size: int) -> None:
    stored_weights.write_mxfp4(tmp_path)
    job = ("parallel.jobs_load:logits", str(tmp_path))
    (alone,) = ranks.run(1, *job, WORLD_SIZE="1", LITEBOOST_TP="1")
    expected = torch.tensor(alone["logits"])
    for found in ranks.run(size, *job):
        assert found["sharded"] and found["experts"] < (1 / size + 0.1) * alone["experts"]
        assert (torch.tensor(found["logits"]) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_every_family_is_read_in_parts(tmp_path: Path, size: int) -> None:
    names = tuple(name for name in families.buildable() if size in families.world_sizes(name))
    save(tmp_path, names)
    results = ranks.run(size, "parallel.jobs_load:of_families", str(tmp_path), names, timeout=3600)
    # Headers of files are a large part of tiny models, and of some layouts whole tensors are read.
    check(results, names, held=0.28 if size == 4 else 0.51, read=5)


def _llamas(folder: Path) -> None:
    """Llama as ever, in several files, pickled, without a tensor, and with a file cut short for rank 1."""
    model = tiny_models.build("llama")
    model.save_pretrained(folder / "llama")
    model.save_pretrained(folder / "llama in parts", max_shard_size="50KB")
    assert len(list((folder / "llama in parts").glob("*.safetensors"))) > 2
    shutil.copytree(folder / "llama", folder / "llama pickled")
    (folder / "llama pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "llama pickled" / "pytorch_model.bin")
    state = {name: value for name, value in model.state_dict().items() if "layers.0.mlp.up_proj" not in name}
    model.save_pretrained(folder / "llama incomplete", state_dict=state)
    shutil.copytree(folder / "llama", folder / "llama short on 0")
    shutil.copytree(folder / "llama", folder / "llama short on 1")
    file = folder / "llama short on 1" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def test_ways_to_load(tmp_path: Path) -> None:
    _llamas(tmp_path)
    results = ranks.run(2, "parallel.jobs_load:ways", str(tmp_path), LITEBOOST_TP="2")
    for rank, found in enumerate(results):
        assert max(found["near"].values()) <= 1e-5, found["near"]
        assert found["bf16"] < 0.05
        assert "cannot be trained" in found["train"] and "LITEBOOST_TP=1" in found["train"]
        assert found["eval"] and found["pickled"] and found["loss"]
        assert "take no adapters" in found["adapters"]
        assert "its 256 rows of the vocabulary: they cannot become 300" in found["resized"]
        assert found["same size"] and found["inner resized"] == found["resized"]
        assert "Quantize it as it is loaded (LITEBOOST_QUANT" in found["quantized"]
        assert "LITEBOOST_TP=1 to dequantize it" in found["dequantized"]
        assert "max_new_tokens=2 and 3" in found["settings"] and "LITEBOOST_TP=1" in found["settings"]
        assert "has shape [256, 64]" in found["mismatch"] and "[64, 64]" in found["mismatch"]
        assert "has no model.layers.0.mlp.up_proj.weight" in found["missing"]
        assert "cut short" in found["short"] and "short on 1" in found["short"]
        assert found["short"].startswith("CheckpointError" if rank else "ParallelError: rank 1 has failed")
        whole = found["whole"]
        assert not whole["tp 1 sharded"] and not whole["level 1 sharded"] and whole["again sharded"]
        assert "LITEBOOST_TP=3, and 2 processes have been started" in whole["tp 3"]
        assert not whole["accelerator sharded"] and whole["accelerator noted"]
        assert len(whole["accelerator"]) == (1 if rank == 0 else 0)


def with_agent(size: int, job: str, *arguments: object, each: list[dict[str, str]]) -> list[tuple]:
    """Start ranks as ``torchrun`` does: with a store that outlives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = ranks.finish(ranks.start(size, job, *arguments, each=[{**agent, **own} for own in each]))
    del store
    return done


def test_ranks_of_different_levels_are_told_so_at_start(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    done = with_agent(
        2, "parallel.jobs_load:level", str(tmp_path / "llama"), each=[{}, {"LITEBOOST_LEVEL": "1"}]
    )
    # A rank that divides nothing goes on where it came first; the launcher ends it with the other.
    text = ranks.result(done[0][1])
    assert "different settings (rank 0: default; rank 1: level=1)" in text


def test_ranks_of_different_settings_are_told_so_by_any_launcher(tmp_path: Path) -> None:
    save(tmp_path, ("llama",))
    each = [{}, {"LITEBOOST_DISABLE": "rope.*"}]
    for code, text in ranks.finish(
        ranks.start(2, "parallel.jobs_load:level", str(tmp_path / "llama"), each=each)
    ):
        assert code == 0
        assert "different settings (rank 0: default; rank 1: disable=('rope.*',))" in ranks.result(text)


@pytest.mark.full
def test_an_unmodified_script_under_torchrun(tmp_path: Path) -> None:
    import subprocess
    import sys

    from support import processes

    save(tmp_path, ("llama",))
    script = tmp_path / "generate.py"
    script.write_text(
        "import liteboost_adaptor, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.arange(5, 17)[None]\n"
        "text = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()\n"
        "held = sum(p.numel() for p in model.parameters())\n"
        "sys.stdout.write(f'TEXT {text}\\nHELD {held}\\n')\n"
    )
    texts = {}
    for size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [*command, str(script), str(tmp_path / "llama")],
            env=processes.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = done.stdout.splitlines()
        texts[size] = {line for line in lines if line.startswith("TEXT")}
        assert len([line for line in lines if line.startswith("TEXT")]) == size
        texts[f"held {size}"] = max(int(line.split()[1]) for line in lines if line.startswith("HELD"))
    assert texts[1] == texts[2] and len(texts[1]) == 1
    assert texts["held 2"] < 0.51 * texts["held 1"]
