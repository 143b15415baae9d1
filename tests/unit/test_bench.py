"""The benchmark: what it asks, counts, compares, reports; and one whole run over a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from liteboost_adaptor.bench import memory, models, perplexity, report, runner
from liteboost_adaptor.bench.agreement import BOUNDS, compare
from liteboost_adaptor.bench.limits import GemmLimit, ReadLimit
from liteboost_adaptor.bench.processes import Worker, WorkerError
from liteboost_adaptor.bench.settings import BASELINE, VARIANTS, Settings
from liteboost_adaptor.errors import ConfigError
from liteboost_adaptor.memory import available_bytes

SHAKESPEARE = Path(__file__).parents[2] / "examples" / "models" / "shakespeare-llama"

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    AutoConfig.for_model("qwen3", **TINY).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"dtype": "float64"}, ["--dtype", "bfloat16", "'float64'"]),
        ({"variants": ("hf-sdpa", "level9")}, ["--variants", "level2", "'level9'"]),
        ({"variants": ()}, ["--variants", "none"]),
        ({"prompt": 0}, ["--prompt", "at least 1", "0"]),
        ({"new": 1}, ["--new", "at least 2", "1"]),
        ({"batch": -1}, ["--batch", "-1"]),
        ({"repeats": 0}, ["--repeats"]),
        ({"threads": 0}, ["--threads"]),
        ({"threads": 3, "tp": 2}, ["--tp 2", "--threads 3"]),
        ({"tp": 2, "threads": 2, "variants": ("level2-tp3",)}, ["level2-tp2", "'level2-tp3'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_refuse_what_cannot_be_measured(change: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as fault:
        Settings(**{"arch": "llama-1b", **change})
    assert all(part in str(fault.value) for part in parts)


def test_baseline_is_always_measured_and_order_is_fixed() -> None:
    assert Settings("llama-1b", variants=("level1", "hf-eager")).variants == ("hf-eager", BASELINE, "level1")


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"qwen3-0\.6b, llama-1b, narrow-28 or a folder with a config\.json; found 'gpt9'"
    ):
        models.prepare("gpt9", "float32", tmp_path)


def test_broken_config_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        models.prepare(str(tmp_path), "float32", tmp_path)


def test_all_variants_run_together_where_they_fit() -> None:
    assert memory.plan_groups(VARIANTS, BASELINE, 10**9, 50 * 10**9) == [VARIANTS]


def test_groups_always_include_the_baseline() -> None:
    groups = memory.plan_groups(VARIANTS, BASELINE, 10**9, 3 * (10**9 + memory.OVERHEAD_BYTES))
    assert groups == [("hf-eager", BASELINE, "level0"), (BASELINE, "level1", "level2")]


def test_too_little_memory_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"needs 21\.7 GB of memory; found 12\.0 GB free"):
        memory.plan_groups(VARIANTS, BASELINE, 10**10, 12 * 10**9)


def test_available_memory_is_within_the_machine() -> None:
    total = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 < available_bytes() <= total


def test_cost_of_a_tied_model_by_hand() -> None:
    cost = models.count(AutoConfig.for_model("qwen3", **TINY), torch.bfloat16)
    layer = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48
    norms = 2 * (2 * 32 + 2 * 16) + 32
    head = 101 * 32
    assert cost.linear_flops == 2 * 2 * layer
    assert cost.head_flops == 2 * head
    assert cost.weight_bytes == cost.token_bytes == 2 * (2 * layer + norms + head)
    assert set(cost.gemm_shapes) == {(32, 64), (32, 32), (64, 32), (32, 48), (48, 32), (32, 101)}
    # Three tokens after a prompt of five: two decode steps, over 6 and 7 keys in each of two layers.
    keys = 2 * (6 + 7) / 2
    assert cost.decode_bytes(batch=3, prompt=5, new=3) == cost.token_bytes + 3 * 2 * 32 * 2 * keys
    pairs = 2 * (1 + 2 + 3 + 4 + 5)
    assert cost.prefill_flops(batch=3, prompt=5) == 3 * (5 * 2 * 2 * layer + 4 * 64 * pairs + 2 * head)


def test_a_decode_step_reads_no_untied_embedding_table() -> None:
    cost = models.count(
        AutoConfig.for_model("llama", **{**TINY, "tie_word_embeddings": False}), torch.float32
    )
    assert cost.weight_bytes - cost.token_bytes == 101 * 32 * 4


def test_a_sliding_window_bounds_the_keys() -> None:
    config = AutoConfig.for_model("mistral", **TINY, sliding_window=4)
    cost = models.count(config, torch.float32)
    assert cost.windows == (4, 4)
    assert cost.decode_bytes(batch=1, prompt=9, new=2) == cost.token_bytes + 2 * 32 * 4 * (4 + 4)
    config = AutoConfig.for_model(
        "gemma2", **TINY, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    assert models.count(config, torch.float32).windows == (4, None)


def test_only_chosen_experts_are_counted() -> None:
    config = AutoConfig.for_model("mixtral", **TINY, num_local_experts=8, num_experts_per_tok=2)
    cost = models.count(config, torch.float32)
    experts = 2 * 8 * 3 * 32 * 48 * 4
    assert cost.token_bytes == cost.weight_bytes - experts * 6 / 8


@pytest.mark.parametrize(("arch", "parameters"), [("qwen3-0.6b", 596_049_920), ("llama-1b", 1_235_814_400)])
def test_the_published_sizes(arch: str, parameters: int) -> None:
    model_type, values = models.ARCHITECTURES[arch]
    cost = models.count(AutoConfig.for_model(model_type, **values), torch.bfloat16)
    assert cost.weight_bytes == cost.token_bytes == 2 * parameters


def test_random_weights_are_written_once_and_give_a_text(tiny_folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    first = models.prepare(str(tiny_folder), "bfloat16", work)
    written = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert models.prepare(str(tiny_folder), "bfloat16", work) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == written
    assert models.prepare(str(tiny_folder), "bfloat16", work, seed=1).folder != first.folder
    model = AutoModelForCausalLM.from_pretrained(first.folder, dtype=torch.float32)
    prompts = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logits = model(prompts).logits
    assert torch.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    # Neither the same token for ever nor one that ignores the prompt.
    chosen = logits.argmax(-1)
    assert chosen.unique().numel() > 10
    assert (chosen == prompts).float().mean() < 0.5


def test_weights_of_a_folder_are_used_as_they_are(tmp_path: Path) -> None:
    model = models.prepare(str(SHAKESPEARE), "float32", tmp_path)
    assert model.folder == SHAKESPEARE.resolve()
    assert not list(tmp_path.iterdir())


def _logits(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "prefill": torch.randn(2, 5, 1009, generator=generator),
        "decode": torch.randn(2, 3, 1009, generator=generator),
    }


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rounding_agrees_and_another_calculation_does_not(dtype: str) -> None:
    reference = _logits()
    close = {name: part * (1 + BOUNDS[dtype] / 4) for name, part in reference.items()}
    assert compare(reference, close, dtype).agrees
    assert not compare(reference, _logits(1), dtype).agrees


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_nan_and_a_few_wrong_rows_do_not_agree(phase: str) -> None:
    reference = _logits()
    for value in (float("nan"), 3.0):
        wrong = {name: part.clone() for name, part in reference.items()}
        wrong[phase][0, 0, -1] = value
        assert not compare(reference, wrong, "bfloat16").agrees
        assert not compare(reference, wrong, "float32").agrees


def test_another_token_in_float32_does_not_agree() -> None:
    reference = {name: torch.zeros_like(part) for name, part in _logits().items()}
    for part in reference.values():
        part[..., 0], part[..., 1] = 1.0, 1.0 - 1e-6
    other = {name: part.clone() for name, part in reference.items()}
    other["decode"][..., 1] = 1.0 + 1e-6
    agreement = compare(reference, other, "float32")
    assert agreement.relative_max < agreement.bound
    assert agreement.equal_tokens == 0
    assert not agreement.agrees


class _FakeWorker:
    """Answers ``check`` with given logits."""

    def __init__(self, name: str, logits: dict[str, torch.Tensor]) -> None:
        self.name, self.logits, self.forced = name, logits, []

    def ask(self, do: str, path: str, forced: Any) -> dict[str, Any]:
        self.forced.append(forced)
        torch.save(self.logits, path)
        return {"tokens": self.logits["decode"].argmax(-1).tolist()}


def _session(tmp_path: Path) -> runner.Session:
    model = models.BenchModel("tiny", tmp_path, 101, models.Cost(0, 0, 0, 0, (), (), 0, 0, 2))
    settings = Settings("tiny", repeats=1, prompt=3)
    return runner.Session(settings, model, tmp_path, lambda doing, done, total: None, [VARIANTS])


def test_every_variant_goes_along_the_tokens_of_the_baseline(tmp_path: Path) -> None:
    session = _session(tmp_path)
    workers = {name: _FakeWorker(name, _logits()) for name in ("hf-eager", BASELINE)}
    session._compare(workers)
    tokens = _logits()["decode"].argmax(-1).tolist()
    assert workers[BASELINE].forced == [None, tokens]
    assert workers["hf-eager"].forced == [tokens]
    assert set(session.agreements) == {"hf-eager", BASELINE}


def test_a_variant_that_disagrees_ends_the_run(tmp_path: Path) -> None:
    workers = {BASELINE: _FakeWorker(BASELINE, _logits()), "level1": _FakeWorker("level1", _logits(1))}
    with pytest.raises(
        runner.DisagreementError, match=r"level1 does not agree with hf-sdpa on tiny in bfloat16"
    ):
        _session(tmp_path)._compare(workers)


def test_logits_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    logits = {name: part * float("nan") for name, part in _logits().items()}
    with pytest.raises(runner.DisagreementError, match="not finite"):
        _session(tmp_path)._compare({BASELINE: _FakeWorker(BASELINE, logits)})


def _measurements(read_gb_s: float = 10.0) -> report.Measurements:
    cost = models.Cost(
        weight_bytes=10**9,
        token_bytes=10**9,
        linear_flops=2 * 10**9,
        head_flops=0,
        gemm_shapes=(),
        windows=(),
        attention_width=0,
        kv_width=0,
        itemsize=2,
    )
    rounds = []
    # The machine slows down in the second round, for both.
    for index, slow in enumerate((1.0, 5.0, 1.2)):
        # Its bandwidth in the third round has not come back altogether.
        now = read_gb_s / (2.0 if index == 2 else slow)
        rounds.append(report.Round(BASELINE, index, 2.0 * slow, 4.0 * slow, now, 1000.0 / slow))
        rounds.append(report.Round("level1", index, 1.0 * slow, 1.0 * slow, now, 1000.0 / slow))
    return report.Measurements(
        settings=Settings("tiny", prompt=100, new=5, batch=2, variants=("level1",), repeats=3, threads=2),
        model=models.BenchModel("tiny", Path("tiny"), 101, cost),
        groups=[(BASELINE, "level1")],
        agreements={name: compare(_logits(), _logits(), "bfloat16") for name in (BASELINE, "level1")},
        rounds=rounds,
        read_gb_s=read_gb_s,
        gemm_gflops=1000.0,
        facts={
            BASELINE: {"isa": "avx2", "torch": "2", "transformers": "5"},
            "level1": {"isa": "avx512_bf16", "torch": "2", "transformers": "5"},
        },
        peak_rss_mb={BASELINE: 100.0, "level1": 120.0},
        statuses={"level1": {"rules": [{"id": "norm.rms", "calls": 7}]}},
    )


def test_figures_are_medians_and_round_by_round_ratios() -> None:
    summary = report.summarise(_measurements())
    assert set(summary["machine"]) == {"cpu", "threads", "isa", "read_gb_s", "gemm_gflops"}
    assert summary["machine"]["isa"] == "avx512_bf16"
    figures = summary["variants"]["level1"]
    # Prefill: 2 sequences of 100 tokens in 1.2 s. Decode: 4 steps of 2 tokens in 1.2 s.
    assert figures == pytest.approx(
        {
            "prefill_tok_s": 200 / 1.2,
            "decode_tok_s": 8 / 1.2,
            "prefill_ratio": 2.0,
            "decode_ratio": 4.0,
            "decode_bandwidth_fraction": 1.0 / 0.3 / 10,
            "decode_bandwidth_beside": 4.0 / 10,  # 4/10 in the first two, 4/6 in the third
            "prefill_peak_fraction": 2 * 100 * 2 / 1.2 / 1000,
            "prefill_peak_beside": 2 * 100 * 2 / 1.0 / 1000,
            "peak_rss_mb": 120.0,
        }
    )
    assert summary["variants"][BASELINE]["decode_ratio"] == 1.0
    assert summary["failures"] == summary["notes"] == []
    json.dumps(summary)


def test_variants_of_different_groups_are_compared_over_the_baseline_of_each() -> None:
    whole = _measurements()
    ours, rounds = "level2-tp2", list(whole.rounds)
    for one in whole.rounds:  # a second group, on a machine that is slower by now
        name = BASELINE if one.variant == BASELINE else ours
        faster = 1.0 if name == BASELINE else 0.5
        seconds = (6.0 * faster * one.prefill_s, 6.0 * faster * one.decode_s)
        rounds.append(report.Round(name, one.index + 3, *seconds, one.read_gb_s, one.gemm_gflops))
    settings = replace(whole.settings, tp=2, variants=("level1", "level2-tp2"))
    measured = replace(whole, settings=settings, rounds=rounds)
    assert report._ratio(measured, ours, lambda one: one.decode_s) == pytest.approx(8.0)
    assert report._ratio(measured, ours, lambda one: one.decode_s, "level1") == pytest.approx(2.0)
    assert report._ratio(measured, ours, lambda one: one.prefill_s, "level1") == pytest.approx(2.0)


def test_faster_than_the_machine_is_a_failure() -> None:
    summary = report.summarise(_measurements(read_gb_s=3.0))
    (failure,) = summary["failures"]
    assert "level1: decode_bandwidth_fraction is 1.11, more than 1.03" in failure
    assert report.summarise(_measurements(read_gb_s=3.25))["failures"] == []


def test_bytes_of_a_quantized_variant_are_those_counted() -> None:
    measured = _measurements()
    measured.facts["level1"]["token_bytes"] = {"MLP": 2 * 10**8, "head": 5 * 10**7}
    summary = report.summarise(measured)
    assert summary["variants"]["level1"]["decode_bandwidth_fraction"] == pytest.approx(0.25 / 0.3 / 10)
    assert summary["variants"][BASELINE]["decode_bandwidth_fraction"] == pytest.approx(1.0 / 1.2 / 10)
    assert summary["notes"] == ["level1 reads 250.0 MB of weights a token: MLP 200.0, head 50.0."]


def test_a_level_that_served_nothing_is_noted() -> None:
    measured = _measurements()
    measured.statuses["level1"]["rules"][0]["calls"] = 0
    assert "level1: no rule of ours served a call" in report.summarise(measured)["notes"][0]


def test_plot(tmp_path: Path) -> None:
    report.plot(report.summarise(_measurements()), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_limits_keep_the_best() -> None:
    read, gemm = ReadLimit(1 << 20), GemmLimit(3, [(8, 16)], torch.bfloat16, size=32)
    for limit in (read, gemm):
        assert limit.measure() > 0
        first = limit.best
        limit.measure()
        assert 0 < first <= limit.best


def test_a_worker_that_fails_or_dies_is_reported_and_ended(tmp_path: Path) -> None:
    worker = Worker("hf-sdpa", 1, tmp_path)
    with pytest.raises(WorkerError, match="'hf-sdpa': KeyError"):
        worker.ask("load", options={})
    worker.process.kill()
    with pytest.raises(WorkerError, match="ended with status -9 before it answered"):
        worker.ask("round")
    worker.close()
    assert worker.process.returncode == -9


@pytest.mark.full
def test_a_run_with_quantized_weights(tiny_folder: Path, tmp_path: Path) -> None:
    settings = Settings(
        str(tiny_folder),
        prompt=7,
        new=4,
        variants=("w8a16", "w4a16"),
        repeats=1,
        threads=1,
        read_bytes=1 << 22,
        gemm_size=64,
    )
    measured = runner.run(settings, tmp_path)
    assert settings.variants == (BASELINE, "w8a16", "w4a16")
    assert all(agreement.agrees for agreement in measured.agreements.values())
    eight, four = (sum(measured.facts[name]["token_bytes"].values()) for name in ("w8a16", "w4a16"))
    assert four < eight < measured.model.cost.token_bytes
    assert any(rule["id"] == "quantization" for rule in measured.statuses["w4a16"]["rules"])


def test_a_whole_run(tiny_folder: Path, tmp_path: Path) -> None:
    settings = Settings(
        str(tiny_folder),
        dtype="float32",
        prompt=7,
        new=4,
        batch=2,
        variants=("hf-eager", "hf-sdpa", "level1"),
        repeats=2,
        threads=1,
        read_bytes=1 << 22,
        gemm_size=64,
    )
    steps: list[tuple[int, int]] = []
    measured = runner.run(settings, tmp_path, lambda doing, done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(len(steps)))
    assert steps[-1] == (len(steps) - 1, len(steps))
    assert all(agreement.agrees for agreement in measured.agreements.values())
    assert {name: facts["adapted"] for name, facts in measured.facts.items() if name != "limits"} == {
        "hf-eager": False,
        "hf-sdpa": False,
        "level1": True,
    }
    assert [(one.variant, one.index) for one in measured.rounds] == [
        *((name, 0) for name in ("hf-eager", "hf-sdpa", "level1")),
        *((name, 1) for name in ("hf-sdpa", "level1", "hf-eager")),
    ]
    (status,) = measured.statuses.values()
    assert status["level"] == 1
    assert any(rule["calls"] for rule in status["rules"])
    summary = report.summarise(measured)
    assert all(value > 0 for figures in summary["variants"].values() for value in figures.values())


@pytest.mark.full
def test_a_run_over_two_processes(tiny_folder: Path, tmp_path: Path) -> None:
    settings = Settings(
        str(tiny_folder),
        dtype="float32",
        prompt=7,
        new=4,
        variants=("level2", "hf-tp2", "level2-tp2"),
        repeats=2,
        threads=2,
        tp=2,
        read_bytes=1 << 22,
        gemm_size=64,
    )
    summary = report.summarise(runner.run(settings, tmp_path))
    assert list(summary["variants"]) == ["hf-sdpa", "level2", "hf-tp2", "level2-tp2"]
    assert all(agreement["equal_tokens"] == 4 for agreement in summary["agreement"].values())
    assert set(summary["divided"]) == {"level2", "hf-tp2"}
    assert all(value > 0 for ratios in summary["divided"].values() for value in ratios.values())


def test_perplexity_is_the_mean_loss_of_the_model() -> None:
    text = SHAKESPEARE / "heldout.txt"
    blocks = perplexity.tokenize(SHAKESPEARE, text)
    assert blocks.shape == (153, 256)
    model = AutoModelForCausalLM.from_pretrained(SHAKESPEARE, dtype=torch.float32).eval()
    with torch.inference_mode():
        losses = [model(block[None], labels=block[None]).loss.item() for block in blocks[:3]]
    expected = sum(losses) / 3
    assert perplexity.evaluate(model, blocks[:3], batch=2).loss == pytest.approx(expected, rel=1e-5)
    read = perplexity.perplexity(SHAKESPEARE, text, max_blocks=3)
    assert read.blocks == 3
    assert read.loss == pytest.approx(expected, rel=1e-5)
    assert read.perplexity == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)


def test_a_text_shorter_than_a_block_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Exeunt.")
    with pytest.raises(ConfigError, match="at least one block of 256 tokens"):
        perplexity.tokenize(SHAKESPEARE, tmp_path / "short.txt")
