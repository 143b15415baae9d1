"""Generates while memory is refused: ``python -m robustness.out_of_memory SPEC`` prints JSON for each run.

SPEC is JSON: a list of [case, way, runs]. A way is ``"allocations"`` (the n-th that our library or torch's
allocator makes is refused, the n spread over all that a generation makes), ``"address space"`` (rising
limits) or ``"threads"`` (the same where threads are to be started). Each run is a fork of one process
that has generated before: it generates with memory refused, and then again without. Where a case has another
``warm`` length than its own, what is made once for sizes is made in the run.

Loaded before the C library there must be what is made of ``refused_allocations.cpp``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support import tiny_models
from support.tiny_sizes import Sizes

import liteboost_adaptor
from liteboost_adaptor import native

#: Enough that a step was recorded and is run from C++.
RECORDED = 48
WIDE = Sizes(head_dim=64, heads=8, kv_heads=4, hidden=512, exact=True)


@dataclass(frozen=True)
class Case:
    """A model that generates.

    Attributes:
        family, level, quant, sizes, dtype: Of the model.
        length, tokens: Of the prompt, of two rows, and of what follows it.
        warm: Length of the prompt that was generated from before; 0 for the same.
    """

    family: str = "llama"
    level: int = 2
    quant: str | None = None
    sizes: Sizes | None = None
    dtype: torch.dtype = torch.float32
    length: int = 12
    tokens: int = 3
    warm: int = 0

    def build(self) -> Callable[[int], torch.Tensor]:
        """What generates from a prompt of some length, with a model that is served."""
        sizes = {} if self.sizes is None else {"sizes": self.sizes}
        model = tiny_models.build(self.family, **sizes).to(self.dtype)
        liteboost_adaptor.apply(model, level=self.level, quant=self.quant)

        def generate(length: int) -> torch.Tensor:
            return tiny_models.generate(model, tiny_models.example_inputs(model, length=length), self.tokens)

        return generate


class Product(Case):
    """One product of ours, worth threads: in a model, torch may be the first to start them."""

    def build(self) -> Callable[[int], torch.Tensor]:
        """What computes it."""
        x, weight = torch.randn(3, 512), torch.randn(1024, 512)
        return lambda _: torch.ops.liteboost.linear(x, weight, None)


PRODUCT = "a product"
CASES = {
    "level 1": Case(level=1),
    "level 2": Case(),
    "wide": Case(sizes=WIDE, length=150, warm=5),
    "wide, level 1": Case(sizes=WIDE, length=150, warm=5, level=1),
    "wide, bf16": Case(sizes=WIDE, length=150, warm=5, dtype=torch.bfloat16),
    "recorded": Case(tokens=RECORDED),
    "kv8": Case(quant="kv8", tokens=RECORDED),
    "w8a16": Case(quant="w8a16"),
    "w8a16, wide": Case(quant="w8a16", sizes=WIDE, length=150, warm=5, dtype=torch.bfloat16),
    "w4a16": Case(quant="w4a16,group=32"),
    "w8a8": Case(quant="w8a8", length=40),
    "experts": Case("mixtral", length=40),
    "quantized experts": Case("mixtral", quant="w8a16", length=40),
    "delta rule": Case("qwen3_next"),
}


def _allocations() -> ctypes.CDLL:
    """The functions that refuse, told where the callers are: our library and torch's allocator."""
    library = ctypes.CDLL(None)
    library.refuse_from.argtypes = [ctypes.c_size_t] * 2
    library.refuse_open.argtypes = [ctypes.c_long]
    library.refuse_close.restype = ctypes.c_long
    path = native.status().path
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if str(path) in line or "/libc10.so" in line:
                begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                library.refuse_from(begin, end)
    return library


def _used() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _attempt(generate: Callable[[], torch.Tensor], expected: torch.Tensor) -> str:
    """How a generation ended: ``"right"``, ``"wrong"`` or the exception's name and words."""
    try:
        return "right" if torch.equal(generate(), expected) else "wrong"
    except Exception as fault:  # noqa: BLE001 - which one is what is asked
        kind = "MemoryError" if isinstance(fault, MemoryError) else type(fault).__name__
        return f"{kind}: {str(fault)[:300]}"


def _in_fork(action: Callable[[], Any]) -> tuple[int, Any]:
    """How a fork of this process that does ``action`` ends, and what it gives; None if nothing."""
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            try:
                answer.write(json.dumps(action()))
                answer.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        answer.seek(0)
        return os.waitstatus_to_exitcode(status), json.loads(answer.read() or "null")


class Runs:
    """The runs of one case."""

    def __init__(self, name: str) -> None:
        self.name = name
        case = Product() if name == PRODUCT else CASES[name]
        generate = case.build()
        self.generate = lambda: generate(case.length)
        for _ in range(2):  # a step is recorded by then, if there are enough of them
            generate(case.warm or case.length)
        self.library = _allocations()
        found = [_in_fork(lambda: self.generate().tolist()) for _ in range(2)]
        if found[0] != found[1] or found[0][0]:
            sys.exit(f"{name}: two generations differ, or end in a crash: {found}")
        self.expected = torch.tensor(found[0][1])

    def run(self, way: str, count: int) -> Iterator[dict[str, Any]]:
        """Each run's record."""
        yield from {
            "allocations": self._allocations,
            "threads": self._threads,
            "address space": self._limits,
        }[way](count)

    def _allocations(self, count: int) -> Iterator[dict[str, Any]]:
        def counting() -> int:
            self.library.refuse_open(0)
            self.generate()
            return self.library.refuse_close()

        _, total = _in_fork(counting)
        for i in range(count):
            yield self._forked(1 + total * i // count, self._refusing(1 + total * i // count))

    def _threads(self, count: int) -> Iterator[dict[str, Any]]:
        # More threads than a fork has stacks of, which are those of the threads that it has not.
        for i in range(count):
            room = (1 << 20) << i
            yield self._forked(room, self._limited(room, threads=32))

    def _refusing(self, n: int) -> Callable[[], str]:
        def refusing() -> str:
            self.library.refuse_open(n)
            try:
                return _attempt(self.generate, self.expected)
            finally:
                self.library.refuse_close()

        return refusing

    def _limits(self, count: int) -> Iterator[dict[str, Any]]:
        for i in range(count):
            # From 16 KiB to 1 GiB, each by the same factor more than the one before.
            room = int((1 << 14) * (1 << 16) ** (i / max(count - 1, 1)))
            yield self._forked(room, self._limited(room))

    def _limited(self, room: int, threads: int = 1) -> Callable[[], str]:
        def limited() -> str:
            torch.set_num_threads(threads)
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
            resource.setrlimit(resource.RLIMIT_AS, (_used() + room, resource.RLIM_INFINITY))
            try:
                return _attempt(self.generate, self.expected)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

        return limited

    def _forked(self, amount: int, action: Callable[[], str]) -> dict[str, Any]:
        status, said = _in_fork(lambda: [action(), _attempt(self.generate, self.expected)])
        refused, then = said or ("no answer", "no answer")
        return {"case": self.name, "amount": amount, "status": status, "refused": refused, "then": then}


def main(spec: str) -> None:
    native.load()
    torch.set_num_threads(1)
    runs: dict[str, Runs] = {}
    for name, way, count in json.loads(spec):
        if name not in runs:
            runs[name] = Runs(name)
        for record in runs[name].run(way, count):
            sys.stdout.write(json.dumps({"way": way, **record}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
