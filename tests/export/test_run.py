"""An exported folder gives the tokens that `generate` gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import runner

from .conftest import LONGEST

Exported = tuple[torch.nn.Module, Path]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 17])
def test_tokens_are_those_of_generate(windowed: Exported, length: int) -> None:
    model, folder = windowed
    prompt, count = runner.prompt(model, length), LONGEST - length
    opened = runner.Model(folder)
    opened.prefill(prompt)
    assert [opened.next()[0] for _ in range(count)] == runner.generated(model, prompt, count)
    opened.close()


def test_logits_are_those_of_the_model_to_the_bit(windowed: Exported) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 11)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits[0, -1]
    opened = runner.Model(folder)
    opened.prefill(prompt)
    assert torch.equal(opened.logits(), expected)
    opened.close()


def test_the_program_prints_the_same(windowed: Exported) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 17)
    assert runner.tokens(folder, prompt, 9) == runner.generated(model, prompt, 9)


def test_a_prompt_in_parts_and_a_reset(windowed: Exported) -> None:
    model, folder = windowed
    prompt = runner.prompt(model, 14)
    opened = runner.Model(folder)
    opened.prefill(prompt[:9])
    opened.prefill(prompt[9:])
    in_parts = [opened.next()[0] for _ in range(5)]
    opened.reset()
    opened.prefill(prompt)
    assert [opened.next()[0] for _ in range(5)] == in_parts == runner.generated(model, prompt, 5)
    assert opened.length() == (19, LONGEST)
    opened.close()


def test_a_sequence_that_is_full_says_so_and_goes_on_behind_a_reset(windowed: Exported) -> None:
    model, folder = windowed
    opened = runner.Model(folder)
    with pytest.raises(runner.RunnerError, match=rf"FULL: {LONGEST + 1} tokens behind 0 .* --max-tokens"):
        opened.prefill([5] * (LONGEST + 1))
    opened.prefill(runner.prompt(model, LONGEST))
    opened.next()
    with pytest.raises(runner.RunnerError, match="FULL"):
        opened.next()
    opened.reset()
    opened.prefill([5, 6])
    assert opened.next()[0] == runner.generated(model, [5, 6], 1)[0]
    opened.close()


def test_arguments_that_are_not_allowed(windowed: Exported) -> None:
    model, folder = windowed
    opened = runner.Model(folder)
    with pytest.raises(runner.RunnerError, match="BAD_ARGUMENT: nothing was read yet"):
        opened.next()
    for token in (-1, model.config.vocab_size):
        with pytest.raises(runner.RunnerError, match=f"BAD_ARGUMENT: token {token} is none of"):
            opened.prefill([5, token])
    with pytest.raises(runner.RunnerError, match="BAD_ARGUMENT: a prompt must have"):
        opened.prefill([])
    for name, value in {"temperature": 0.0, "top_k": -1, "top_p": 1.5, "repetition_penalty": 0.0}.items():
        with pytest.raises(runner.RunnerError, match=f"BAD_ARGUMENT: {name} must be"):
            opened.sample(**{name: value})
    opened.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ids", "/nowhere"), "--ids /nowhere cannot be read"),
        (("--ids", "-", "--prompt", "x"), "give one of"),
        (("--ids", "-", "--max-new", "x"), "--max-new must be a whole number"),
        (("--colour",), "there is no option --colour"),
    ],
)
def test_a_command_line_that_cannot_be_read(
    windowed: Exported, arguments: tuple[str, ...], words: str
) -> None:
    done = runner.run(windowed[1], *arguments, given="5")
    assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize(
    ("given", "arguments", "words"),
    [
        ("", (), "a prompt must have a token at least, got none"),
        (
            "5",
            ("--threads", "100000"),
            "threads must be from 0, for as many as there are cores, to 4096, got 100000",
        ),
        ("5", ("--threads", "4294967297"), "threads must be from 0"),
    ],
)
def test_what_the_command_line_gives_is_not_allowed(
    windowed: Exported, given: str, arguments: tuple[str, ...], words: str
) -> None:
    done = runner.run(windowed[1], "--ids", "-", *arguments, given=given)
    assert done.returncode == 1 and words in done.stderr


def test_the_manifest_says_what_is_in_the_folder(windowed: Exported) -> None:
    model, folder = windowed
    says = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert says["model"] == type(model).__name__ and says["longest"] == LONGEST
    assert "liteboost::attention.default" in says["operators"]
    names = {name for program in says["programs"] for name in program["constants"]}
    assert names > {name for name, _ in model.named_parameters()}
    # Windows make other programs for lengths up to theirs and beyond.
    assert says["prompts"][0][:2] == [1, 1] and says["prompts"][-1][1] == LONGEST
    assert len(says["prompts"]) >= 3 and len(says["steps"]) >= 3
