"""Times decode steps of one process in turn: ``python -m liteboost_adaptor.bench.steps``.

`bench` gives every variant a process of its own. What differs by the state alone (one sequence or several, a
short context or a long one) is seen better within one process, where the steps follow each other within
milliseconds and meet the machine in the same mood. The bare sum of a large buffer is timed beside them.

With --profile: where the time of one step of the first kind goes, by operator.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..outputs import check_writable
from .limits import ReadLimit
from .models import Cost, prepare
from .settings import DTYPES, usable_cores
from .step_profile import StepProfile, profile, write_trace
from .step_profile import table as profile_table
from .token_bytes import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Steps before the first that is timed: a program is recorded meanwhile, and memory touched.
WARM_UP = 132
#: Bytes of the buffer that is summed beside the steps.
LARGEST = 1 << 28


@dataclass(frozen=True)
class State:
    """Sequences of one length that are continued.

    Attributes:
        batch: Sequences.
        context: Tokens of each before the first step.
    """

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Steps:
    """One kind of step, medians over the rounds.

    Attributes:
        name: Which.
        milliseconds: Of a step.
        ratio: To the first kind's step of the same round.
        bytes_ratio: Of what a step must read to what the first kind's must.
        throughput: Tokens a second, over the first kind's, of the same round.
        bandwidth: Bytes a step must read, over what the bare sum of the round reads in that time.
    """

    name: str
    milliseconds: float
    ratio: float
    bytes_ratio: float
    throughput: float
    bandwidth: float


def measure(
    folder: Path, dtype: str, cost: Cost, states: list[State], rounds: int, quant: str = ""
) -> list[Steps]:
    """Load the model of ``folder``, continue every one of ``states`` in turn, and compare with the first.

    Args:
        folder: Of a saved model.
        dtype: Of its weights.
        cost: What a pass over it costs.
        states: What to continue; the first is what the others are held against.
        rounds: Of one step of each.
        quant: A scheme to quantize the weights by, as of `apply`; empty for none.
    """
    model, cost = _loaded(folder, dtype, cost, quant)
    limit = _limit(cost)
    with torch.inference_mode():
        steps = [_warm(model, state) for state in states]
        times = [[_seconds(step) for step in (*steps, limit.matrix.sum)] for _ in range(rounds)]
    sums = [limit.matrix.nbytes / each[-1] for each in times]
    needed = [cost.decode_bytes(state.batch, state.context + WARM_UP, 1 + rounds) for state in states]
    return [
        Steps(
            name=state.name,
            milliseconds=1e3 * median(each[i] for each in times),
            ratio=median(each[i] / each[0] for each in times),
            bytes_ratio=needed[i] / needed[0],
            throughput=median(each[0] / each[i] for each in times) * state.batch / states[0].batch,
            bandwidth=median(needed[i] / each[i] / rate for each, rate in zip(times, sums, strict=True)),
        )
        for i, state in enumerate(states)
    ]


def measure_profile(
    folder: Path, dtype: str, cost: Cost, state: State, rounds: int, quant: str = ""
) -> StepProfile:
    """Load the model of ``folder`` and profile a step that continues ``state``; arguments as of `measure`."""
    model, cost = _loaded(folder, dtype, cost, quant)
    limit = _limit(cost)
    with torch.inference_mode():
        return profile(_warm(model, state), limit.matrix.sum, limit.matrix.nbytes, rounds)


def _limit(cost: Cost) -> ReadLimit:
    """No more bytes than a step reads: a larger buffer would take the cache from a small model."""
    return ReadLimit(min(LARGEST, cost.token_bytes))


def _loaded(folder: Path, dtype: str, cost: Cost, quant: str) -> tuple[PreTrainedModel, Cost]:
    from transformers import AutoModelForCausalLM

    from ..api import apply

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    if quant:
        apply(model, quant=quant)
        cost = replace(cost, token_bytes=sum(token_bytes(model).values()))
    return model.eval(), cost


def _warm(model: PreTrainedModel, state: State) -> Callable[[], None]:
    """The prompt read and some steps done; a call is a step of `forward`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (state.batch, state.context), generator=generator)
    result = model(ids, use_cache=True, logits_to_keep=1)
    cache, token = getattr(result, "past_key_values", None), result.logits[:, -1:].argmax(-1)
    if cache is None:
        raise ConfigError(
            f"{type(model).__name__} gives no past_key_values to continue. Choose another --arch."
        )

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)

    for _ in range(WARM_UP):
        step()
    return step


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def table(found: Iterable[Steps]) -> Iterable[str]:
    """Markdown, a row for each kind of step."""
    yield "| step | ms | times the first | its bytes, so | tokens/s, so | of the bare sum |\n"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |\n"
    for each in found:
        yield (
            f"| {each.name} | {each.milliseconds:.3f} | {each.ratio:.3f} | {each.bytes_ratio:.3f} "
            f"| {each.throughput:.2f} | {each.bandwidth:.0%} |\n"
        )


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure and write the table to standard output."""
    parser = argparse.ArgumentParser(prog="python -m liteboost_adaptor.bench.steps", description=__doc__)
    parser.add_argument("--arch", default="qwen3-0.6b", help="as of `bench`")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the first kind's context")
    parser.add_argument("--batch", type=int, default=8, help="sequences of the second kind")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the third kind's context")
    parser.add_argument("--quant", default="", help="quantize the weights, as LITEBOOST_QUANT does")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--workdir", type=Path, help="keep the random weights here for the next run")
    parser.add_argument("--profile", action="store_true", help="the first kind's step by operator, instead")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="with --profile: as a Chrome trace, too"
    )
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    if chosen.rounds < 1:
        parser.error(f"--rounds has to be at least 1; found {chosen.rounds}")
    if chosen.trace and not chosen.profile:
        parser.error("--trace writes what --profile measures; give both")
    try:
        _run(chosen)
    except ConfigError as refusal:
        parser.error(str(refusal))


def _run(chosen: argparse.Namespace) -> None:
    from ..api import apply

    if chosen.trace:
        check_writable("--trace", chosen.trace)
    torch.set_num_threads(chosen.threads)
    apply()
    states = [State(1, chosen.prompt), State(chosen.batch, chosen.prompt), State(1, chosen.context)]
    with TemporaryDirectory() as folder:
        model = prepare(chosen.arch, chosen.dtype, chosen.workdir or Path(folder))
        if chosen.profile:
            one = measure_profile(
                model.folder, chosen.dtype, model.cost, states[0], chosen.rounds, chosen.quant
            )
            sys.stdout.writelines(profile_table(one))
            if chosen.trace:
                write_trace(one, chosen.trace)
            return
        found = measure(model.folder, chosen.dtype, model.cost, states, chosen.rounds, chosen.quant)
    sys.stdout.writelines(table(found))


if __name__ == "__main__":
    main()
