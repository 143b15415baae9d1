"""Runs cases of the table: each at an instruction set and a number of threads drawn with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fuzz import invalid, table
from fuzz.bounds import ops
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

THREADS = st.sampled_from([1, 1, 1, 2, 3])
#: Called with the text of each case before it runs.
Note = Callable[[str], object]


def valid(name: str, cases: int, number: int, note: Note | None = None, threads: int = 0) -> int:
    """Run about ``cases`` cases of op ``name`` drawn from seed ``number``, and return how many ran.

    With ``threads`` each has so many.
    """
    isas = st.sampled_from(torch.ops.liteboost._isas())

    def one(values: int, isa: str, threads: int, case: table.Case) -> None:
        written = {name: copy_of(case.arguments[name]) for name in ops()[name].written}
        arguments = {**case.arguments, **written}
        before = {key: _bits(value) for key, value in case.arguments.items() if isinstance(value, Tensor)}
        torch.ops.liteboost._limit_isa(isa)
        torch.set_num_threads(threads)
        try:
            result = table.op(name)(**arguments)
            results = [result] if isinstance(result, Tensor) else list(result or ())
            # Here: a result that is defined by other ops is theirs with these instructions.
            case.check(results + [each.contiguous() for each in written.values()])
        finally:
            torch.ops.liteboost._limit_isa("")
            torch.set_num_threads(1)
        for key, bits in before.items():
            given = arguments[key]
            if key in written:  # but only where it is
                given.copy_(case.arguments[key])
            assert torch.equal(bits, _bits(given)), f"{key} was written to"
            for each in results:
                assert (
                    not each.numel()
                    or each.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
                )

    return _run(
        one,
        name,
        cases,
        number,
        note,
        isa=isas,
        threads=st.just(threads) if threads else THREADS,
        case=table.load()[name],
    )


def spoiled(name: str, cases: int, number: int, note: Note | None = None) -> int:
    """The same with one argument spoiled: kernel, meta kernel and reference must agree on what is refused."""

    def one(values: int, arguments: dict[str, Any]) -> None:
        expected = invalid.outcome(ops()[name].reference, arguments)
        assert invalid.outcome(table.op(name), arguments) == expected
        if not invalid.is_about_values(ops()[name].reference, arguments):
            assert invalid.outcome(table.op(name), invalid.to_meta(arguments)) == expected

    return _run(one, name, cases, number, note, arguments=invalid.spoiled(table.load()[name]))


def _run(
    one: Callable[..., None], name: str, cases: int, number: int, note: Note | None, **strategies: Any
) -> int:
    ran = 0

    # The values come from a seed drawn with the case, before the tensors are made.
    def counted(values: int, **drawn: Any) -> None:
        nonlocal ran
        if note:
            arguments = drawn.get("arguments") or drawn["case"].arguments
            note(
                f"{name}({table.describe(arguments)}) with {drawn.get('isa')}, {drawn.get('threads')} threads"
            )
        one(values, **drawn)
        ran += 1

    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @seed(number)
    @given(_seeded(strategies))
    def run(drawn: dict[str, Any]) -> None:
        counted(**drawn)

    run()
    return ran


@st.composite
def _seeded(draw: Any, strategies: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    values = draw(st.integers(0, 2**31 - 1))
    torch.manual_seed(values)
    return {"values": values, **{key: draw(strategy) for key, strategy in strategies.items()}}


def copy_of(tensor: Tensor) -> Tensor:
    """The same tensor in an allocation of its own that is as the given one's."""
    memory = tensor.untyped_storage().clone()
    return torch.tensor([], dtype=tensor.dtype).set_(
        memory, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _bits(tensor: Tensor) -> Tensor:
    """The whole allocation behind ``tensor``, as bytes that are compared as such."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
