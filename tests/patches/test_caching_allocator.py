"""Freed memory of large tensors is used again: when, how much is kept, and that nobody else can tell."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_models
from torch.profiler import ProfilerActivity, profile

import liteboost_adaptor
from liteboost_adaptor import native
from liteboost_adaptor.huggingface import caching_allocator, huge_pages

MIB = 1 << 20
PAGE = mmap.PAGESIZE
#: Bytes of the smallest tensor that is served.
LEAST = 256 << 10


def counts() -> dict[str, int]:
    names = ("free", "used", "mapped", "reused")
    return dict(zip(names, torch.ops.liteboost._caching_allocator_counts(), strict=True))


def tensor(nbytes: int, fill: int | None = None) -> torch.Tensor:
    made = torch.empty(nbytes, dtype=torch.uint8)
    return made if fill is None else made.fill_(fill)


def is_ours(made: torch.Tensor) -> bool:
    return caching_allocator.is_deleter(torch.ops.liteboost._deleter_of(made))


@pytest.fixture
def keep() -> Iterator[Callable[[int], bool]]:
    """Sets how many bytes are kept; nothing is, before and behind a test."""
    native.load()
    gc.collect()
    set_bytes = torch.ops.liteboost._set_caching_allocator
    assert set_bytes(0)
    yield set_bytes
    assert set_bytes(0)
    assert counts()["free"] == 0


def test_freed_memory_is_used_again(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    first = tensor(3 * MIB, 1)
    where, before = first.data_ptr(), counts()
    assert is_ours(first)
    del first
    assert counts()["free"] == 3 * MIB
    second = tensor(3 * MIB)
    assert second.data_ptr() == where
    assert counts()["reused"] == before["reused"] + 1
    assert counts()["mapped"] == before["mapped"]


def test_a_freed_page_is_not_mapped_anew(keep: Callable[[int], bool]) -> None:
    """What all of this is for: a tensor that comes again costs no page fault."""
    assert keep(64 * MIB)
    tensor(8 * MIB, 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        tensor(8 * MIB, 1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 200, f"{faults} faults, where 20 new tensors of 2,048 pages each take up to 40,960"


@pytest.mark.parametrize("nbytes", [0, 1, LEAST - 1])
def test_small_tensors_are_torchs_own(keep: Callable[[int], bool], nbytes: int) -> None:
    assert keep(64 * MIB)
    assert not is_ours(tensor(nbytes))


def test_what_is_larger_than_all_that_is_kept_is_torchs_own(keep: Callable[[int], bool]) -> None:
    assert keep(2 * MIB)
    assert is_ours(tensor(2 * MIB))
    assert not is_ours(tensor(2 * MIB + 1))


def test_the_oldest_is_given_back_first(keep: Callable[[int], bool]) -> None:
    assert keep(8 * MIB)
    first, second, third = tensor(3 * MIB), tensor(4 * MIB), tensor(3 * MIB)
    places = [each.data_ptr() for each in (first, second, third)]
    del first
    del second
    del third
    assert counts()["free"] == 7 * MIB
    assert tensor(4 * MIB).data_ptr() == places[1]
    assert tensor(3 * MIB).data_ptr() == places[2]


def test_what_is_not_needed_again_is_given_back(keep: Callable[[int], bool]) -> None:
    """Who serves requests of all lengths needs memory of all sizes sooner or later."""
    limit = 16 * MIB
    assert keep(limit)
    tensor(5 * MIB)
    times = 8 * limit // LEAST
    for _ in range(times):
        tensor(LEAST)
    assert counts()["free"] == 5 * MIB + LEAST
    for _ in range(times // limit + 8):
        tensor(LEAST)
    assert counts()["free"] == LEAST


def test_zeros_are_kept_memory_that_is_cleared(keep: Callable[[int], bool]) -> None:
    def zeros(nbytes: int) -> torch.Tensor:
        (made,) = torch.ops.liteboost._kept_zeros(nbytes)
        assert made.shape == (nbytes,) and made.dtype is torch.uint8 and not made.any()
        return made

    assert keep(64 * MIB)
    nbytes = 9 * MIB - 3
    first = zeros(nbytes)
    where, before = first.data_ptr(), counts()
    assert is_ours(first)
    first.fill_(255)
    del first
    again = zeros(nbytes)
    assert again.data_ptr() == where and counts()["mapped"] == before["mapped"]
    assert not torch.ops.liteboost._kept_zeros(64 * MIB + 1)
    del again
    assert keep(0)
    assert not torch.ops.liteboost._kept_zeros(nbytes)


def test_zeros_take_memory_where_they_are_used(keep: Callable[[int], bool]) -> None:
    def in_use() -> int:
        with open("/proc/self/status", encoding="utf-8") as status:
            (line,) = (line for line in status if line.startswith("RssAnon:"))
        return int(line.split()[1]) << 10

    def resident(made: torch.Tensor) -> int:
        with open("/proc/self/pagemap", "rb") as pages:
            pages.seek(8 * (made.data_ptr() // PAGE))
            states = numpy.frombuffer(pages.read(8 * (made.nbytes // PAGE)), numpy.uint64)
        return int((states >> numpy.uint64(63)).sum()) * PAGE

    assert keep(256 * MIB)
    (first,) = torch.ops.liteboost._kept_zeros(64 * MIB)
    first[: 8 * MIB].fill_(255)
    first[40 * MIB + 5] = 1
    used = resident(first)
    assert 8 * MIB < used <= 12 * MIB
    del first
    (again,) = torch.ops.liteboost._kept_zeros(64 * MIB)
    assert resident(again) == used
    before = in_use()
    assert not again.any()  # pages that are read and not written are one
    del again
    (again,) = torch.ops.liteboost._kept_zeros(64 * MIB)
    assert not again.any()
    assert in_use() - before < 16 * MIB


def test_a_lower_limit_gives_memory_back(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    held = [tensor(4 * MIB) for _ in range(8)]
    held.clear()
    assert counts()["free"] == 32 * MIB
    assert keep(8 * MIB)
    assert counts()["free"] == 8 * MIB


def test_a_little_larger_memory_serves_and_much_larger_does_not(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    where = tensor(9 * MIB).data_ptr()
    assert tensor(8 * MIB).data_ptr() == where
    assert tensor(7 * MIB).data_ptr() != where


def test_tensors_outlive_the_allocator(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    made = tensor(4 * MIB, 7)
    assert keep(0)
    assert not is_ours(tensor(4 * MIB))
    assert bool((made == 7).all())
    del made
    assert counts()["free"] == counts()["used"] == 0


def test_a_storage_can_grow_and_shrink(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    made = tensor(MIB, 3)
    made.resize_(4 * MIB)
    assert bool((made[:MIB] == 3).all())
    made.untyped_storage().resize_(0)
    assert counts()["used"] == 0


def test_arrays_of_numpy_keep_the_memory(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    array = tensor(MIB, 5).numpy()
    gc.collect()
    other = tensor(MIB, 6)
    assert other.data_ptr() != array.ctypes.data
    assert numpy.all(array == 5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * MIB), st.integers(0, 9)), max_size=40), st.integers(0, 12))
def test_nobody_is_given_what_somebody_has(sizes: list[tuple[int, int]], limit: int) -> None:
    """Tensors of any sizes that live for any time keep their values, and all bytes are accounted for."""
    native.load()
    torch.ops.liteboost._set_caching_allocator(limit * MIB)
    before = counts()["used"]
    try:
        held: dict[int, tuple[torch.Tensor, int]] = {}
        for fill, (nbytes, slot) in enumerate(sizes):
            made = tensor(nbytes, fill)
            held.pop(slot, None)
            held[slot] = made, fill
            del made
        assert all(bool((each == fill).all()) for each, fill in held.values())
        assert counts()["free"] <= limit * MIB
        mine = sum(-(-each.nbytes // PAGE) * PAGE for each, _ in held.values() if is_ours(each))
        assert mine <= counts()["used"] - before <= mine * 9 // 8
        held.clear()
        assert counts()["used"] == before
    finally:
        torch.ops.liteboost._set_caching_allocator(0)


def test_threads_take_and_give_at_once(keep: Callable[[int], bool]) -> None:
    assert keep(16 * MIB)
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for turn in range(200):
            nbytes = int(torch.randint(LEAST, 2 * MIB, (), generator=generator))
            fill = (seed * 31 + turn) % 251
            held.append((tensor(nbytes, fill), fill))
            if len(held) > 4:
                made, expected = held.pop(0)
                if not bool((made == expected).all()):
                    wrong.append(f"thread {seed}, turn {turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counts()["used"] == 0


def test_a_forked_child_can_allocate(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    mine = tensor(2 * MIB, 1)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            tensor(LEAST)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        children = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                other = torch.empty(2 * MIB, dtype=torch.uint8)
                os._exit(0 if other.data_ptr() != mine.data_ptr() else 1)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 20
    finally:
        stop.set()
        thread.join()


def test_the_profiler_sees_the_memory(keep: Callable[[int], bool]) -> None:
    assert keep(64 * MIB)
    tensor(3 * MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = tensor(3 * MIB)
    assert sum(event.self_cpu_memory_usage for event in profiled.key_averages()) == made.nbytes


def test_without_memory_torch_raises_what_it_raises(keep: Callable[[int], bool]) -> None:
    """What is kept is given back first; behind that torch's own allocator says what is wrong."""
    assert keep(1 << 60)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        tensor(1 << 50)


def test_a_negative_size_is_refused() -> None:
    native.load()
    with pytest.raises(ValueError, match="bytes must be 0 or more, got -1"):
        torch.ops.liteboost._set_caching_allocator(-1)


# -- as a part of a bound model ----------------------------------------------------------------------------


def _outcomes() -> list[tuple[str, str]]:
    rules = liteboost_adaptor.status().to_dict()["rules"]
    row = next(rule for rule in rules if rule["id"] == caching_allocator.RULE)
    return [(row["state"], row["reason"])]


def test_it_is_on_while_a_model_is_bound(keep: Callable[[int], bool]) -> None:
    first, second = tiny_models.build("llama"), tiny_models.build("llama")
    assert not is_ours(tensor(MIB))
    liteboost_adaptor.apply(first)
    liteboost_adaptor.apply(second)
    assert is_ours(tensor(MIB))
    assert _outcomes()[0][0] == "applied"
    liteboost_adaptor.undo(first)
    assert is_ours(tensor(MIB))
    liteboost_adaptor.undo(second)
    assert not is_ours(tensor(MIB))
    assert counts()["free"] == 0
    assert _outcomes()[0][0] == "idle"


def test_it_ends_with_the_last_model(keep: Callable[[int], bool]) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    assert is_ours(tensor(MIB))
    del model
    gc.collect()
    assert not is_ours(tensor(MIB))


@pytest.mark.parametrize("options", [{"level": 1}, {"disable": caching_allocator.RULE}], ids=str)
def test_it_can_be_turned_off(keep: Callable[[int], bool], options: dict) -> None:
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model, **options)
    assert not is_ours(tensor(MIB))
    liteboost_adaptor.undo(model)


@pytest.mark.parametrize("available", [0, -(1 << 30)], ids=str)
def test_short_memory_leaves_torchs_allocator(
    keep: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(caching_allocator, "available_bytes", lambda: available)
    model = tiny_models.build("llama")
    liteboost_adaptor.apply(model)
    assert not is_ours(tensor(MIB))
    assert _outcomes() == [("idle", "memory is short")]
    liteboost_adaptor.undo(model)
    assert _outcomes() == [("idle", "")]


@pytest.mark.skipif(not huge_pages._kernel_has_them(), reason="this kernel has no huge pages")
def test_weights_in_its_memory_are_torchs_own(keep: Callable[[int], bool]) -> None:
    """They may be moved, as those that torch's own allocator has made."""
    assert keep(64 * MIB)
    weight = torch.nn.Parameter(torch.empty(1024, 1024))
    assert is_ours(weight)
    assert huge_pages._is_torchs_own(weight)
