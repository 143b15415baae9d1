"""``bench --peer``: llama.cpp's own benchmark takes turns with the variants."""

from __future__ import annotations

import functools
import json
import stat
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from liteboost_adaptor import cli
from liteboost_adaptor.bench.peers import LlamaBench, commands_of
from liteboost_adaptor.bench.processes import WorkerError
from liteboost_adaptor.bench.settings import BASELINE, Settings
from liteboost_adaptor.errors import ConfigError

#: Takes half a second a token of the prompt, and two for each that follows it.
LLAMA = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-m"] == "tiny.gguf" and given["-r"] == "1" and given["-o"] == "json" and given["-t"] == "1"
prompt, new = int(given["-p"]), int(given["-n"])
assert (prompt == 0) == ("-d" in given) and given.get("-d", "7") == "7"
seconds = 0.5 * prompt + 2 * new
print("a line of the log", file=sys.stderr)
print(json.dumps([{{"samples_ns": [int(seconds * 1e9)], "model_size": 5000}}]))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_takes_turns_and_stands_in_the_table_and_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(Settings, read_bytes=1 << 22, gemm_size=64)
    monkeypatch.setattr(sys.modules["liteboost_adaptor.cli.bench"], "Settings", small)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    AutoConfig.for_model("qwen3", **sizes, **heads).save_pretrained(tmp_path / "tiny")
    llama = program(tmp_path / "llama-bench", LLAMA.format(python=sys.executable))
    options = ["--arch", str(tmp_path / "tiny"), "--prompt", "7", "--new", "4", "--repeats", "2"]
    options += ["--threads", "1", "--variants", "level2", "--plot", str(tmp_path / "bench.png")]
    options += ["--peer", f"Q4_0={llama} -m tiny.gguf", "--json", "-"]
    assert cli.main(["bench", *options]) in (0, 1)  # 1: so small a model stays in a cache
    written = capsys.readouterr()
    found = json.loads(written.out)
    assert list(found["variants"]) == [BASELINE, "level2"] and list(found["peers"]) == ["Q4_0"]
    figures = found["peers"]["Q4_0"]
    assert figures["prefill_tok_s"] == 7 / 3.5 and figures["decode_tok_s"] == 3 / 6
    assert figures["peak_rss_mb"] > 1 and figures["decode_ratio"] > 0
    assert [one["variant"] for one in found["rounds"]].count("Q4_0") == 2
    assert any(note.startswith("Q4_0 reads 0.0 MB") for note in found["notes"])
    assert not any("Q4_0" in failure for failure in found["failures"])
    assert "Q4_0" in written.err  # the table, beside JSON on standard output
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["Q4_0"], "a name of its own"),
        (["=true"], "a name of its own"),
        (["level2=true"], "a name of its own"),
        (["a=true", "a=true"], "a name of its own"),
        (["a=no-such-program -m x"], "there is no program no-such-program"),
    ],
)
def test_what_cannot_be_run_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commands_of(texts, Settings("tiny"))


def test_several_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="--batch 1"):
        commands_of(["a=true"], Settings("tiny", batch=2))
    assert commands_of([], Settings("tiny", batch=2)) == {}


def test_a_program_without_figures_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    failing = program(tmp_path / "llama-bench", "#!/bin/sh\necho no such model >&2; exit 3\n")
    with pytest.raises(WorkerError, match=r"ended with 3. It last printed:\nno such model"):
        LlamaBench([str(failing), "-m", "x"], Settings("tiny")).ask("round")
