"""Hands the same requests to a server without us, one with us, and others, in turn."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from .client import ServingError, closed_loop, open_loop
from .figures import Answer, Figures, medians, summarise
from .server import serving

_WORDS = (
    "to be or not that is the question whether it nobler in mind suffer slings and arrows of fortune take "
    "arms against a sea troubles by opposing end them die sleep no more"
).split()
#: Tokens of the texts before the first that is timed: a server records its steps meanwhile.
WARM_UP = 160
#: Clients meanwhile, of a load that does not say how many there are.
WARM_UP_CLIENTS = 4

PLAIN, OURS = "without us", "with us"


@dataclass(frozen=True)
class Load:
    """What is asked for.

    Attributes:
        at_once: Clients, each of which waits for its text before it asks for the next (a closed loop); None
            where requests arrive whatever is running (an open loop).
        rate: Requests a second of an open loop.
        requests: Texts of a round.
        tokens: Of a text, at most.
        rounds: How often each server gets the load.
    """

    at_once: int | None
    requests: int
    tokens: int
    rounds: int
    rate: float = 0.0

    def ask(self, port: int, texts: Sequence[str], tokens: int) -> list[Answer]:
        """The answers to one round."""
        if self.at_once is None:
            return open_loop(port, texts, tokens, self.rate)
        return closed_loop(port, texts, tokens, self.at_once)

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.at_once is None else str(self.at_once)


@dataclass(frozen=True)
class Row:
    """The servers under one load, medians over the rounds; the first one is `PLAIN`."""

    load: Load
    servers: Mapping[str, Figures]


def prompts(count: int, seed: int = 0) -> list[str]:
    """Texts of 4 to 128 words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(_WORDS, k=drawn.randint(4, 128))) for _ in range(count)]


def measure(
    commands: Mapping[str, Sequence[str]], loads: Iterable[Load], threads: int, same_texts: bool = True
) -> Iterator[Row]:
    """The ``loads``, one after the other.

    Args:
        commands: By name, what starts a server: `PLAIN`, `OURS`, and others.
        loads: What they are asked for.
        threads: Of each server.
        same_texts: Whether greedy texts of `OURS` must be those of `PLAIN`.

    Raises:
        ServingError: A server did not answer, or ours gave other texts than the one without us.
    """
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(command, threads)) for name, command in commands.items()}
        for load in loads:
            texts = prompts(load.requests)
            clients = load.at_once or WARM_UP_CLIENTS
            for server in servers.values():
                closed_loop(server.port, texts[:clients], max(load.tokens, WARM_UP), clients)
            rounds: dict[str, list[Figures]] = {name: [] for name in servers}
            for _ in range(load.rounds):
                answers = {
                    name: load.ask(server.port, texts, load.tokens) for name, server in servers.items()
                }
                if same_texts:
                    compare(answers[PLAIN], answers[OURS])
                for name, found in answers.items():
                    rounds[name].append(summarise(found, servers[name].peak_rss_mb()))
            yield Row(load, {name: medians(each) for name, each in rounds.items()})


def compare(expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    """Raise where a text is another one than without us.

    Raises:
        ServingError: That; with the first one.
    """
    for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if theirs.text != ours.text:
            raise ServingError(
                f"the greedy text of request {number} is {ours.text!r}, without us it is {theirs.text!r}. "
                "In bfloat16 two tokens may be within rounding of each other: use --dtype float32, or "
                "--texts any."
            )
