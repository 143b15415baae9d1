"""``bench --device npu --modelled``: variants generate on the simulator, and their launches are counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.bench import modelled, modelled_worker
from liteboost_adaptor.bench.cards import CARDS
from liteboost_adaptor.bench.settings import BASELINE

pytestmark = pytest.mark.usefixtures("undone")
ASKED = ["bench", "--device", "npu", "--modelled", "--prompt", "5", "--new", "4", "--threads", "1"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    AutoConfig.for_model("qwen3", **sizes, **heads).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Variants run in this process, which is on the simulator already, each as its environment says."""

    def run(command: list[str], env: dict[str, str], **_: object) -> CompletedProcess[str]:
        python, module, simulator, verb, program, options = command
        assert (python, module, simulator, verb) == (sys.executable, "-m", "cann_sim", "run")
        assert Path(program) == Path(modelled_worker.__file__) and env["HF_HUB_OFFLINE"] == "1"
        assert (Path(env["PYTHONPATH"].split(":")[0]) / "cann_sim" / "__main__.py").is_file()
        liteboost_adaptor.undo()
        if "LITEBOOST_LEVEL" in env:
            liteboost_adaptor.apply(level=int(env["LITEBOOST_LEVEL"]))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [program, options])
            patch.setattr(sys, "path", [*sys.path])
            modelled_worker.main()
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(modelled.subprocess, "run", run)
    threads = torch.get_num_threads()
    torch.set_deterministic_debug_mode("default")  # which launches something for every new tensor
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("here")
def test_a_step_of_ours_launches_less(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ASKED, "--arch", str(model), "--variants", "level2", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    plain, ours = json.loads(out)["modelled"]
    assert (plain["variant"], ours["variant"]) == (BASELINE, "level2")
    assert 0 < ours["launches"] < plain["launches"] / 2
    for each in (plain, ours):
        assert each["modelled"] and each["card"] in CARDS and each["must_move"] == plain["must_move"]
        assert each["bytes"] > each["must_move"] / 2 and min(each["time"].values()) > 0
    assert BASELINE in err and "level2" in err


def test_a_variant_that_fails_is_named_with_the_end_of_its_words(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "\n".join(f"line {at}" for at in range(30))
    monkeypatch.setattr(
        modelled.subprocess, "run", lambda command, **_: CompletedProcess(command, 7, "", words)
    )
    assert cli.main([*ASKED, "--arch", str(model), "--variants", "level2"]) == 1
    said = capsys.readouterr().err
    assert f"{BASELINE} failed on the simulator with status 7:" in said
    assert "line 10" in said and "line 29" in said and "line 9\n" not in said
