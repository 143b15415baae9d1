"""Times each op against the ATen sequence it replaces: ``python -m liteboost_adaptor.bench.ops``.

Results are compared with float64 first, and only an op that is right is timed. Op and original are then run
in turn, in pairs whose order alternates; the figures are the medians of the times and of the pairs' ratios. A
pair during which this thread lost its processor, to another program or waiting for a thread of its own that
had lost one, says nothing about either and is measured again.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from .. import native
from ..environment.machine import cpu_name
from ..errors import LiteBoostError, NativeLibraryError
from .op_case import HIDDEN, INTERMEDIATE, VOCABULARY, WEIGHT_BYTES, Case, Run
from .op_cases import MAKERS, cases, linear_cases

DTYPES = (torch.bfloat16, torch.float32)
PHASES = {"decode": 1, "prefill": 512}
#: Seconds that one timed stretch takes at least: far above what the clock and the loop cost.
STRETCH = 1e-3
#: Rows of x in the table of `linear` by rows.
ROWS = (1, 2, 4, 8, 16, 32, 64)
#: Weights for the share of the read bandwidth: a vocabulary's, an MLP's, a larger model's.
STREAMED = {
    "vocabulary": (VOCABULARY, HIDDEN),
    "MLP": (INTERMEDIATE, HIDDEN),
    "larger MLP": (8192, 2048),
}
STREAMED_BYTES = 1 << 30
#: Undisturbed pairs that a median is made of at least, and the multiple of the time asked for after which a
#: machine is too busy to go on looking for them.
PAIRS = 5
PATIENCE = 10
BUSY = "\\*"


class DisagreementError(LiteBoostError, RuntimeError):
    """An op is further from float64 than rounding explains, so its speed means nothing."""


@dataclass(frozen=True)
class Timing:
    """Medians over the pairs of one case.

    Attributes:
        case: What was timed.
        ours_us: Microseconds of the op.
        original_us: Microseconds of the sequence it replaces.
        ratio: The second over the first, pair by pair.
        busy: There were not enough undisturbed pairs, so these are the medians of all.
    """

    case: Case
    ours_us: float
    original_us: float
    ratio: float
    busy: bool

    @property
    def faster(self) -> str:
        """The ratio for a table, marked where the machine was busy."""
        return f"{self.ratio:.2f}{BUSY if self.busy else ''}"


def compare(case: Case) -> None:
    """Raise unless the op's error is at most 1.5 times the original's, or one rounding unit.

    Or, of sums, what fp32 loses where 16 lanes add up their terms one by one: libraries have other orders.
    """
    floor = max(torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps / 2 * (case.terms / 32) ** 0.5)
    triples = zip(_tensors(case.ours()), _tensors(case.original()), _tensors(case.exact()), strict=True)
    for ours, original, exact in triples:
        # `linear` is compared on the first outputs only.
        size = exact.shape[-1]
        error, plain = (_distance(result[..., :size], exact) for result in (ours, original))
        # Written so that NaN is a disagreement.
        if not error <= 1.5 * plain + floor:
            raise DisagreementError(
                f"{case.op} {case.shapes} {case.dtype}: relative error {error:.2e} against float64, that of "
                f"the sequence it replaces is {plain:.2e}; the op is wrong and was not timed"
            )


def measure(case: Case, seconds: float) -> Timing:
    """`compare`, then time op and original in turn for about ``seconds``, longer on a busy machine.

    Raises:
        DisagreementError: The results differ by more than rounding.
    """
    compare(case)
    return _in_turn(case, seconds)


def _in_turn(case: Case, seconds: float) -> Timing:
    repeats = [_repeats(run) for run in (case.ours, case.original)]
    pairs: list[tuple[float, float]] = []
    disturbed: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while True:
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds and len(pairs) >= PAIRS:
            break
        if elapsed >= PATIENCE * seconds and len(pairs) + len(disturbed) >= PAIRS:
            break
        switches = _switches()
        # Alternating, so that a machine that slows down favours neither.
        if (len(pairs) + len(disturbed)) % 2:
            original = _stretch(case.original, repeats[1])
            ours = _stretch(case.ours, repeats[0])
        else:
            ours = _stretch(case.ours, repeats[0])
            original = _stretch(case.original, repeats[1])
        (pairs if _switches() == switches else disturbed).append((ours, original))
    busy = len(pairs) < PAIRS
    if busy:
        pairs += disturbed
    ours_us, original_us = (1e6 * median(side) for side in zip(*pairs, strict=True))
    ratio = median(original / ours for ours, original in pairs)
    return Timing(case, ours_us, original_us, ratio, busy)


def _switches() -> int:
    """How often this thread has given up its processor or lost it."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_nivcsw


def _stretch(run: Run, repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def _repeats(run: Run) -> int:
    run()
    return max(1, round(STRETCH / _stretch(run, 3)))


def _tensors(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def _distance(result: Tensor, exact: Tensor) -> float:
    exact = exact.double()  # integers, where the op gives some
    return ((result.double() - exact).norm() / exact.norm()).item()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ops_table(names: set[str], seconds: float) -> Iterator[str]:
    """Markdown of every op at both phases and dtypes, a line at a time as it is measured."""
    yield _row("op", "phase", "dtype", "inputs", "ATen, µs", "op, µs", "times faster")
    yield _row("---", "---", "---", "---", "---:", "---:", "---:")
    for phase, rows in PHASES.items():
        for dtype in DTYPES:
            for case in cases(rows, dtype, names):
                timing = measure(case, seconds)
                yield _row(
                    f"`{case.op}`",
                    phase,
                    _name(dtype),
                    case.shapes,
                    f"{timing.original_us:.1f}",
                    f"{timing.ours_us:.1f}",
                    timing.faster,
                )


def rows_table(
    seconds: float, shape: tuple[int, int] = (INTERMEDIATE, HIDDEN), weight_bytes: int = WEIGHT_BYTES
) -> Iterator[str]:
    """Markdown of how many times faster than ATen `linear` is, by rows of x."""
    yield _row("dtype", *(str(rows) for rows in ROWS))
    yield _row("---", *("---:" for _ in ROWS))
    for dtype in (*DTYPES, torch.float16):
        cells = []
        for rows in ROWS:
            (case,) = linear_cases(rows, dtype, {"": shape}, weight_bytes)
            timing = measure(case, seconds)
            cells.append(f"{timing.faster} ({timing.ours_us:.0f} µs)")
        yield _row(_name(dtype), *cells)


def bandwidth_table(
    seconds: float, shapes: dict[str, tuple[int, int]] = STREAMED, weight_bytes: int = STREAMED_BYTES
) -> Iterator[str]:
    """Markdown of how near `linear` with one row of x comes to merely reading its weight."""
    yield _row("weight", "dtype", "streaming sum, GB/s", "`linear`, GB/s", "share")
    yield _row("---", "---", "---:", "---:", "---:")
    for dtype in (*DTYPES, torch.float16):
        for case in linear_cases(1, dtype, shapes, weight_bytes):
            compare(case)
            weights = case.weights
            assert weights is not None
            nbytes = next(weights).nbytes

            def read(weights: Iterator[Tensor] = weights) -> None:
                # The same bytes in the same order; as floats they mean nothing.
                torch.ops.liteboost._stream_sum(next(weights).view(torch.float32))

            timing = _in_turn(replace(case, original=read), seconds)
            yield _row(
                case.shapes.partition(" x ")[2],
                _name(dtype),
                f"{nbytes / timing.original_us / 1e3:.1f}",
                f"{nbytes / timing.ours_us / 1e3:.1f}",
                timing.faster,
            )


def document(names: set[str], seconds: float, full: bool) -> Iterator[str]:
    """The whole of ``docs/op_speed.md``, in pieces as they are measured.

    Args:
        names: Ops of the first table.
        seconds: For each case.
        full: With the two tables of `linear`.
    """
    status = native.load()
    if not status.loaded:
        raise NativeLibraryError(
            f"the speed of the native ops was asked for, but the reference ops are in use: {status.sentence}"
        )
    yield (
        "# Speed of the ops\n\n"
        "Written by `python -m liteboost_adaptor.bench.ops --write docs/op_speed.md`; not edited by hand.\n\n"
        "Each op against the ATen sequence it replaces in transformers, at the sizes of Qwen3-0.6B: *decode* "
        "is one token (attending to 512), *prefill* 512. Results are compared with float64 before anything "
        "is timed. Op and sequence run in turn; times are medians, and *times faster* is the median of the "
        "ratios of neighbouring runs. The weights of `linear` are taken in turn, so that they come from "
        f"memory. {BUSY} marks what was measured while other programs held the processors.\n\n"
        f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.ops.liteboost._isa()}, "
        f"torch {torch.__version__}.\n\n"
    )
    yield from ops_table(names, seconds)
    if not full:
        return
    yield (
        "\n## `linear` by rows\n\n"
        f"Times faster than `F.linear`, and its own time, weight [{INTERMEDIATE}, {HIDDEN}], by rows of x. "
        "Where the number is 1, torch's own linear does the work (the limits are `max_rows` in "
        "`kernels/linear/linear_cpu.cpp`).\n\n"
    )
    yield from rows_table(seconds)
    yield (
        "\n## `linear` and the read bandwidth\n\n"
        "One row of x, weights together of 1 GiB taken in turn, against a plain sum over the bytes of the "
        "same weights with the same threads: reading them can hardly be faster.\n\n"
    )
    yield from bandwidth_table(seconds)


def main(arguments: Iterable[str] | None = None) -> None:
    """Write the tables to the standard output, and to a file where one is named."""
    parser = argparse.ArgumentParser(prog="python -m liteboost_adaptor.bench.ops", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables there")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--ops", nargs="+", choices=sorted(MAKERS), help="only these, in one table")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    text = ""
    with torch.inference_mode():
        for piece in document(set(options.ops or MAKERS), options.seconds, full=not options.ops):
            sys.stdout.write(piece)
            sys.stdout.flush()
            text += piece
    if options.write:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
