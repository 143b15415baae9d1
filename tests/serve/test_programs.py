"""Commands of other projects that use a model, by `run`: the same results as without us, and served."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import processes

from serve import plan
from serve.server import MODEL, Server

pytestmark = pytest.mark.full

#: As the command line of a shell finds them, with us before, or alone.
RUN = [sys.executable, "-m", "liteboost_adaptor", "run"]
BIN = Path(sys.executable).parent
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
{options}
"""
CHOICES = """doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]"""
UNTIL = """doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 24}
metric_list: [{metric: exact_match}]"""


def command(with_us: bool, name: str, *arguments: str | Path, **options: Any) -> str:
    """What the command prints."""
    before = [*RUN, name] if with_us else [str(BIN / name)]
    variables = options.pop("variables", {})
    done = subprocess.run(
        [*before, *map(str, arguments)],
        env=processes.environment(**variables),
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_chat_is_what_it_is_without_us(server: Server, tmp_path: Path) -> None:
    """Of the client; what it is answered is the same server's both times."""
    said = [
        command(
            with_us,
            "transformers",
            "chat",
            server.model,
            server.url,
            "max_new_tokens=12",
            "do_sample=False",
            input="What news?\nn\nSpeak again.\nn\n!exit\n",
            variables={"TERM": "dumb", "COLUMNS": "100", "HF_HUB_OFFLINE": "0"},
            cwd=tmp_path,
        )
        for with_us in (False, True)
    ]
    plain, ours = (re.sub(r"[\d.]+s \([\d.]+ tok/s\)", "", each) for each in said)
    assert plain == ours and plain.count("12 tokens in") == 2


def test_an_evaluation_has_the_results_that_it_has_without_us(tmp_path: Path) -> None:
    """Of ``lm_eval``, on tasks and data of this folder: log-likelihoods of choices, and greedy texts."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval not installed: pip install '.[eval]'")
    drawn, texts = random.Random(5), plan.prompts(48, 5)
    rows = [
        {"text": texts[row], "choices": [f" {drawn.choice(texts)[:30]}" for _ in range(3)], "label": row % 3}
        for row in range(12)
    ]
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, options in (("a", "multiple_choice", CHOICES), ("b", "generate_until", UNTIL)):
        text = TASK.format(name=name, data=data, kind=kind, options=options)
        (tmp_path / f"{name}.yaml").write_text(text)
    found = [_samples(tmp_path, with_us) for with_us in (False, True)]
    for plain, ours in zip(*(sample["b"] for sample in found), strict=True):
        assert ours["resps"] == plain["resps"]
    for plain, ours in zip(*(sample["a"] for sample in found), strict=True):
        theirs, likelihoods = ([float(each[0][0]) for each in row["resps"]] for row in (plain, ours))
        assert likelihoods == pytest.approx(theirs, abs=1e-3) and ours["acc"] == plain["acc"]
    status = json.loads((tmp_path / "status.json").read_text())
    calls = {rule["id"]: rule["calls"] for rule in status["rules"]}
    assert calls["norm.rms"] > 100 and calls["attention.sdpa"] > 100


def _samples(folder: Path, with_us: bool) -> dict[str, list[dict[str, Any]]]:
    out = folder / ("ours" if with_us else "plain")
    variables = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "PATH": f"{BIN}{os.pathsep}{os.defpath}",
    }
    if with_us:
        variables["LITEBOOST_STATUS_FILE"] = str(folder / "status.json")
    arguments = f"--model hf --tasks a,b --include_path {folder} --device cpu --batch_size 4 --log_samples"
    command(
        with_us,
        "lm_eval",
        *arguments.split(),
        "--model_args",
        f"pretrained={MODEL},dtype=float32",
        "--output_path",
        out,
        variables=variables,
        cwd=folder,
    )
    return {
        name: [json.loads(line) for line in next(out.rglob(f"samples_{name}_*")).read_text().splitlines()]
        for name in "ab"
    }
