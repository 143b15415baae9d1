"""``bench --serve``: requests answered all at once, and stand-ins for other engines. No time is asserted."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from liteboost_adaptor import cli
from liteboost_adaptor.bench import models
from liteboost_adaptor.bench.agreement import Agreement
from liteboost_adaptor.bench.processes import WorkerError
from liteboost_adaptor.bench.report import Measurements
from liteboost_adaptor.bench.settings import BASELINE, Settings
from liteboost_adaptor.bench.throughput import report, runner
from liteboost_adaptor.bench.throughput.peers import Llama
from liteboost_adaptor.bench.throughput.runner import Batch
from liteboost_adaptor.bench.throughput.vllm_worker import Engine

LLAMA = """#!{python}
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("some log")
if options["-npl"] != "5":
    pl = int(options["-npl"])
    print(json.dumps({{"n_kv": 0, "pl": pl, "t_pp": 0.5 * pl, "t_tg": 1.5, "argv": sys.argv}}))
"""
VLLM = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens
class Answer:
    def __init__(self, count):
        self.outputs = [type("Text", (), {"token_ids": [1] * count})]
class LLM:
    def __init__(self, model, **options):
        config = type("Config", (), {"get_vocab_size": lambda self: 101})()
        self.llm_engine = type("Engine", (), {"model_config": config})
    def generate(self, prompts, sampling, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) == 7 for prompt in prompts)
        print("a library prints")
        return [Answer(sampling.max_tokens) for _ in prompts]
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
    ).save_pretrained(folder)
    return folder


def test_ours_and_others_are_measured(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = functools.partial(Settings, read_bytes=1 << 22, gemm_size=64)
    monkeypatch.setattr(sys.modules["liteboost_adaptor.cli.bench"], "Settings", small)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "vllm.py").write_text(VLLM)
    llama = executable(tmp_path / "llama-batched-bench", LLAMA.format(python=sys.executable))
    start = f'#!/bin/sh\nPYTHONPATH={tmp_path / "modules"} exec {sys.executable} "$@"\n'
    vllm = executable(tmp_path / "python-with-vllm", start)
    options = ["--serve", "3,1", "--arch", str(tiny_folder), "--prompt", "7", "--new", "4", "--repeats", "1"]
    options += ["--threads", "1", "--variants", "level2,w8a8", "--plot", str(tmp_path / "serve.png")]
    options += ["--peer", f"vLLM={vllm}", "--peer", f"llama.cpp={llama} -m tiny.gguf"]
    assert cli.main(["bench", *options, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["requests"]) == ["1", "3"]
    for requests, row in found["requests"].items():
        assert list(row) == [BASELINE, "level2", "w8a8", "llama.cpp", "vLLM"]
        assert all(figures["tokens_s"] > 0 for figures in row.values())
        for name in (BASELINE, "level2", "w8a8"):
            assert row[name]["first_p50_s"] > 0 < row[name]["next_p50_s"] <= row[name]["next_p99_s"]
        assert row["llama.cpp"]["tokens_s"] == int(requests) * 4 / (0.5 * int(requests) + 1.5)
        assert row["vLLM"]["first_p50_s"] is None
        # The limit is of products in the dtype, of which w8a8 has few.
        assert row["w8a8"]["limit_fraction"] is None and 0 < row["level2"]["limit_fraction"] < 1
    assert all(megabytes > 5 for megabytes in found["peak_rss_mb"].values())
    assert all(found["agreement"][name]["equal_tokens"] for name in ("level2", "w8a8"))
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def measured() -> Measurements:
    cost = models.Cost(
        weight_bytes=10**9,
        token_bytes=10**9,
        linear_flops=10**9,
        head_flops=10**9,
        gemm_shapes=(),
        windows=(),
        attention_width=0,
        kv_width=0,
        itemsize=2,
    )
    return Measurements(
        settings=Settings("tiny", prompt=100, new=5, variants=("level2",), repeats=2, threads=2),
        model=models.BenchModel("tiny", Path("tiny"), 101, cost),
        groups=[],
        agreements={"level2": Agreement(0.0, 0.0, 1, 1, 1e-5)},
        rounds=[],
        read_gb_s=10.0,
        gemm_gflops=1000.0,
        facts={BASELINE: {"isa": "avx2"}, "level2": {"isa": "avx2"}},
        peak_rss_mb={BASELINE: 1.0, "level2": 1.0},
        statuses={},
    )


def test_figures_are_medians_and_ratios_of_rounds_side_by_side() -> None:
    batches = []
    for number, slow in enumerate((1.0, 4.0)):  # the machine is slower in the second round
        limits = {"read_gb_s": 10.0 / slow, "gemm_gflops": 1000.0 / slow}
        stamps = [[slow * at for at in (1.0, 1.5, 2.0, 3.0)]] * 2
        batches.append(Batch(BASELINE, 2, number, 8.0 * slow, (), **limits))
        batches.append(Batch("level2", 2, number, 2.0 * slow, stamps, **limits))
    found = report.summarise(measured(), batches)["requests"]["2"]
    assert found[BASELINE]["first_p50_s"] is None
    ours = found["level2"]
    assert ours["times"] == pytest.approx(4.0)
    assert ours["tokens_s"] == pytest.approx((2 * 5 / 2 + 2 * 5 / 8) / 2)
    assert (ours["first_p50_s"], ours["next_p50_s"], ours["next_p99_s"]) == pytest.approx((2.5, 1.25, 2.5))
    # 2 prompts of 100 tokens and a row of logits; 4 steps of 2 tokens, which read 10^9 bytes in 0.1 s.
    flops = 2 * (100 + 1) * 1e9 + 4 * 2 * 2e9
    assert ours["peak_fraction"] == pytest.approx(flops / 2.0 / 1e12)
    assert ours["limit_fraction"] == pytest.approx((2 * 101e9 / 1e12 + 4 * 0.1) / 2.0)


def test_engines_that_do_not_fit_in_memory_are_not_started(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "available_bytes", lambda: (2 << 30) + 2 * (1 << 30))  # for two of three
    assert cli.main(["bench", "--serve", "1", "--arch", str(tiny_folder), "--variants", "level1,level2"]) == 1
    assert "do not fit in memory at once. Choose fewer --variants" in " ".join(
        capsys.readouterr().err.split()
    )


def test_llama_without_figures_is_an_error(tmp_path: Path) -> None:
    program = executable(tmp_path / "llama", LLAMA.format(python=sys.executable))
    llama = Llama([str(program), "-m", "tiny.gguf"], Settings("tiny", prompt=7, new=4), 5)
    assert llama.ask("batch", requests=2) == {"seconds": 2.5}
    with pytest.raises(WorkerError, match=r"(?s)gave no figures and ended with 0.*some log"):
        llama.ask("batch", requests=5)
    assert llama.ask("finish")["peak_rss_mb"] > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--serve", "0"], "--serve takes numbers of requests by commas"),
        (["--serve", "1,x"], "found '1,x'"),
        (
            ["--serve", "1", "--peer", "llama=sh"],
            "--peer takes llama.cpp or vLLM, = and a command; found 'llama=sh'",
        ),
        (["--serve", "1", "--peer", "vLLM="], "found 'vLLM='"),
        (["--serve", "1", "--peer", "vLLM=no-such"], "there is no program no-such"),
        (["--serve", "1", "--batch", "2"], "its batch is --serve itself"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *options]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_text_of_another_length_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm: dict[str, Any] = {}
    exec(compile(VLLM.replace("[1] * count", "[1]"), "vllm", "exec"), vllm)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(**vllm))
    options = {"model": "m", "dtype": "bfloat16", "prompt": 7, "new": 4, "most_requests": 2}
    engine = Engine(options)
    with pytest.raises(RuntimeError, match="asked for 2 texts of 4 tokens; made 2"):
        engine.batch(2)
