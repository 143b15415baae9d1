"""Times ``generate`` with and without speculation in turn: ``python -m liteboost_adaptor.bench.speculation``.

Two copies of one model generate from the same prompts, a call of each in turn: texts that repeat (greedy
texts of random weights soon repeat themselves) and texts that do not (samples at a high temperature). Greedy
texts are compared token by token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .models import prepare
from .settings import DTYPES, usable_cores

#: What is generated, by name: arguments of `generate`.
TASKS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "top_k": 0, "temperature": 5.0},
}


@dataclass(frozen=True)
class Speculated:
    """What speculation made of one task, medians over the rounds.

    Attributes:
        task: Which of `TASKS`.
        plain: Tokens a second without speculation, the prompt's time included.
        speculated: The same with it.
        ratio: Of the two, of the same round.
        range: The least and the largest of these.
        tokens: New tokens of each, over all rounds.
        equal: How many of them are the same before the first that is not.
    """

    task: str
    plain: float
    speculated: float
    ratio: float
    range: tuple[float, float]
    tokens: int
    equal: int


def measure(
    folder: Path,
    dtype: str,
    speculate: str,
    rounds: int,
    prompt: int,
    new: int,
    quant: str = "",
    tasks: Iterable[str] = TASKS,
) -> list[Speculated]:
    """Load the model of ``folder`` twice, and have both generate from the same prompts in turn.

    Args:
        folder: Of a saved model.
        dtype: Of its weights.
        speculate: As of `apply`.
        rounds: Prompts of each task; two more come first, while steps are recorded.
        prompt: Tokens of each, random ones.
        new: Tokens generated.
        quant: A scheme to quantize the weights by, as of `apply`; empty for none.
        tasks: Names of `TASKS`.
    """
    from transformers import AutoModelForCausalLM

    from ..api import apply

    models: list[Any] = []
    for wanted in ("off", speculate):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        apply(model.eval(), speculate=wanted, quant=quant or None)
        models.append(model)
    return [_of_task(task, models, rounds, prompt, new) for task in tasks]


def _of_task(task: str, models: list[Any], rounds: int, prompt: int, new: int) -> Speculated:
    times: list[list[float]] = []
    equal = 0
    for at in range(-2, rounds):
        ids = _prompt(models[0].config.vocab_size, prompt, at + 2)
        (first, text), (second, other) = (_generated(model, ids, new, TASKS[task]) for model in models)
        if at >= 0:
            times.append([first, second])
            equal += int((text == other).long().cumprod(0).sum())
    ratios = [first / second for first, second in times]
    return Speculated(
        task=task,
        plain=median(new / first for first, _ in times),
        speculated=median(new / second for _, second in times),
        ratio=median(ratios),
        range=(min(ratios), max(ratios)),
        tokens=new * rounds,
        equal=equal,
    )


def _prompt(vocabulary: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


def _generated(model: Any, ids: torch.Tensor, new: int, how: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Seconds of a call, and its new tokens."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    result: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        **how,
    )
    return time.perf_counter() - begin, result[0, ids.shape[1] :]


def table(found: Iterable[Speculated]) -> Iterable[str]:
    """Markdown, a row for each task."""
    yield "| text | tokens/s | with speculation | times | least, largest | same tokens |\n"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |\n"
    for each in found:
        least, largest = each.range
        same = f"{each.equal:,} of {each.tokens:,}" if not TASKS[each.task]["do_sample"] else "other samples"
        yield (
            f"| {each.task} | {each.plain:.1f} | {each.speculated:.1f} | {each.ratio:.2f} "
            f"| {least:.2f}, {largest:.2f} | {same} |\n"
        )


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and write the table to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m liteboost_adaptor.bench.speculation", description=__doc__
    )
    parser.add_argument("--arch", default="qwen3-0.6b", help="as of `bench`")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--speculate", default="lookup", help="as of LITEBOOST_SPECULATE")
    parser.add_argument("--quant", default="", help="quantize the weights, as LITEBOOST_QUANT does")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens generated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--workdir", type=Path, help="keep the random weights here for the next run")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    from ..api import apply

    torch.set_num_threads(chosen.threads)
    apply()
    with TemporaryDirectory() as folder:
        model = prepare(chosen.arch, chosen.dtype, chosen.workdir or Path(folder))
        found = measure(
            *(model.folder, chosen.dtype, chosen.speculate),
            *(chosen.rounds, chosen.prompt, chosen.new, chosen.quant, chosen.tasks),
        )
    sys.stdout.writelines(table(found))


if __name__ == "__main__":
    main()
