"""What a decode step would take on an Ascend card, modelled from its launches on the simulator.

A launch costs what a kernel of its kind costs before it does anything, plus the longer of its arithmetic and
its memory traffic at the efficiencies that Huawei's own simulator assumes. The host launches one after
another, and the slower of host and device sets the pace. Of a captured step the host launches what is around
the graph, the graph, and once more each attention, whose lengths it renews while the graph runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import config
from ..errors import ConfigError, LiteBoostError
from . import models
from .cards import CARDS, COMPUTE_EFFICIENCY, HOST_LAUNCH_S, MEMORY_EFFICIENCY, STATIC_S, Card, send_seconds
from .settings import Settings


@dataclass(frozen=True)
class Launch:
    """One launch: its unit (a key of `STATIC_S`), dtype, arithmetic and memory traffic.

    Attributes:
        is_captured: Whether it ran in the replay of a graph: the host did not launch it.
        cards: Of a collective: among how many; ``bytes`` are those that each sends.
    """

    unit: str
    dtype: str
    flops: float
    bytes: float
    is_captured: bool = False
    cards: int = 1


@dataclass(frozen=True)
class StepTime:
    """Modelled seconds of one step.

    Attributes:
        device: The kernels one after another.
        host: Launching them one after another, those of a replay as one, and each update of a graph.
    """

    device: float
    host: float

    @property
    def eager(self) -> float:
        """Host and device side by side: the slower sets the pace."""
        return max(self.device, self.host)

    @property
    def graph(self) -> float:
        """If all of it were replayed from one captured graph: the host launches once."""
        return self.device + HOST_LAUNCH_S


def device_seconds(launch: Launch, card: Card) -> float:
    """Modelled time of one launch on the device."""
    if launch.cards > 1:
        return send_seconds(card, launch.bytes, launch.cards)
    peak = card.cube.get(launch.dtype, card.cube["float16"]) if launch.unit == "matmul" else card.vector
    arithmetic = launch.flops / (peak * COMPUTE_EFFICIENCY)
    traffic = launch.bytes / (card.bandwidth * MEMORY_EFFICIENCY)
    return STATIC_S[launch.unit] + max(arithmetic, traffic)


def step_time(launches: Sequence[Launch], card: Card, of_graphs: int = 0) -> StepTime:
    """Modelled time of the launches of one step.

    Args:
        launches: Of the device.
        card: That is modelled.
        of_graphs: How often the host replays a graph or updates a task group of one.
    """
    device = sum(device_seconds(launch, card) for launch in launches)
    launched = sum(not launch.is_captured for launch in launches)
    return StepTime(device, HOST_LAUNCH_S * (launched + of_graphs))


#: Operators of the matrix units; everything else runs on the vector units.
_CUBE = ("matmul", "mm", "flashattention", "attentionscore", "gateddeltarule")


def launches_of(lines: Iterable[str], label: str) -> list[Launch]:
    """The launches and collectives between the mark ``label`` and the next one, in a trace of the simulator.

    Args:
        lines: JSON, an event each, as `tests/cann_sim` writes them.
        label: Of the mark.
    """
    made = {"launch": _launch, "collective": _collective}
    return [made[event["event"]](event) for event in _events(lines, label) if event["event"] in made]


def graph_calls_of(lines: Iterable[str], label: str) -> int:
    """How often the host replayed a graph or updated a task group there."""
    return sum(event["event"] in ("replay", "update") for event in _events(lines, label))


def _events(lines: Iterable[str], label: str) -> Iterator[dict[str, Any]]:
    current = ""
    for line in lines:
        event = json.loads(line)
        if event["event"] == "mark":
            current = event["label"]
        elif current == label:
            yield event


def _launch(event: dict[str, Any]) -> Launch:
    name = event["op"].removeprefix("aclnn").lower()
    unit = "matmul" if any(word in name for word in _CUBE) else "vector"
    if "allreduce" in name or "allgather" in name or "reducescatter" in name:
        unit = "collective"
    tensors = [one for each in event["arguments"] for one in each.get("tensors", ()) if one]
    dtype = {"f32": "float32", "i8": "int8", "bf16": "bfloat16"}.get(_dtype(tensors), "float16")
    moved = event["read"] + event["written"]
    return Launch(unit, dtype, event["flops"], moved, event.get("graph", 0) > 0)


def _collective(event: dict[str, Any]) -> Launch:
    cards = event["ranks"]
    # Of a sum each card sends its share of the parts, and later of the results.
    share = 2 * (cards - 1) / cards if event["op"] == "HcclAllReduce" else cards - 1
    return Launch("collective", "", 0.0, event["bytes"] * share, event.get("graph", 0) > 0, cards)


def _dtype(tensors: list[dict[str, Any]]) -> str:
    return tensors[0]["dtype"] if tensors else ""


@dataclass(frozen=True)
class Modelled:
    """One variant.

    Attributes:
        launches: Of the host for one decoded token, those of a replay as one.
        bytes: That they move.
        must_move: Bytes that a step must read, from the weights and the cache.
        time: Modelled.
    """

    variant: str
    launches: int
    bytes: float
    must_move: float
    time: StepTime


class SimulatorError(LiteBoostError, RuntimeError):
    """The simulator is not there, or a program failed on it."""


def run(
    settings: Settings, card: str, progress: Callable[[str, int, int], None] | None = None
) -> list[Modelled]:
    """Generate with every variant on the simulated NPU, and model the last token's step.

    Args:
        settings: What to run; repeats and threads do not matter here.
        card: A name in `CARDS`.
        progress: Told about each step.

    Raises:
        ConfigError: The card is unknown.
        SimulatorError: There is no checkout with the simulator, or a variant failed on it.
    """
    if card not in CARDS:
        raise ConfigError(f"--card must be one of {', '.join(CARDS)}; found {card!r}. Choose one.")
    simulator = _simulator()
    report = progress or (lambda doing, done, total: None)
    with tempfile.TemporaryDirectory(prefix="liteboost-modelled-") as scratch:
        report("writing the weight file", 0, len(settings.variants) + 1)
        model = models.prepare(settings.arch, settings.dtype, Path(scratch), settings.seed)
        found = []
        for number, variant in enumerate(settings.variants, 1):
            report(f"{variant}: generating on the simulator", number, len(settings.variants) + 1)
            trace = Path(scratch) / f"{variant}.jsonl"
            _generate(settings, variant, model, trace, simulator)
            lines, label = trace.read_text(encoding="utf-8").splitlines(), f"token {settings.new - 1}"
            launches, of_graphs = launches_of(lines, label), graph_calls_of(lines, label)
            if not launches:
                raise SimulatorError(f"{variant} launched nothing for a token; see the trace {trace}")
            # The step that makes the last token sees the prompt and all tokens before it.
            last = 2 * model.cost.decode_bytes(settings.batch, settings.prompt, settings.new)
            last -= model.cost.decode_bytes(settings.batch, settings.prompt, 2)
            moved = sum(launch.bytes for launch in launches)
            time = step_time(launches, CARDS[card], of_graphs)
            launched = sum(not launch.is_captured for launch in launches) + of_graphs
            found.append(Modelled(variant, launched, moved, last, time))
    return found


def _simulator() -> Path:
    """The folder that holds the package ``cann_sim``: the tests of a checkout."""
    folder = Path(__file__).resolve().parents[2] / "tests"
    if not (folder / "cann_sim" / "__main__.py").is_file():
        raise SimulatorError(
            f"--modelled runs on the simulator of a checkout, and there is none in {folder}. "
            "Clone the repository and run it there (see tests/cann_sim/README.md)."
        )
    return folder


def _generate(
    settings: Settings, variant: str, model: models.BenchModel, trace: Path, simulator: Path
) -> None:
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    prompt = torch.randint(0, model.vocab_size, (settings.batch, settings.prompt), generator=generator)
    options = {
        "variant": variant,
        "package": str(Path(__file__).resolve().parents[1] / "__init__.py"),
        "model": str(model.folder),
        "dtype": settings.dtype,
        "threads": settings.threads,
        "prompt": prompt.tolist(),
        "new": settings.new,
        "trace": str(trace),
    }
    level = variant.removeprefix("level") if variant.startswith("level") else None
    environment = config.child_environment(
        HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(settings.threads), LITEBOOST_LEVEL=level
    )
    places = (str(simulator), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = ":".join(place for place in places if place)
    program = Path(__file__).with_name("modelled_worker.py")
    command = [sys.executable, "-m", "cann_sim", "run", str(program), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise SimulatorError(f"{variant} failed on the simulator with status {done.returncode}:\n{tail}")
