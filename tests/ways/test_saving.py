"""Every way to save a model: the same files from a served model as from one we never saw, read without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file, save_model
from support import processes
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import liteboost_adaptor
from liteboost_adaptor.huggingface import huge_pages

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
CONFIGS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biases": Qwen2Config(**SIZES, tie_word_embeddings=False),
}
IDS = torch.arange(7).view(1, 7)


def _save_state(model: torch.nn.Module, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder)


def _save_file(model: torch.nn.Module, folder: Path) -> None:
    # A tied weight has two names, and safetensors takes one; users drop the other.
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")


WAYS: dict[str, Callable[[Any, Path], object]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "save_pretrained in shards": lambda model, folder: model.save_pretrained(folder, max_shard_size="10KB"),
    "save_model": lambda model, folder: save_model(model, str(folder / "model.safetensors")),
    "save_file": _save_file,
    "torch.save of the state": lambda model, folder: torch.save(model.state_dict(), folder / "state.bin"),
    "torch.save of the model": lambda model, folder: torch.save(model, folder / "model.pt"),
    "Accelerator.save_model": lambda model, folder: Accelerator(cpu=True).save_model(model, str(folder)),
    "Accelerator.save_state": _save_state,
}

#: Run without us: what each kind of file gives, as the sum of the logits' squares, which one weight changes.
READER = """
import json, sys
from pathlib import Path
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file, load_model
from transformers import AutoConfig, AutoModelForCausalLM
config, ids = AutoConfig.from_pretrained(sys.argv[1]), torch.arange(7).view(1, 7)
figures = []
for folder in map(Path, sys.argv[2:]):
    fresh = AutoModelForCausalLM.from_config(config)
    if (folder / "model.pt").exists():
        fresh = torch.load(folder / "model.pt", weights_only=False)
    elif (folder / "state.bin").exists():
        fresh.load_state_dict(torch.load(folder / "state.bin"))
    elif (folder / "config.json").exists():
        fresh = AutoModelForCausalLM.from_pretrained(folder)
    elif "save_file" in folder.name or "save_model" == folder.name:
        load_model(fresh, str(folder / "model.safetensors"), strict=not config.tie_word_embeddings)
    else:
        load_checkpoint_in_model(fresh, str(folder))
        fresh.tie_weights()
    with torch.no_grad():
        figures.append(fresh.eval()(ids).logits.double().square().sum().item())
assert "liteboost_adaptor" not in sys.modules
print(json.dumps(figures))
"""


@pytest.fixture(params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what each way has saved, ``plain`` of a model of transformers and ``served`` of ours."""
    monkeypatch.setattr(huge_pages, "LEAST", 1)
    with liteboost_adaptor.patched(level=1):
        AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path / "origin")
    for kind, settings in (("plain", {"level": 0}), ("served", {"level": 2})):
        with liteboost_adaptor.patched(**settings):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "origin")
            # Behind the first tokens there are a cache and a recorded step.
            model.generate(IDS, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            for name, save in WAYS.items():
                folder = tmp_path / kind / name
                folder.mkdir(parents=True)
                save(model, folder)
        where = {weight.data_ptr() for weight in model.parameters()}
        assert bool(where & set(huge_pages._held)) == (kind == "served" and huge_pages._kernel_has_them())
    return tmp_path


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    state = torch.load(file, weights_only=False)
    return state.state_dict() if isinstance(state, torch.nn.Module) else state


def test_files_are_the_same_and_are_read_without_us(saved: Path) -> None:
    for name in WAYS:
        plain, served = (
            {file.relative_to(saved / kind / name): file for file in (saved / kind / name).rglob("*.*")}
            for kind in ("plain", "served")
        )
        assert plain.keys() == served.keys(), name
        for at, file in plain.items():
            if file.suffix == ".json":
                assert served[at].read_bytes() == file.read_bytes(), (name, at)
            if file.suffix not in (".safetensors", ".bin", ".pt"):
                continue
            # A pickled module of ours names its class, the original one, in more words.
            more = 0.005 if file.suffix == ".pt" else 0.0
            assert served[at].stat().st_size == pytest.approx(file.stat().st_size, rel=more, abs=0), (
                name,
                at,
            )
            before, after = _tensors(file), _tensors(served[at])
            assert list(before) == list(after), (name, at)
            assert all(torch.equal(before[key], after[key]) for key in before), (name, at)
    folders = [str(saved / kind / name) for kind in ("plain", "served") for name in WAYS]
    figures = processes.python_json(READER, str(saved / "origin"), *folders, is_forked=True)
    assert len(figures) == 2 * len(WAYS)
    assert len(set(figures)) == 1, figures
