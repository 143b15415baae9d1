"""Cases of what the package calls in the library and no schema of a public op describes.

As in `run`: ``run_cases(name, cases, number, note)`` runs cases of one of `NAMES` drawn from a seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from fuzz import table, tensors
from fuzz.run import THREADS, Note
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

ops = torch.ops.liteboost


def _exactly(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers in memory that ends where they end."""
    return torch.randn(size).to(dtype)


def _sequence(draw: DrawFn, note: Callable[[str], object]) -> None:
    """A program that appends a token to two caches, by `append` or by `both`, and views the result."""
    dtype = draw(tensors.DTYPES)
    rows, heads, capacity = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    widths = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    begin = draw(st.integers(0, capacity))
    length = draw(st.integers(0, capacity + 2 - begin))  # now and then there is no room
    memory = [_exactly((rows, heads, capacity, width), dtype) for width in widths]
    added = [_exactly((rows, heads, 1, width), dtype) for width in widths]
    if draw(st.booleans()):
        added = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in added]
    joined = draw(st.booleans())
    append = (
        "places 0 y 4 y 5 1 y 4 y 5 -1 -> 8\nboth 0 y 4 y 5 2 1 y 4 y 5 3 8\n"
        "part 0 y 4 y 5 1 2 -> 6\npart 1 y 4 y 5 1 2 -> 7"
        if joined
        else "append 0 y 4 y 5 2 2 -> 6\nappend 1 y 4 y 5 3 2 -> 7"
    )
    size = " ".join(map(str, (rows * heads, capacity * widths[0])))
    text = f"slots 4 2 10\n{append}\nalias 0 0 2 {size} {capacity * widths[0]} 1 -> 9\nreturn 6 7 9"
    note(f"program, {dtype}, memory {[tuple(each.shape) for each in memory]}, {begin=}, {length=}:\n{text}")
    before = [each.clone() for each in memory]
    number = ops._program_load(text, [])
    end = begin + length
    try:
        results = ops._program_run(number, [*memory, *added], [begin, length])
    except (ValueError, IndexError):
        assert end + 1 > capacity, "an append with room was refused"
        assert all(map(torch.equal, memory, before)), "an append that was refused wrote"
        return
    finally:
        ops._program_unload(number)
    assert end + 1 <= capacity, "an append without room"
    for whole, was, new, result in zip(memory, before, added, results, strict=False):
        was[:, :, end] = new[:, :, 0]
        assert torch.equal(whole, was) and torch.equal(result, was[:, :, begin : end + 1])
    assert torch.equal(results[2].reshape(-1), before[0].reshape(-1))


#: What a spoiled text is made of.
_LINES = (
    "add y 1 i 3 -> 3",
    "op aten::mul Tensor 2 0 t 0 1 y 3 -> 5",
    "op aten::split Tensor 3 0 t 5 1 i 2 2 i 0 -> 6",
    "item 6 1 -> 7",
    "like 0 float32 cpu 2 3 2 2 1",
    "size 0 0 1",
    "kv_buffer 0 0 1 1 1 -> 4",
    "kv_buffer 0 0 1 1 y 1 -> 4",
    "expect 0 1",
    "alias 0 0 2 3 2 2 1 -> 4",
    "append 0 y 1 y 2 0 0 -> 4",
    "op aten::add Scalar 2 0 t 7 1 y 4 -> 8",
    "op aten::gelu default 2 0 t 0 1 s 4:none -> 8",
    "drop 5",
    "return 8",
)


def _text(draw: DrawFn, note: Callable[[str], object]) -> None:
    """A text that is no program, or one that nobody runs: it is loaded, or refused with a typed error."""
    lines = ["slots 1 2 9", *draw(st.lists(st.sampled_from(_LINES), max_size=8))]
    words = "\n".join(lines).split(" ")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(words) - 1))
        spoiled = draw(
            st.sampled_from(["", "-1", "9999", "-9223372036854775808", "x", "->", "n", "[ 2", "9:"])
        )
        words[at] = spoiled
    text = " ".join(words)
    note(f"program text:\n{text}")
    try:
        ops._program_unload(ops._program_load(text, []))
    except (ValueError, RuntimeError, IndexError, TypeError):
        return


#: What makes several layers of one x in a call -> what makes one, and its arguments behind x.
_AT_ONCE = {
    "_linears": ("linear", ("weight", "bias")),
    "_linears_w8a8": ("linear_w8a8", ("weight", "scales", "bias")),
    "_linears_packed": ("linear_packed", ("tiles", "scales", "zero_points", "bias", "out_features")),
}


def _at_once(name: str, draw: DrawFn, note: Callable[[str], object]) -> None:
    """Some layers of one x in a call: the bits that each has alone."""
    single, names = _AT_ONCE[name]
    case = draw(table.load()[single])
    given, count = case.arguments, draw(st.integers(1, 3))
    isa, threads = draw(st.sampled_from(ops._isas())), draw(THREADS)
    note(f"{name} of {count} x ({table.describe(given)}) with {isa}, {threads} threads")
    ops._limit_isa(isa)
    torch.set_num_threads(threads)
    try:
        found = getattr(ops, name)(given["x"], *([given[name]] * count for name in names))
        alone = getattr(ops, single)(**given)
    finally:
        ops._limit_isa("")
        torch.set_num_threads(1)
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=0, equal_nan=True)


_KINDS: dict[str, Callable[[DrawFn, Callable[[str], object]], None]] = {
    "_program_run": _sequence,
    "_program_load": _text,
    **{name: functools.partial(_at_once, name) for name in _AT_ONCE},
}
NAMES = tuple(_KINDS)


def run_cases(name: str, cases: int, number: int, note: Note | None = None) -> int:
    """Run about ``cases`` cases of ``name`` drawn from seed ``number``, and return how many ran."""
    ran = 0

    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @seed(number)
    @given(st.data())
    def run(data: Any) -> None:
        nonlocal ran
        torch.manual_seed(data.draw(st.integers(0, 2**31 - 1)))
        _KINDS[name](data.draw, note or (lambda text: None))
        ran += 1

    run()
    return ran
