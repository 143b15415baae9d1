"""Hands the same requests to a server without us and one with us, in turn."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .client import ServingError, closed_loop
from .figures import Answer, Figures, medians, summarise
from .server import serving

_WORDS = (
    "to be or not that is the question whether it nobler in mind suffer slings and arrows of fortune take "
    "arms against a sea troubles by opposing end them die sleep no more"
).split()
#: Tokens of the texts before the first that is timed: a server records its steps meanwhile.
WARM_UP = 160


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        at_once: Clients, each of which waits for its text before it asks for the next.
        requests: Texts of a round.
        tokens: Of a text, at most.
        rounds: How often each server gets the load.
    """

    at_once: int
    requests: int
    tokens: int
    rounds: int


@dataclass(frozen=True)
class Row:
    """The two servers under one load, medians over the rounds."""

    load: Load
    plain: Figures
    ours: Figures


def prompts(count: int, seed: int = 0) -> list[str]:
    """Texts of 4 to 128 words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(_WORDS, k=drawn.randint(4, 128))) for _ in range(count)]


def measure(
    model: Path, loads: Iterable[Load], level: str, threads: int, options: Sequence[str]
) -> Iterator[Row]:
    """The ``loads``, one after the other.

    Raises:
        ServingError: A server did not answer, or gave other texts than the one without us.
    """
    with (
        serving(model, None, threads, options) as plain,
        serving(model, level, threads, options) as ours,
    ):
        for load in loads:
            texts = prompts(load.requests)
            for port in (plain, ours):
                closed_loop(port, texts[: load.at_once], max(load.tokens, WARM_UP), load.at_once)
            rounds = [
                tuple(closed_loop(port, texts, load.tokens, load.at_once) for port in (plain, ours))
                for _ in range(load.rounds)
            ]
            for theirs, found in rounds:
                compare(theirs, found)
            yield Row(load, *(medians([summarise(each[at]) for each in rounds]) for at in (0, 1)))


def compare(expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    """Raise where a text is another one than without us.

    Raises:
        ServingError: That; with the first one.
    """
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs.text != ours.text:
            raise ServingError(
                f"the greedy text of request {number} is {ours.text!r}, without us it is {theirs.text!r}. "
                "In bfloat16 two tokens may be within rounding of each other: use --dtype float32."
            )


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Markdown, a row for each load and server. Times are in milliseconds."""
    yield "| clients | | tokens/s | times | first part, p50 | p99 | next part, p50 | p99 |\n"
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for row in rows:
        for name, figures in (("without us", row.plain), ("with us", row.ours)):
            times = (figures.first_p50_s, figures.first_p99_s, figures.next_p50_s, figures.next_p99_s)
            yield (
                f"| {row.load.at_once} | {name} | {figures.tokens_s:.1f} "
                f"| {figures.tokens_s / row.plain.tokens_s:.2f} "
                + "".join(f"| {1000 * seconds:.1f} " for seconds in times)
                + "|\n"
            )
