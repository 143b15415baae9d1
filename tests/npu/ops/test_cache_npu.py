"""`kv_append` on the NPU: one launch into a cache with heads behind places, as the operator has it."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.compare import DTYPES
from torch import Tensor

from liteboost_adaptor import native_npu
from liteboost_adaptor.ops import ops
from liteboost_adaptor.selftest.compare import placed

NARROW = [torch.bfloat16, torch.float16]
LAUNCHES = {True: ["ScatterPaKvCache"], False: ["ScatterNdUpdate"] * 2}


def cache(blocks: int, heads: int, size: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A view [blocks, heads, size, dim] of memory with places before heads."""
    return torch.randn(blocks, size, heads, dim).to(dtype).transpose(1, 2)


def make(batch: int, length: int, dtype: torch.dtype, heads: int = 4) -> dict[str, Tensor]:
    """New tokens as a projection gives them, and slots all over a cache of five blocks."""
    return {
        "keys": cache(5, heads, 16, 64, dtype),
        "values": cache(5, heads, 16, 32, dtype),
        "key": cache(batch, heads, length, 64, dtype),
        "value": cache(batch, heads, length, 32, dtype),
        "slots": torch.randperm(80)[: batch * length].view(batch, length),
    }


def check(arguments: dict[str, Tensor]) -> npu_ops.Run:
    """The very bits of the reference on the CPU, in all of both caches."""
    found = npu_ops.run("kv_append", **arguments)
    wanted = placed(arguments, "cpu")
    ops()["kv_append"].reference(**wanted)
    assert len(found.results) == 2
    for result, exact in zip(found.results, (wanted["keys"], wanted["values"]), strict=True):
        assert torch.equal(result, exact)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (1, 9), (2, 7)])
def test_values_and_launches(dtype: torch.dtype, batch: int, length: int) -> None:
    found = check(make(batch, length, dtype))
    assert found.reasons == [] and found.launches == LAUNCHES[dtype in NARROW]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_what_a_rotation_gives(dtype: torch.dtype) -> None:
    """Contiguous with heads before their one position: the same memory."""
    arguments = make(3, 1, dtype)
    found = check({**arguments, "key": arguments["key"].contiguous()})
    assert found.reasons == [] and found.launches == LAUNCHES[dtype in NARROW]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_other_layouts_of_tokens_and_slots_are_copied(dtype: torch.dtype) -> None:
    arguments = make(2, 7, dtype)
    found = check({**arguments, "key": arguments["key"].contiguous()})
    assert found.reasons == [] and found.launches[-1] == "ScatterPaKvCache" and len(found.launches) == 2
    found = check({**arguments, "slots": arguments["slots"].t().contiguous().t()})
    assert found.reasons == [] and found.launches[-1] == "ScatterPaKvCache" and len(found.launches) == 2


def test_one_head_may_lie_in_either_order() -> None:
    arguments = make(2, 3, torch.bfloat16, heads=1)
    found = check({name: each.contiguous() for name, each in arguments.items()})
    assert found.reasons == [] and found.launches == ["ScatterPaKvCache"]


def test_blocks_of_a_larger_buffer() -> None:
    arguments = make(2, 3, torch.bfloat16)
    arguments["slots"] = torch.randperm(48)[:6].view(2, 3)
    arguments |= {"keys": arguments["keys"][1:4], "values": arguments["values"][2:]}
    found = check(arguments)
    assert found.reasons == [] and found.launches == ["ScatterPaKvCache"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_another_order_runs_as_the_reference(dtype: torch.dtype) -> None:
    arguments = make(2, 3, dtype)
    first = {name: arguments[name].contiguous() for name in ("keys", "values")}
    for each in (first, {"keys": first["keys"]}, {"values": cache(5, 4, 20, 32, dtype)[:, :, :16]}):
        assert check({**arguments, **each}).reasons == ["a cache whose heads are not side by side"]


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
def test_nothing(batch: int, length: int) -> None:
    found = check(make(batch, length, torch.bfloat16))
    assert found.reasons == ["no elements"] and found.launches == []


def test_versions_are_counted_up_once_a_call() -> None:
    for heads_first in (False, True):
        given = placed(make(2, 3, torch.bfloat16), "npu")
        if heads_first:
            given |= {name: given[name].contiguous() for name in ("keys", "values")}
        with torch.no_grad():
            torch.ops.liteboost.kv_append(**given)
            before = given["keys"]._version, given["values"]._version
            torch.ops.liteboost.kv_append(**given)
        assert (given["keys"]._version, given["values"]._version) == (before[0] + 1, before[1] + 1)


def test_bad_arguments_are_refused_and_not_counted() -> None:
    given = placed(make(2, 3, torch.bfloat16), "npu")
    torch.ops.liteboost._npu_forget_counts()
    with pytest.raises(
        ValueError, match=r"liteboost::kv_append: slots must have shape .* = \[2, 3\], got \[6\]"
    ):
        torch.ops.liteboost.kv_append(**{**given, "slots": given["slots"].flatten()})
    assert native_npu.calls() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_call_writes_to_the_slots_of_each_replay(dtype: torch.dtype) -> None:
    arguments = make(2, 1, dtype)
    given, wanted = placed(arguments, "npu"), placed(arguments, "cpu")
    with torch.no_grad():
        # What is used for the first time is compared, which no capture does.
        torch.ops.liteboost.kv_append(**given)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            torch.ops.liteboost.kv_append(**given)
        ops()["kv_append"].reference(**wanted)
        for slots in ([[3], [70]], [[4], [71]]):
            for name, fresh in (("slots", torch.tensor(slots)), ("key", torch.randn(2, 4, 1, 64).to(dtype))):
                given[name].copy_(fresh)
                wanted[name].copy_(fresh)
            graph.replay()
            ops()["kv_append"].reference(**wanted)
            assert torch.equal(given["keys"].cpu(), wanted["keys"])
            assert torch.equal(given["values"].cpu(), wanted["values"])
