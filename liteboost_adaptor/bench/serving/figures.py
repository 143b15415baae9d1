"""What clients see of a server, from the times at which they were answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median


@dataclass(frozen=True)
class Answer:
    """One streamed text.

    Attributes:
        asked: When its request was sent, in seconds of a clock that all answers share.
        parts: When each part of the text came.
        ended: When the stream ended.
        tokens: How many tokens the server says it made.
        text: The text.
    """

    asked: float
    parts: tuple[float, ...]
    ended: float
    tokens: int
    text: str


@dataclass(frozen=True)
class Figures:
    """A round of requests.

    Attributes:
        tokens_s: Tokens of all clients in a second, from the first request to the last answer.
        first_p50_s, first_p99_s: Seconds from a request to the first part of its text.
        next_p50_s, next_p99_s: Seconds from one part of a text to the next, over all texts.
        peak_rss_mb: The most memory that the server and its children ever held, MiB.
    """

    tokens_s: float
    first_p50_s: float
    first_p99_s: float
    next_p50_s: float
    next_p99_s: float
    peak_rss_mb: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of ``values`` that ``percent`` of them are not above (nearest rank).

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("a percentile needs values; found none")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarise(answers: Sequence[Answer], peak_rss_mb: float) -> Figures:
    """The figures of one round."""
    firsts = [answer.parts[0] - answer.asked for answer in answers]
    pairs = [pair for answer in answers for pair in zip(answer.parts, answer.parts[1:], strict=False)]
    nexts = [later - sooner for sooner, later in pairs]
    seconds = max(answer.ended for answer in answers) - min(answer.asked for answer in answers)
    return Figures(
        tokens_s=sum(answer.tokens for answer in answers) / seconds,
        first_p50_s=percentile(firsts, 50),
        first_p99_s=percentile(firsts, 99),
        next_p50_s=percentile(nexts, 50),
        next_p99_s=percentile(nexts, 99),
        peak_rss_mb=peak_rss_mb,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds."""
    names = [field.name for field in fields(Figures)]
    return Figures(**{name: median(getattr(each, name) for each in rounds) for name in names})
