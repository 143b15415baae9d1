"""Commands run Python code of a folder only where they are told to, and ask nobody."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from support import tiny_models

from liteboost_adaptor import cli

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).write_text("run")


class {name}Config(LlamaConfig):
    model_type = "{kind}"
"""
MODELING = """
from pathlib import Path
from transformers import LlamaForCausalLM
from .configuration_{kind} import {name}Config

Path({marker!r}).write_text("run")


class {name}ForCausalLM(LlamaForCausalLM):
    config_class = {name}Config
"""
COMMANDS = {
    "quantize": lambda source, target: ["quantize", source, target, "--scheme", "w8a16"],
    "shard": lambda source, target: ["shard", source, target, "--tp", "2"],
    "plan": lambda source, target: ["plan", source, "--tp", "2"],
}


def folder_of(path: Path, kind: str, marker: Path) -> Path:
    """A checkpoint with code that writes a file when it is run."""
    tiny_models.build("llama").save_pretrained(path)
    name = kind.capitalize()
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_{kind}.{name}Config",
            "AutoModelForCausalLM": f"modeling_{kind}.{name}ForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    said = {"marker": str(marker), "name": name, "kind": kind}
    (path / f"configuration_{kind}.py").write_text(CONFIGURATION.format(**said))
    (path / f"modeling_{kind}.py").write_text(MODELING.format(**said))
    return path


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_a_folder_runs_only_when_it_is_trusted(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    source = folder_of(tmp_path / "model", f"planted{command}", marker)
    arguments = COMMANDS[command](str(source), str(tmp_path / "made"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert cli.main(arguments) != 0
    assert not marker.exists() and not (tmp_path / "made").exists()
    assert "--trust-remote-code" in capfd.readouterr().err
    cli.main([*arguments, "--trust-remote-code"])
    assert marker.read_text() == "run"
    error = capfd.readouterr().err
    assert "--trust-remote-code" not in error
    if command == "quantize":
        assert (tmp_path / "made" / "config.json").exists(), error


def test_a_folder_whose_configuration_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model"
    tiny_models.build("llama").save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    for change in (
        {"architectures": 3},
        {"architectures": "x"},
        {"architectures": [None]},
        {"hidden_size": "x"},
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        if "hidden_size" in change:
            assert cli.main(["shard", str(source), str(tmp_path / "made"), "--tp", "2"]) == 1
            assert "cannot be read" in capfd.readouterr().err
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        (source / "model.safetensors.index.json").write_text(text)
        assert cli.main(["quantize", str(source), str(tmp_path / "made")]) == 1
        assert "model.safetensors.index.json cannot be read" in capfd.readouterr().err
