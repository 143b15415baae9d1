"""Run `generate.py` without the package and at levels 0, 1 and 2: same text, how fast, and what was replaced.

The script computes in fp32, where the text is the same. In bf16 the last bits decide now and then which token
comes next, with and without us; so for bf16 the demo shows how far the logits of each are from those in fp32.

Each variant is a process of its own that runs the very same source; for the one without us, the one line is
taken out. What the script imports before that line is imported once, before the processes part. They are told
in turn to generate once more, so that a slow moment of the machine meets all, and the medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

SCRIPT = Path(__file__).with_name("generate.py")
THE_LINE = "import liteboost_adaptor\n"
VARIANTS = ("without", "level 0", "level 1", "level 2")
#: What the script imports before that line, and by its first call.
IMPORTED = ["torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils"]


def main() -> int:
    """Run the demo. The exit status is 1 if the text of a level, in fp32, differs from that without us."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="times each variant generates")
    parser.add_argument("--seconds", type=float, default=25, help="begin no further round after these")
    parser.add_argument("--new-tokens", type=int, default=100, help="tokens it generates each time")
    options = parser.parse_args()
    # Progress bars of four processes at once would overwrite each other.
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.pop("LITEBOOST_LEVEL", None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    workers: dict[str, Worker] = {}
    try:
        workers.update((variant, Worker(context, variant, options.new_tokens)) for variant in VARIANTS)
        texts = {variant: worker.receive()["text"] for variant, worker in workers.items()}
        speeds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        deadline = time.monotonic() + options.seconds
        for number in range(options.rounds):
            if number > 0 and time.monotonic() > deadline:
                break
            turn = number % len(VARIANTS)
            for variant in VARIANTS[turn:] + VARIANTS[:turn]:
                speeds[variant].append(workers[variant].ask("round")["tokens_per_second"])
        halves = {variant: worker.ask("bf16") for variant, worker in workers.items()}
        status = workers["level 2"].ask("status")["text"]
    finally:
        for worker in workers.values():
            worker.end()
    return show(texts, speeds, halves, status)


def show(
    texts: dict[str, str],
    speeds: dict[str, list[float]],
    halves: dict[str, dict[str, Any]],
    status: str,
) -> int:
    """Print texts, speeds, what bf16 changes, and the status."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    original = texts["without"]
    console.rule("the text without the package")
    console.print(original, markup=False, highlight=False)
    for variant in VARIANTS[1:]:
        if texts[variant] != original:
            console.rule(f"the text at {variant}: DIFFERENT")
            console.print(texts[variant], markup=False, highlight=False)
    table = Table(
        "variant", "text", "tokens/s", "to without", title="Same script, same text", title_justify="left"
    )
    for variant in VARIANTS:
        ratios = [own / base for own, base in zip(speeds[variant], speeds["without"], strict=True)]
        is_same = "-" if variant == "without" else "identical" if texts[variant] == original else "DIFFERENT"
        table.add_row(variant, is_same, f"{median(speeds[variant]):.0f}", f"{median(ratios):.2f}")
    console.print(table)
    table = Table(
        "variant", "text", "logits' distance to fp32", title="The same in bf16", title_justify="left"
    )
    for variant in VARIANTS:
        is_same = halves[variant]["text"] == halves["without"]["text"]
        text = "-" if variant == "without" else "as without" if is_same else "another"
        table.add_row(variant, text, f"{halves[variant]['distance']:.4f}")
    console.print(table)
    console.rule("what was replaced at level 2")
    console.print(status, markup=False, highlight=False)
    return int(any(text != original for text in texts.values()))


class Worker:
    """The process of a variant."""

    def __init__(self, context: Any, variant: str, new_tokens: int) -> None:
        self._variant = variant
        self._pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=serve, args=(other, variant, new_tokens))
        self._process.start()
        other.close()

    def ask(self, what: str) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self._pipe.send(what)
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Wait for one reply."""
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            status = self._process.exitcode
            raise SystemExit(
                f"The process of {self._variant!r} ended with status {status}; see above."
            ) from None

    def end(self) -> None:
        """Tell it to end, and wait until it has."""
        self._pipe.close()
        self._process.join()


def serve(pipe: Connection, variant: str, new_tokens: int) -> None:
    """Run the script as this process's program, reply with what it prints, then with what is asked for."""
    source = SCRIPT.read_text(encoding="utf-8")
    if variant == "without":
        without = source.replace(THE_LINE, "")
        if len(source) - len(without) != len(THE_LINE):
            raise SystemExit(f"{SCRIPT.name} must hold the line {THE_LINE.strip()!r} once.")
        source = without
    else:
        os.environ["LITEBOOST_LEVEL"] = variant.removeprefix("level ")
    sys.argv = [str(SCRIPT), "--new-tokens", str(new_tokens)]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(SCRIPT)}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, SCRIPT, "exec"), names)
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "round": lambda: timed(names, new_tokens),
        "bf16": lambda: in_bf16(names, new_tokens),
        "status": lambda: {"text": str(names["liteboost_adaptor"].status())},
    }
    pipe.send({"text": printed.getvalue()})
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())


def timed(names: dict[str, Any], new_tokens: int) -> dict[str, float]:
    """Let the script generate once more, from a prompt it has seen, and count tokens per second."""
    begin = time.perf_counter()
    names["continue_text"](names["options"].prompt, new_tokens)
    return {"tokens_per_second": new_tokens / (time.perf_counter() - begin)}


def in_bf16(names: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """What the model makes of the prompt in bf16, and how far its logits are from those in fp32."""
    import torch

    exact = names["model"]
    text = (names["FOLDER"] / "heldout.txt").read_text(encoding="utf-8")
    ids = names["tokenizer"](text[:4000], return_tensors="pt").input_ids[:, :512]
    rounded = type(exact).from_pretrained(names["FOLDER"], dtype=torch.bfloat16)
    with torch.no_grad():
        expected, found = (model(input_ids=ids).logits.double() for model in (exact, rounded))
    names["model"] = rounded
    try:
        continued = names["continue_text"](names["options"].prompt, new_tokens)
    finally:
        names["model"] = exact
    return {"text": continued, "distance": float((found - expected).norm() / expected.norm())}


if __name__ == "__main__":
    sys.exit(main())
