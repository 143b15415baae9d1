"""Compare the variants of a benchmark, then hand them rounds in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ..errors import LiteBoostError
from ..memory import available_bytes
from . import models
from .agreement import Agreement, compare
from .memory import plan_groups
from .peers import LlamaBench
from .processes import Asked, Ranks, Worker
from .report import Measurements, Round
from .settings import BASELINE, INT8_CACHES, QUANTISED, ROUNDING, SHARDED, Settings, processes

_PACKAGE = Path(__file__).parents[1] / "__init__.py"

#: Told what is being done, the steps done, and the steps there are.
Progress = Callable[[str, int, int], None]


class DisagreementError(LiteBoostError, ValueError):
    """A variant does not compute what the baseline computes, so its speed means nothing."""


def run(
    settings: Settings,
    workdir: Path | None = None,
    progress: Progress | None = None,
    peers: Mapping[str, Sequence[str]] | None = None,
) -> Measurements:
    """Run a benchmark.

    Every variant is a process of its own; all map one weight file. Variants are compared before they are
    timed, then handed rounds in turn, in an order that rotates, so that a slow spell of the machine meets
    all of them. What does not fit in memory at once runs in groups, each with the baseline.

    Args:
        settings: What to measure.
        workdir: Where the weight file is kept for the next run; ``None`` for a temporary folder.
        progress: Told about each step.
        peers: Commands of ``llama-bench``, by name, that take turns with the variants of the first group.

    Raises:
        ConfigError: The architecture is unknown, or the baseline and one variant do not fit in memory.
        DisagreementError: A variant does not compute what the baseline computes.
        WorkerError: A worker process failed.
    """
    with tempfile.TemporaryDirectory(prefix="liteboost-bench-") as scratch:
        report = progress or (lambda doing, done, total: None)
        report("writing the weight file", 0, 1)
        model = models.prepare(settings.arch, settings.dtype, workdir or Path(scratch), settings.seed)
        groups = plan_groups(
            settings.variants, BASELINE, model.cost.weight_bytes, available_bytes() - settings.read_bytes
        )
        session = Session(settings, model, Path(scratch), report, groups, peers or {})
        with session.started("limits") as limits:
            session.load({"limits": limits}, session.limits_options())
            for group in groups:
                session.run_group(group, limits)
        return session.measurements()


class Session:
    """The state of one run."""

    def __init__(
        self,
        settings: Settings,
        model: models.BenchModel,
        scratch: Path,
        report: Progress,
        groups: list[tuple[str, ...]],
        peers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.settings = settings
        self.model = model
        self.scratch = scratch
        self.groups = groups
        self.llama_benches = {name: LlamaBench(command, settings) for name, command in (peers or {}).items()}
        self.agreements: dict[str, Agreement] = {}
        self.rounds: list[Round] = []
        self.limits: dict[str, float] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.finishes: dict[str, dict[str, Any]] = {}
        self._report = report
        self._done = 1
        # Loading, comparing and each round are a step of every variant.
        self.total = 1 + sum(map(len, groups)) * (2 + settings.repeats)
        self.total += len(self.llama_benches) * settings.repeats
        self._prompt = _random_prompt(settings, model.vocab_size)

    def run_group(self, group: tuple[str, ...], limits: Worker) -> None:
        """Load, compare and time the variants of one group."""
        with ExitStack() as stack:
            workers = {name: stack.enter_context(self.started(name)) for name in group}
            self.load(workers, self._variant_options())
            self._compare(workers)
            asked: dict[str, Asked] = {**workers, **(self.llama_benches if group == self.groups[0] else {})}
            for number in range(self.settings.repeats):
                self.round(asked, number, limits)
                self.limits = limits.ask("best")
            for name, worker in asked.items():
                self.finish(name, worker)

    def measurements(self) -> Measurements:
        """What was seen."""
        for name, peer in self.llama_benches.items():
            self.facts[name] = {"token_bytes": {"all": peer.model_bytes}}
        return Measurements(
            settings=self.settings,
            model=self.model,
            groups=self.groups,
            agreements=self.agreements,
            rounds=self.rounds,
            read_gb_s=self.limits["read_gb_s"],
            gemm_gflops=self.limits["gemm_gflops"],
            facts=self.facts,
            peak_rss_mb={name: finish["peak_rss_mb"] for name, finish in self.finishes.items()},
            statuses={name: finish["status"] for name, finish in self.finishes.items() if finish["status"]},
            peers=tuple(self.llama_benches),
        )

    def started(self, name: str) -> closing[Worker | Ranks]:
        """What runs a variant and has still to load, ended on the way out."""
        way = name.partition(SHARDED)[0]
        level = int(way.removeprefix("level")) if way.startswith("level") else None
        if SHARDED in name:
            return closing(Ranks(name, processes(name), self.settings.threads, self.scratch, level))
        quant = name if name in QUANTISED else None
        return closing(Worker(name, self.settings.threads, self.scratch, level, quant))

    def load(self, workers: dict[str, Worker | Ranks], options: dict[str, Any]) -> None:
        """Let workers import and load, side by side, since nothing is timed yet."""
        for name, worker in workers.items():
            common = {
                "variant": name,
                "quantized": name in QUANTISED,
                "int8_cache": name in INT8_CACHES,
                "package": str(_PACKAGE),
                "dtype": self.settings.dtype,
                "threads": self.settings.threads // processes(name),
                "processes": processes(name),
            }
            worker.send("load", options={**common, **options})
        for name, worker in workers.items():
            if name in self.settings.variants:
                self.step(f"{name}: loading")
            self.facts[name] = worker.receive()

    def limits_options(self) -> dict[str, Any]:
        """Options of the process that measures the machine."""
        settings = self.settings
        return {
            "rows": settings.batch * settings.prompt,
            "gemm_shapes": self.model.cost.gemm_shapes,
            "gemm_size": settings.gemm_size,
            "read_bytes": settings.read_bytes,
        }

    def _variant_options(self) -> dict[str, Any]:
        return {"model": str(self.model.folder), "prompt": self._prompt, "new": self.settings.new}

    def _compare(self, workers: dict[str, Worker | Ranks]) -> None:
        """Hold every variant of a group against the baseline of the same group."""
        import torch

        self.step(f"{BASELINE}: comparing")
        tokens, reference = self._logits(workers[BASELINE], None)
        # Held against itself: forced and free decoding agree, or nothing below means anything.
        for name in sorted(workers, key=lambda name: name != BASELINE):
            if name != BASELINE:
                self.step(f"{name}: comparing")
            _, candidate = self._logits(workers[name], tokens)
            expected = reference
            if name in QUANTISED:  # transformers' own code on what is left after rounding
                _, expected = self._logits(workers[name], tokens, dequantized=True)
            agreement = compare(expected, candidate, self.settings.dtype, name in ROUNDING)
            self.agreements.setdefault(name, agreement)
            if not all(torch.isfinite(part).all() for part in reference.values()):
                raise DisagreementError(
                    f"{self.model.name}: the logits of {BASELINE} in {self.settings.dtype} are not finite: "
                    "nothing can be compared. Choose another --dtype."
                )
            if not agreement.agrees:
                raise DisagreementError(
                    f"{name} does not agree with {BASELINE} on {self.model.name} in {self.settings.dtype}: "
                    f"{agreement}. Nothing was timed; `LITEBOOST_DISABLE` finds the rule at fault."
                )

    def _logits(
        self, worker: Worker | Ranks, forced: list[list[int]] | None, **options: bool
    ) -> tuple[list[list[int]], dict[str, Any]]:
        import torch

        path = self.scratch / f"{worker.name}.logits"
        reply = worker.ask("check", path=str(path), forced=forced, **options)
        logits = torch.load(path, weights_only=True)
        path.unlink()
        return reply["tokens"], logits

    def round(self, workers: Mapping[str, Asked], number: int, limits: Worker) -> None:
        """Let each variant generate once, in an order that rotates."""
        names = list(workers)
        turn = number % len(names)
        index = len({one.index for one in self.rounds})
        before = limits.ask("now")
        for name in names[turn:] + names[:turn]:
            self.step(f"round {number + 1} of {self.settings.repeats}: {name}")
            seconds = workers[name].ask("round")
            behind = limits.ask("now")
            beside = {limit: max(before[limit], behind[limit]) for limit in before}
            self.rounds.append(Round(name, index, **seconds, **beside))
            before = behind

    def finish(self, name: str, worker: Asked) -> None:
        """Note what a worker says at its end."""
        finish = worker.ask("finish")
        earlier = self.finishes.get(name)
        if earlier:  # the baseline of an earlier group
            finish["peak_rss_mb"] = max(finish["peak_rss_mb"], earlier["peak_rss_mb"])
        self.finishes[name] = finish

    def step(self, doing: str) -> None:
        """Tell of the next step."""
        self._report(doing, self._done, self.total)
        self._done += 1


def _random_prompt(settings: Settings, vocab_size: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.prompt)
    return torch.randint(0, vocab_size, shape, generator=generator).tolist()
