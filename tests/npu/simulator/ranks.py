"""Ranks of a communicator, each a simulator of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from .calls import Simulator
from .operators import RELEASE, on


@functools.cache
def _simulator(rank: int) -> Simulator:
    return Simulator("910B", RELEASE)


def on_ranks(ranks: int, body: Callable[[str, int], Any]) -> list:
    """What ``body(group, rank)`` returns on each rank; `operators.call` in it goes to that rank."""
    simulators = [_simulator(rank) for rank in range(ranks)]
    root = simulators[0].ask("group_root")

    def one(rank: int) -> Any:
        with on(simulators[rank]):
            return body(simulators[rank].ask("open_group", ranks, rank, root), rank)

    with ThreadPoolExecutor(ranks) as threads:
        answers = [threads.submit(one, rank) for rank in range(ranks)]
        wait(answers, return_when=FIRST_EXCEPTION)
        failed = [answer.exception() for answer in answers if answer.done() and answer.exception()]
        if failed:
            for simulator in simulators:  # the others wait for a rank that does not come
                simulator.stop()
            _simulator.cache_clear()
    if failed:
        raise failed[0]
    return [answer.result() for answer in answers]
