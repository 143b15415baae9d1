"""Symbolic sizes of an operator's results, which are computed once for arguments of the same forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from liteboost_adaptor.program.recording import Place
from liteboost_adaptor.program.symbolic_forms import SymbolicForms, form_of
from liteboost_adaptor.program.symbolic_tensor import SymbolicTensor
from liteboost_adaptor.program.symbols import Symbols

aten = torch.ops.aten


class Rows:
    """Tensors of one number of rows, another in every run."""

    def __init__(self, rows: int = 5) -> None:
        self.rows, self.symbols = rows, Symbols()
        self.length = self.symbols.of(rows, Place("input", "x", dim=0))
        self.forms = SymbolicForms(self.symbols.fakes)

    def of(self, *others: int, dtype: torch.dtype = torch.float32) -> SymbolicTensor:
        real = torch.zeros(self.rows, *others, dtype=dtype)
        return SymbolicTensor(real, self.symbols.shaped(real, {0: self.length}, {0: self.length}))

    def anew(self, func: Any, args: Any) -> list[Any]:
        """As `results`, of nothing that was computed before."""
        return SymbolicForms(self.symbols.fakes).results(func, args, {})


def shown(made: list[Any]) -> list[Any]:
    return [form_of(one) for one in made]


CALLS: dict[str, Callable[[Rows], Any]] = {
    "transpose": lambda rows: (aten.transpose.int, (rows.of(4, 6), 1, 2)),
    "transpose rows": lambda rows: (aten.transpose.int, (rows.of(4, 6), 0, 2)),
    "view": lambda rows: (aten.view.default, (rows.of(4, 6), [rows.length, 24])),
    "view rows": lambda rows: (aten.view.default, (rows.of(4, 6), [rows.length * 2, 12])),
    "unsqueeze": lambda rows: (aten.unsqueeze.default, (rows.of(4, 6), 0)),
    "select": lambda rows: (aten.select.int, (rows.of(4, 6), 1, 2)),
    "slice": lambda rows: (aten.slice.Tensor, (rows.of(4, 6), 2, 1, 5)),
    "add": lambda rows: (aten.add.Tensor, (rows.of(4, 6), rows.of(4, 6))),
    "mul": lambda rows: (aten.mul.Tensor, (rows.of(4, 6), torch.ones(4, 6))),
    "cat": lambda rows: (aten.cat.default, ([rows.of(4), rows.of(4)], 1)),
    "cat rows": lambda rows: (aten.cat.default, ([rows.of(4), torch.ones(2, 4)], 0)),
    "copy": lambda rows: (aten._to_copy.default, (rows.of(4, 6),)),
    "write": lambda rows: (
        aten.index_copy_.default,
        (torch.zeros(9, 4), 0, rows.of(dtype=torch.long), rows.of(4)),
    ),
    "write to one, read another": lambda rows: (
        aten.index_add_.default,
        (rows.of(4), 0, rows.of(dtype=torch.long), rows.of(4)),
    ),
    "narrow": lambda rows: (aten.narrow.default, (torch.zeros(9, 4), 0, 2, rows.length)),
    "split": lambda rows: (aten.split.Tensor, (rows.of(4, 6), 2, 1)),
    "linear": lambda rows: (torch.ops.liteboost.linear.default, (rows.of(6), torch.randn(3, 6), None)),
    "norm": lambda rows: (torch.ops.liteboost.rms_norm.default, (rows.of(4, 6), torch.ones(6), 1e-6)),
}


@pytest.mark.parametrize("which", CALLS)
def test_the_second_time_gives_what_the_first_gave(which: str) -> None:
    rows = Rows()
    with torch.no_grad():
        func, args = CALLS[which](rows)
        first, decided = rows.forms.results(func, args, {}), list(rows.symbols._shapes.guards)
        again = rows.forms.results(*CALLS[which](rows), {})
        assert shown(again) == shown(first) == shown(rows.anew(func, args))
        assert {str(guard.expr) for guard in rows.symbols._shapes.guards} == {str(g.expr) for g in decided}


def test_another_form_is_another_result() -> None:
    rows, linear = Rows(), torch.ops.liteboost.linear.default
    with torch.no_grad():
        for outputs in (3, 8, 3):
            (made,) = rows.forms.results(linear, (rows.of(6), torch.randn(outputs, 6), None), {})
            assert list(made.shape) == [rows.length, outputs]
        for dtype in (torch.bfloat16, torch.float32):
            (made,) = rows.forms.results(aten._to_copy.default, (rows.of(6),), {"dtype": dtype})
            assert made.dtype == dtype
        for dim in (0, 1, True):
            (made,) = rows.forms.results(aten.unsqueeze.default, (rows.of(6), dim), {})
            assert made.size(int(dim)) == 1


def test_views_of_one_memory_begin_where_they_do() -> None:
    rows, memory = Rows(), torch.zeros(40, 3)
    for start in (4, 20):
        part = memory[start:]
        (made,) = rows.forms.results(aten.narrow.default, (part, 0, 2, rows.length), {})
        assert made.storage_offset() == 3 * (start + 2)


def test_what_is_written_to_anywhere_is_asked_for_once() -> None:
    """Layers that keep what they have in one memory, one behind the other."""
    rows, memory, asked = Rows(), torch.zeros(40, 3), []
    computed = rows.forms._computed

    def counted(*args: Any) -> Any:
        asked.append(args)
        return computed(*args)

    rows.forms._computed = counted  # type: ignore[method-assign]
    at = rows.of(dtype=torch.long)
    for start in (4, 20):
        layer = memory[start : start + 10]
        rows.forms.results(aten.index_copy_.default, (layer, 0, at, rows.of(3)), {})
    assert len(asked) == 1
    rows.forms.results(aten.index_copy_.default, (memory[4:15], 0, at, rows.of(3)), {})
    assert len(asked) == 2, "of another size"


def test_an_operator_of_somebody_else_is_asked_each_time() -> None:
    library, asked = torch.library.Library("forms_of_others", "DEF"), []
    library.define("made(Tensor x) -> Tensor")
    name = "forms_of_others::made"

    def fake(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return x.new_empty(x.shape)

    torch.library.register_fake(name, fake, lib=library)
    rows = Rows()
    for _ in range(2):
        rows.forms.results(torch.ops.forms_of_others.made.default, (rows.of(3),), {})
    assert len(asked) == 2


def test_what_torch_has_no_sizes_for_is_said_each_time() -> None:
    rows = Rows()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            rows.forms.results(aten.view.default, (rows.of(4), [7, 7]), {})


def test_what_is_written_to_is_not_what_is_read_though_both_have_one_form() -> None:
    rows, at = Rows(), torch.zeros(9, 4, dtype=torch.long)
    (made,) = rows.forms.results(
        aten.gather.out, (torch.zeros(9, 4), 0, at), {"out": torch.zeros(9, 4)}
    )  # of one tensor for both torch makes an error
    assert list(made.shape) == [9, 4]


def test_a_tensor_without_strides_is_left_to_torch() -> None:
    rows, sparse = Rows(), torch.eye(5).to_sparse()
    assert rows.forms._key(aten.mm.default, (sparse, rows.of(4)), {}) is None


def test_what_was_made_outside_of_inference_mode_is_written_to_outside_of_it() -> None:
    rows, held = Rows(), torch.zeros(9, 4)
    at, added = rows.of(dtype=torch.long), rows.of(4)
    for mode in (True, False):
        with torch.inference_mode(mode), torch.no_grad():
            (made,) = rows.forms.results(aten.index_copy_.default, (held, 0, at, added), {})
            assert not made.is_inference()
