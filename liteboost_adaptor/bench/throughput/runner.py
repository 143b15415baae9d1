"""Requests that are answered all at once, handed to each variant and peer in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...memory import available_bytes
from .. import models
from ..memory import plan_groups
from ..processes import Asked, Ranks, Worker
from ..report import Measurements
from ..runner import Progress, Session
from ..settings import BASELINE, Settings
from .peers import started

#: Rows of the products whose best rate is the limit: more are no faster.
GEMM_ROWS = 2048


@dataclass(frozen=True)
class Batch:
    """So many requests that one variant answered; those of equal ``requests`` and ``number`` side by side.

    Attributes:
        name: Of the variant or peer.
        seconds: From the first prompt to the last token.
        stamps: By request, seconds from the begin to each token; none where an engine does not say.
        read_gb_s, gemm_gflops: Limits of the machine, the better of before and behind.
    """

    name: str
    requests: int
    number: int
    seconds: float
    stamps: Sequence[Sequence[float]]
    read_gb_s: float
    gemm_gflops: float


def run(
    settings: Settings,
    at_once: Sequence[int],
    peers: Mapping[str, Sequence[str]],
    workdir: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Measurements, list[Batch]]:
    """Run a benchmark.

    Variants are compared by the logits of one prompt and text before any is timed. All are in memory at once.

    Args:
        settings: What to measure; its ``batch`` is that of the comparison.
        at_once: Numbers of requests.
        peers: Commands of engines beside ours, by name.
        workdir: As of `bench.runner.run`.
        progress: Told about each step.

    Raises:
        ConfigError: The architecture is unknown, or not all fit in memory.
        DisagreementError: A variant does not compute what the baseline computes.
        WorkerError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="liteboost-bench-") as scratch, ExitStack() as stack:
        report = progress or (lambda doing, done, total: None)
        report("writing the weight file", 0, 1)
        model = models.prepare(settings.arch, settings.dtype, workdir or Path(scratch), settings.seed)
        everyone = (*settings.variants, *peers)
        groups = plan_groups(
            everyone, BASELINE, model.cost.weight_bytes, available_bytes() - settings.read_bytes
        )
        if len(groups) > 1:
            raise ConfigError(
                f"{', '.join(everyone)} of {model.name} do not fit in memory at once. "
                "Choose fewer --variants or --peer, or close other programs."
            )
        session = _BatchSession(at_once, settings, model, Path(scratch), report, groups)
        with session.started("limits") as limits:
            session.load({"limits": limits}, session.limits_options())
            session.peers = started(peers, settings, model.folder, max(at_once), Path(scratch), stack)
            variants = len(settings.variants)
            session.total = 1 + 2 * variants + len(everyone) * len(at_once) * settings.repeats
            session.run_group(settings.variants, limits)
        return session.measurements(), session.batches


class _BatchSession(Session):
    """A run whose rounds are batches of every size."""

    def __init__(self, at_once: Sequence[int], settings: Settings, *arguments: Any) -> None:
        super().__init__(settings, *arguments)
        self.at_once = at_once
        self.batches: list[Batch] = []
        self.peers: dict[str, Asked] = {}

    def limits_options(self) -> dict[str, Any]:
        """Those of more rows: of all prompts."""
        rows = min(max(self.at_once) * self.settings.prompt, GEMM_ROWS)
        return super().limits_options() | {"rows": rows}

    def round(self, workers: dict[str, Worker | Ranks], number: int, limits: Worker) -> None:
        """Let each variant and peer answer each number of requests, in an order that rotates."""
        everyone: dict[str, Asked] = {**workers, **self.peers}
        names = list(everyone)
        if number == 0:  # what is done once, such as packing weights
            for name in names:
                everyone[name].ask("batch", requests=self.at_once[0])
        turn = number % len(names)
        for requests in self.at_once:
            before = limits.ask("now")
            for name in names[turn:] + names[:turn]:
                self.step(f"round {number + 1} of {self.settings.repeats}, {requests} requests: {name}")
                answer = everyone[name].ask("batch", requests=requests)
                behind = limits.ask("now")
                beside = {limit: max(before[limit], behind[limit]) for limit in before}
                stamps = answer.get("stamps", ())
                self.batches.append(Batch(name, requests, number, answer["seconds"], stamps, **beside))
                before = behind

    def run_group(self, group: tuple[str, ...], limits: Worker) -> None:
        """As its base does; then ask the peers for their memory."""
        super().run_group(group, limits)
        for name, peer in self.peers.items():
            self.finish(name, peer)
