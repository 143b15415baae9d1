"""``python -m liteboost_adaptor``: the commands, what they print, and how they end."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import liteboost_adaptor
from liteboost_adaptor import cli
from liteboost_adaptor.bench import report, runner
from liteboost_adaptor.cli import tables
from liteboost_adaptor.cli.status import run_script
from liteboost_adaptor.engine import catalogue
from liteboost_adaptor.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate.py"

STATUS: dict[str, Any] = {
    "version": "1.2.3",
    "level": 1,
    "native": {"backend": "native", "isa": "avx2", "library": "_C.so", "reason": ""},
    "environment": ["torch_npu is installed, but CANN cannot be loaded."],
    "models": [{"class": "LlamaForCausalLM", "modules": 22}],
    "caches_bytes": 3 << 20,
    "rules": [
        {
            "id": "norm.rms",
            "title": "RMSNorm",
            "state": "applied",
            "reason": "",
            "targets": 9,
            "where": [f"transformers.models.m{n}.modeling_m{n}:M{n}RMSNorm" for n in range(5)],
            "backend": "native",
            "calls": 18,
            "fallbacks": {"gradients wanted": 2},
        },
        {
            "id": "rope.half",
            "title": "RoPE",
            "state": "refused",
            "reason": "rotate_half is not known",
            "targets": 1,
            "where": ["transformers.models.nanochat.modeling_nanochat:rotate"],
            "backend": "",
            "calls": 0,
            "fallbacks": {},
        },
        {
            "id": "mlp.silu",
            "title": "MLP",
            "state": "applied",
            "reason": "",
            "targets": 1,
            "where": ["a:B"],
            "backend": "native",
            "calls": 0,
            "fallbacks": {},
        },
        {
            "id": "norm.layer",
            "title": "LayerNorm",
            "state": "idle",
            "reason": "",
            "targets": 0,
            "where": [],
            "backend": "",
            "calls": 0,
            "fallbacks": {},
        },
    ],
}


def _rendered(renderable: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(renderable)
    return console.export_text()


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "liteboost_adaptor", *map(str, arguments)]
    return subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("doctor", "status", "bench", "build"))


def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) < 80
    assert not any(line.endswith("...") for line in lines[1:])  # a sentence that is cut


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"liteboost_adaptor {liteboost_adaptor.__version__}\n"


def test_the_console_command_is_the_same_command_line() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["liteboost"]) is cli.main
    assert project["version"] == liteboost_adaptor.__version__


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benhc"]) == 2
    assert "bench" in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    # Importing torch may fail, and doctor is there to say why.
    code = "import sys; sys.modules['torch'] = None; import liteboost_adaptor.cli as cli; cli.app()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("command", [["selftest", "--device", "cpu"], ["bench"], ["plan", "."], ["audit"]])
def test_a_command_that_needs_torch_says_so_without_it(command: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from liteboost_adaptor import cli; "
    code += f"sys.exit(cli.main({command}))"
    command_line = [sys.executable, "-c", code]
    done = subprocess.run(command_line, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: this command needs torch" in done.stderr and "doctor" in done.stderr


def test_status_table_shows_every_rule() -> None:
    text = _rendered(tables.status_table(STATUS))
    assert "liteboost_adaptor 1.2.3 level 1, kernels: native (avx2)" in text
    assert "torch_npu is installed, but CANN cannot be loaded." in text
    row = next(line for line in text.splitlines() if "norm.rms" in line)
    assert row.split() == [
        "norm.rms",
        "applied",
        "9",
        "M0RMSNorm",
        "native",
        "18",
        "2",
        "x",
        "gradients",
        "wanted",
    ]
    assert "and 2 more" in text
    assert "rotate_half is not known" in text
    assert "installed, but not reached so far" in next(
        line for line in text.splitlines() if "mlp.silu" in line
    )
    assert "idle, no use for them in the models so far: norm.layer" in text
    assert "LlamaForCausalLM: 22 modules served" in text
    assert "caches of ours: 3.0 MiB" in text


def test_rules_that_are_disabled_stand_behind_their_reason() -> None:
    old = "requires transformers>=5.3, found 4.57.1"
    off = [STATUS["rules"][-1] | {"id": f"norm.{n}", "state": "disabled", "reason": old} for n in range(2)]
    text = _rendered(tables.status_table(STATUS | {"rules": off}))
    assert f"{old}: norm.0, norm.1" in text


def test_status_of_a_script_is_short_and_lists_every_rule_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    assert cli.main(["status", str(script)]) == 0
    short = capsys.readouterr().out
    assert short.startswith("liteboost_adaptor ") and "norm.layer_then_affine" not in short
    assert all(line == line.rstrip() and len(line) <= 100 for line in short.splitlines())
    assert cli.main(["status", "--all", str(script)]) == 0
    assert "norm.layer_then_affine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "code", "fault"),
    [
        ("pass", 0, None),
        ("import sys; sys.exit()", 0, None),
        ("import sys; sys.exit(7)", 7, None),
        ("import sys; sys.exit('no such king')", 1, None),
        ("raise ValueError('no such king')", 1, ValueError),
        ("raise KeyboardInterrupt", 130, KeyboardInterrupt),
        ("def (", 1, SyntaxError),
    ],
)
def test_a_script_ends_as_python_would_end_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: str,
    code: int,
    fault: type[BaseException] | None,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(body + "\n")
    argv, path = sys.argv[:], sys.path[:]
    found, raised, _ = run_script(script, [])
    assert (found, type(raised) if raised else None) == (code, fault)
    assert (sys.argv, sys.path) == (argv, path)
    assert capsys.readouterr().err == ("no such king\n" if "exit('" in body else "")


def test_a_script_is_the_main_program(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("here = True\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour\nfound = (__name__, __file__, sys.argv)\n")
    _, fault, names = run_script(script, ["--json", "x"])
    assert fault is None
    assert names["found"] == ("__main__", str(script), [str(script), "--json", "x"])
    sys.modules.pop("neighbour")


def test_status_of_a_missing_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "nowhere.py"]) == 1
    assert "found no 'nowhere.py'" in capsys.readouterr().err


def test_status_of_the_example(tmp_path: Path) -> None:
    done = _run("status", "--json", "--json-file", tmp_path / "status.json", EXAMPLE, "--new-tokens", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ROMEO:"
    status = json.loads(lines[-1])
    assert json.loads((tmp_path / "status.json").read_text()) == status
    calls = {rule["id"]: rule["calls"] for rule in status["rules"] if rule["state"] == "applied"}
    # Three tokens are three passes, with nine norms each.
    assert calls["norm.rms"] + calls["norm.residual"] == 27
    assert status["models"] == [{"class": "LlamaForCausalLM", "modules": status["models"][0]["modules"]}]


def test_status_of_a_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n{}['king']\n")
    done = _run("status", script, "--json", "--help")
    assert done.returncode == 1
    assert done.stdout == "['--json', '--help']\n"
    table, _, trace = done.stderr.partition("Traceback (most recent call last):")
    assert table.startswith("liteboost_adaptor ") and "level 2" in table and len(table.splitlines()) < 6
    assert trace.splitlines()[1].strip() == f'File "{script}", line 3, in <module>'
    assert trace.rstrip().endswith("KeyError: 'king'")


def _figures(speed: float) -> dict[str, float]:
    return {
        "prefill_tok_s": 100 * speed,
        "decode_tok_s": 10 * speed,
        "prefill_ratio": speed,
        "decode_ratio": speed,
        "decode_bandwidth_fraction": 0.2 * speed,
        "decode_bandwidth_beside": 0.21 * speed,
        "prefill_peak_fraction": 0.1 * speed,
        "prefill_peak_beside": 0.11 * speed,
        "peak_rss_mb": 1234.5,
    }


SUMMARY: dict[str, Any] = {
    "machine": {"cpu": "A CPU", "threads": 2, "isa": "avx2", "read_gb_s": 10.0, "gemm_gflops": 99.0},
    "variants": {"hf-sdpa": _figures(1.0), "level1": _figures(4.0)},
    "settings": {"arch": "tiny", "dtype": "float32", "prompt": 9, "new": 3, "batch": 2, "repeats": 4},
    "agreement": {name: {"equal_tokens": 6, "tokens": 6} for name in ("hf-sdpa", "level1")},
    "notes": ["level1: a note."],
    "failures": [],
}


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`runner.run` answers at once, with `SUMMARY` made of it; its settings are recorded."""
    asked: list[Any] = []

    def run(settings: Any, workdir: Any, progress: Any, peers: Any) -> None:
        assert peers == {}
        progress("measuring", 0, 1)
        asked.append(settings)

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(report, "summarise", lambda measured: SUMMARY)
    return asked


def test_bench_writes_what_it_is_asked_for(
    tmp_path: Path, fake_run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "bench.json", tmp_path / "bench.png"]
    options = "--arch llama-1b --dtype float16 --prompt 9 --new 3 --batch 2 --variants hf-sdpa,level1".split()
    options += "--repeats 4 --threads 1".split()
    assert cli.main(["bench", *options, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    (settings,) = fake_run
    assert (settings.arch, settings.dtype, settings.prompt, settings.new) == ("llama-1b", "float16", 9, 3)
    assert (settings.batch, settings.variants, settings.repeats) == (2, ("hf-sdpa", "level1"), 4)
    assert settings.threads == 1
    summary = json.loads(files[0].read_text())
    assert summary["variants"]["level1"]["decode_ratio"] == 4.0
    assert files[1].stat().st_size > 1000
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.strip().startswith("level1 "))
    figures = ["400.0", "4.00", "40%", "44%", "40.00", "4.00", "80%", "84%", "1234", "6/6"]
    assert row.split() == ["level1", *figures]
    assert "read 10.0 GB/s" in printed
    assert "level1: a note." in printed


def test_bench_prints_json_alone(fake_run: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)["variants"]) == {"hf-sdpa", "level1"}
    assert "level1" in printed.err


def test_bench_fails_on_an_impossible_figure(
    fake_run: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SUMMARY, "failures", ["level1: faster than the machine."])
    assert cli.main(["bench"]) == 1
    printed = capsys.readouterr()
    assert "level1: faster than the machine." in printed.err
    assert "level1" in printed.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--variants", "hf-sdpa,nope"], "'nope'"),
        (["--dtype", "int8"], "'int8'"),
        (["--json", "nowhere/file.json"], "there is no folder"),
        (["--plot", "nowhere/file.png"], "there is no folder"),
        (["--json", "/proc/file.json"], "cannot be written in /proc"),
        (["--plot", "/proc"], "cannot be written in /"),
        (["--workdir", "nowhere"], "there is no such folder"),
        (["--arch", "gpt9"], "found 'gpt9'"),
    ],
)
def test_bench_says_what_is_wrong(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *options]) == 1
    assert words in capsys.readouterr().err


def test_bench_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from liteboost_adaptor.cli.bench import check_outputs

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'liteboost_adaptor\[bench\]'"):
        check_outputs(None, tmp_path / "plot.png", None)


def test_the_demo_shows_the_same_text_at_every_level() -> None:
    command = [sys.executable, ROOT / "examples" / "demo.py", "--rounds", "1", "--new-tokens", "12"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ROMEO:" in done.stdout
    assert done.stdout.count("identical") == 3
    assert "distance to fp32" in done.stdout  # in bf16, where the text may be another
    assert "modules served: attention, cache, linear, mlp, norm, paged, rope, step" in done.stdout


def test_fingerprint_of_a_function_behind_a_wrapper(capsys: pytest.CaptureFixture[str]) -> None:
    target = "transformers.models.qwen3_next.modeling_qwen3_next:causal_conv1d_fn"
    rule = next(rule for rule in catalogue.load()[0] if rule.id == "causal_conv.prompt")
    assert cli.main(["fingerprint", target]) == 0
    text = tomllib.loads(capsys.readouterr().out)
    assert text["bodies"] == list(rule.bodies) and text["wrappers"] == list(rule.wrappers)
