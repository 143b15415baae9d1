"""One scenario of `raced`: ``python -m fuzz.raced_worker BUILD_FOLDER SCENARIO`` says last what ran."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

THREADS = 4
ROUNDS = 200


def together(*actions: Callable[[], object]) -> None:
    """Run each action in a thread of its own, begun at one moment; raise what any of them raised."""
    faults: list[BaseException] = []
    barrier = threading.Barrier(len(actions))

    def guarded(action: Callable[[], object]) -> None:
        try:
            barrier.wait()
            action()
        except BaseException as fault:  # noqa: BLE001 - handed to the main thread
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


#: What `tests/csrc/planted_races.cpp` can do, with a race or without.
PLANTED = (
    "a counter of several threads",
    "an element that all parts of a region write",
    "memory read without order",
)


def planted(folder: Path, name: str, sound: bool) -> str:
    """The call of one race, or the same call ``sound``, without it."""
    library = ctypes.CDLL(str(folder / "csrc" / "libplanted_races.so"))
    library.planted_read.restype = ctypes.c_float
    numbers = (ctypes.c_float * 64)()
    count, arrived, said = ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0)
    places = ctypes.byref(arrived), ctypes.byref(said)
    torch.set_num_threads(THREADS)
    if name == PLANTED[0]:
        together(
            *[lambda: library.planted_count(ctypes.byref(count), ctypes.byref(arrived), 1000, sound)] * 2
        )
    elif name == PLANTED[1]:
        library.planted_region(numbers, 64, sound)
    else:
        together(
            lambda: library.planted_read(numbers, *places, sound),
            lambda: library.planted_write(numbers, *places, sound),
        )
    return "done"


def programs() -> str:
    """Threads run one program, each on memory of its own, while others are loaded and unloaded."""
    ops = torch.ops.liteboost
    weight = torch.randn(4, 4)
    text = """slots 5 2 14
op liteboost::linear default 3 0 t 4 1 t 0 2 n -> 8
append 1 y 6 y 7 5 2 -> 9
places 2 y 6 y 7 3 y 6 y 7 -1 -> 12
both 2 y 6 y 7 5 3 y 6 y 7 5 12
part 2 y 6 y 7 1 2 -> 10
part 3 y 6 y 7 1 2 -> 11
op aten::mul Tensor 2 0 t 8 1 t 8 -> 13
return 9 10 11 13"""
    shared = ops._program_load(text, [weight])

    def work() -> None:
        memory = [torch.zeros(1, 2, 2 * ROUNDS, 4) for _ in range(3)]
        x, new = torch.randn(1, 4), torch.randn(1, 2, 1, 4)
        for at in range(ROUNDS):
            own = ops._program_load(text, [weight])
            first = ops._program_run(shared, [*memory, x, new], [0, at])
            second = ops._program_run(own, [*[each.clone() for each in memory], x, new], [0, at])
            ops._program_unload(own)
            for one, other in zip(first, second, strict=True):
                if not torch.equal(one, other):
                    raise AssertionError("two programs differ")

    together(*[work] * THREADS)
    return f"{THREADS} threads, {ROUNDS} runs each of a shared and of an own program"


def recorded_steps() -> str:
    """Threads generate from one model whose steps were recorded."""
    from support import tiny_models

    import liteboost_adaptor

    model = tiny_models.build("llama")
    inputs = tiny_models.example_inputs(model)
    liteboost_adaptor.apply(model, level=2)
    torch.set_num_threads(1)
    expected = [tiny_models.generate(model, inputs, 64) for _ in range(2)][-1]

    def work() -> None:
        for _ in range(2):
            if not torch.equal(tiny_models.generate(model, inputs, 64), expected):
                raise AssertionError("another text")

    together(*[work] * THREADS)
    return f"{THREADS} threads, 2 generations of 64 tokens each"


def paged_attention() -> str:
    """Requests of several lengths in blocks of a cache, over the threads of a region, in two threads."""
    torch.set_num_threads(THREADS)
    lengths, kv_lengths, block = [65, 1, 130, 1], [700, 900, 130, 33], 16
    queries = torch.tensor([0, *lengths]).cumsum(0).int()
    keys = torch.tensor([0, *kv_lengths]).cumsum(0).int()
    columns = -(-max(kv_lengths) // block)
    table = torch.randperm(columns * len(lengths)).reshape(len(lengths), columns).int()
    cache = torch.randn(2, columns * len(lengths), block, 2, 64)
    ran = 0
    for dtype in (torch.float32, torch.bfloat16):
        k, v = cache.to(dtype)
        q = torch.randn(sum(lengths), 8, 64).to(dtype)

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            torch.set_num_threads(THREADS)
            return torch.ops.liteboost.paged_attention(
                q, k, v, queries, keys, table, 0.125, True, 0, 0.0, None
            )

        expected = call()

        def work(call: Callable[..., torch.Tensor] = call, expected: torch.Tensor = expected) -> None:
            for _ in range(5):
                if not torch.equal(call(), expected):
                    raise AssertionError("another result")

        for isa in torch.ops.liteboost._isas():
            torch.ops.liteboost._limit_isa(isa)
            expected.copy_(call())
            together(work, work)
            ran += 10
        torch.ops.liteboost._limit_isa("")
    return f"{ran} calls of {len(lengths)} requests with {THREADS} threads"


def collectives() -> str:
    """Ranks of one segment, each a thread of this process, which maps it once (`one_mapping.cpp`)."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group

    ops = torch.ops.liteboost_parallel
    name = f"/liteboost_raced_{os.getpid()}"
    groups = []
    for rank in range(THREADS):
        groups.append(dist.ProcessGroup(rank, THREADS))
        _register_process_group(f"raced{rank}", groups[-1])
    sizes = [3, 1, 4, 1]

    def work(rank: int) -> None:
        group = f"raced{rank}"
        ops._share_memory(group, name, 1 << 17, 60.0)
        for at in range(ROUNDS):
            for count in (5, 1000, 40_000):  # the last in several pieces
                for dtype in (torch.float32, torch.bfloat16):
                    x = torch.full((count,), float(rank + at % 3), dtype=dtype)
                    total = ops.all_reduce(x, group)
                    if not (total == 6 + 4 * (at % 3)).all():
                        raise AssertionError(f"rank {rank}: a wrong sum")
            gathered = ops.all_gather(torch.full((7, sizes[rank]), float(rank)), sizes, group)
            wanted = torch.repeat_interleave(torch.arange(4.0), torch.tensor(sizes))
            if not (gathered == wanted).all():
                raise AssertionError(f"rank {rank}: gathered otherwise")
        ops._unshare_memory(group)

    together(*[lambda rank=rank: work(rank) for rank in range(THREADS)])
    return f"{THREADS} ranks, {7 * ROUNDS} collectives"


def every_op() -> str:
    """Drawn cases of every op, whose regions take up to 4 threads."""
    from fuzz import run, table

    counts = {name: run.valid(name, 40, 77, threads=THREADS) for name in sorted(table.load())}
    return f"{sum(counts.values())} cases of {len(counts)} ops"


def main(folder: str, scenario: str) -> None:
    # Before the package looks for a library of its own.
    torch.ops.load_library(f"{folder}/_C.so")
    scenarios: dict[str, Callable[[], str]] = {
        **{f"planted: {name}": lambda name=name: planted(Path(folder), name, False) for name in PLANTED},
        **{f"sound: {name}": lambda name=name: planted(Path(folder), name, True) for name in PLANTED},
        "programs": programs,
        "recorded steps": recorded_steps,
        "paged attention": paged_attention,
        "collectives": collectives,
        "ops": every_op,
    }
    sys.stdout.write(scenarios[scenario]() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
