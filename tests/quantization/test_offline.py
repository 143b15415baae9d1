"""`python -m liteboost_adaptor quantize`: the same tensors as by loading and saving, and restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from liteboost_adaptor import cli
from liteboost_adaptor.errors import QuantizationError
from liteboost_adaptor.quantization import LiteBoostConfig, offline
from liteboost_adaptor.quantization.calibration import calibrate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "models" / "shakespeare-llama"


def load(folder: Path, **arguments) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    load(FOLDER).save_pretrained(folder, max_shard_size="2MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("form", [("w8a16",), ("w4a16",), ("w4a16", 64, False, 16)], ids=str)
def test_it_is_what_loading_and_saving_writes(form: tuple, sharded: Path, tmp_path: Path) -> None:
    config = LiteBoostConfig(*form)
    done = offline.quantize_folder(sharded, tmp_path / "new", config)
    loaded = load(sharded, quantization_config=LiteBoostConfig(*form))
    again = load(tmp_path / "new")
    expected, found = loaded.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    ids = torch.arange(5, 25)[None]
    assert torch.equal(
        again.generate(ids, max_new_tokens=8, do_sample=False),
        loaded.generate(ids, max_new_tokens=8, do_sample=False),
    )
    assert [each.error for each in done.errors] == sorted((each.error for each in done.errors), reverse=True)
    assert len(done.errors) == 28 + (loaded.config.quantization_config.head == 8)
    assert done.bytes_after < done.bytes_before and not list((tmp_path / "new").glob("*.part"))


def test_it_goes_on_where_it_was_interrupted(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, target = LiteBoostConfig("w4a16"), tmp_path / "new"
    offline.quantize_folder(sharded, tmp_path / "whole", config)
    rounded: list[str] = []
    real = calibrate.quantize

    def quantize(weight: torch.Tensor, scheme: object, name: str):
        if len(rounded) == 20:
            raise KeyboardInterrupt
        rounded.append(name)
        return real(weight, scheme, name)

    monkeypatch.setattr(calibrate, "quantize", quantize)
    with pytest.raises(KeyboardInterrupt):
        offline.quantize_folder(sharded, target, config)
    first = list(rounded)
    assert not (target / "config.json").exists()
    written = sorted(target.glob("*.safetensors"))
    assert written
    written[0].write_bytes(b"changed since")
    rounded.clear()
    monkeypatch.setattr(calibrate, "quantize", lambda w, s, n: rounded.append(n) or real(w, s, n))
    offline.quantize_folder(sharded, target, config)
    assert set(first) - set(rounded)  # those of files that were whole
    with safe_open(written[0], framework="pt") as file:  # and not of one that was changed
        assert {name for name in file.keys() if name in first} <= set(rounded)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (target / path.name).read_bytes(), path.name


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new"
    assert cli.main(["quantize", str(FOLDER), str(target), "--group-size", "128", "--keep", "down_proj"]) == 0
    text = capfd.readouterr().out
    assert "25 layers quantized" in text and "relative error" in text and "█" in text
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["group_size"] == 128 and config["modules_to_not_convert"] == ["down_proj"]
    assert load(target).model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert (target / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()
    assert cli.main(["quantize", str(target), str(tmp_path / "twice")]) == 1
    assert "is quantized already" in capfd.readouterr().err
    assert cli.main(["quantize", str(FOLDER), str(target), "--scheme", "w8a16"]) == 1
    assert "was begun with another checkpoint or configuration" in capfd.readouterr().err
    assert cli.main(["quantize", str(FOLDER), str(tmp_path)]) == 1
    assert "is not empty" in capfd.readouterr().err
    assert cli.main(["quantize", str(tmp_path / "none"), str(target)]) == 1
    assert "SRC must be a folder" in capfd.readouterr().err


def test_the_command_in_a_process_that_has_loaded_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "liteboost_adaptor", "quantize", str(FOLDER), str(tmp_path / "new")]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert load(tmp_path / "new").model.layers[0].mlp.down_proj.weight.dtype == torch.uint8


def test_names_that_are_not_the_models(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(FOLDER / "model.safetensors")
    renamed = {name.replace("up_proj", "w3"): tensor for name, tensor in tensors.items()}
    source = tmp_path / "old"
    source.mkdir()
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    with pytest.raises(QuantizationError, match=r"has no tensor .*up_proj.weight: its names are not those"):
        offline.quantize_folder(source, tmp_path / "new", LiteBoostConfig("w4a16"))
    assert not (tmp_path / "new").exists()
