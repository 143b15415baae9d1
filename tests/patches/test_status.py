"""What a user looks at after real models ran: the status in short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import planted, tiny_models
from torch import nn

import liteboost_adaptor
from liteboost_adaptor import native
from liteboost_adaptor.huggingface.runtime import runtime

CLAMPED = (planted.NORM_ROW, planted.NORM_ROW.replace("variance +", "variance.clamp(max=30) +"))
OLD_RULE = """
schema = 1
[[rule]]
id = "norm.of_tomorrow"
title = "A norm of a transformers to come"
kind = "module"
targets = ["*:*OfTomorrow"]
bodies = ["0123456789abcdef"]
replacement = "liteboost_adaptor.replacements.norm:rms"
why = "to come"
upstream = "none"
drop_when = "never"
requires = ["transformers>=99"]
"""


def lines() -> list[str]:
    return str(liteboost_adaptor.status()).splitlines()


def run(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))


def test_a_model_that_is_served_is_a_line_and_calls_are_totals() -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    run(model)
    (line,) = (line for line in lines() if "LlamaForCausalLM" in line)
    (record,) = liteboost_adaptor.status().models
    assert line.split(maxsplit=1)[1] == (
        f"{record['modules']} modules served: attention, cache, linear, mlp, norm, paged, rope, step"
    )
    assert any(line.strip().startswith("calls") and " served" in line for line in lines())
    assert max(map(len, lines())) <= 100 and len(lines()) < 12


def test_what_of_a_model_is_refused_is_named_with_the_reason(tmp_path: Path) -> None:
    model = planted.llama(tmp_path, CLAMPED)
    liteboost_adaptor.apply(model)
    position = next(number for number, line in enumerate(lines()) if "LlamaForCausalLM" in line)
    below = " ".join(lines()[position + 1 :])
    assert below.split()[:2] == ["not", "served"]
    assert "norm.rms" in below and "clamp" in below


def test_a_model_at_level_0_or_without_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, level=0)
    assert any(line.split(maxsplit=1)[1:] == ["original code: level 0"] for line in lines())
    monkeypatch.setattr(native, "_done", [native.NativeStatus(False, reason="no kernels for torch 9.9.9")])
    monkeypatch.setattr(native, "_said", ["said"])
    liteboost_adaptor.apply(model)
    text = " ".join(" ".join(lines()).split())
    assert "kernels: none" in text and "kernels no kernels for torch 9.9.9" in text
    assert native.BUILD_COMMAND in text and "original code: no kernels" in text


def test_rules_that_this_transformers_turns_off_say_so(tmp_path: Path) -> None:
    file = tmp_path / "tomorrow.toml"
    file.write_text(OLD_RULE)
    settings = liteboost_adaptor.config.Settings(patch_path=(str(file),))
    runtime.activate(settings)
    (row,) = (row for row in liteboost_adaptor.status().rules if row.id == "norm.of_tomorrow")
    assert row.state == "disabled"
    assert row.reason.startswith("requires transformers>=99, found ")
    assert any("1 rule: requires transformers>=99, found " in line for line in lines())
    assert f": {row.reason}" in str(liteboost_adaptor.status(full=True))


def test_the_rules_of_a_lower_level_are_counted_with_the_reason() -> None:
    liteboost_adaptor.apply(level=1)
    assert any("needs level 2, level 1 is set" in line for line in lines())
