"""Rows of integers in the place of keys and values: what becomes of them is what becomes of their values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from liteboost_adaptor.kv_cache.int8_tensor import Int8KVTensor, rounded

pytestmark = pytest.mark.usefixtures("native_only")

ROWS = torch.tensor([2, 0])
#: Functions that only choose among rows, or copy them: nothing is rounded again.
KEEP: dict[str, Callable[[Any], Any]] = {
    "an item": lambda x: x[1],
    "a slice of positions": lambda x: x[:, 1:, ::2],
    "chosen": lambda x: x.index_select(2, ROWS),
    "repeated": lambda x: x.repeat_interleave(2, dim=1),
    "on the CPU": lambda x: x.cpu(),
    "on the device it is on": lambda x: x.to("cpu"),
    "there by name": lambda x: x.to(device=torch.device("cpu"), non_blocking=True),
    "of the dtype it has": lambda x: x.to(x.dtype),
    "cloned": lambda x: x.clone(),
    "contiguous": lambda x: x[:, ::2].contiguous(),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "a deep copy": copy.deepcopy,
}
#: Functions that take rows apart, or leave torch.
READ: dict[str, Callable[[Any], Any]] = {
    "a channel": lambda x: x[..., 3],
    "channels chosen": lambda x: x.index_select(-1, ROWS),
    "channels repeated": lambda x: x.repeat_interleave(2, dim=-1),
    "flat and repeated": lambda x: x.repeat_interleave(2),
    "another dtype": lambda x: x.to(torch.float64),
    "there in another dtype": lambda x: x.to("cpu", torch.float16),
    "numbers": lambda x: torch.from_numpy(x.numpy()),
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "added to": lambda x: x + 1,
}


@pytest.fixture(params=[False, True], ids=["scales behind", "scales apart"])
def rows(request: pytest.FixtureRequest) -> Int8KVTensor:
    made = rounded(torch.randn(2, 3, 4, 16), request.param)
    assert (made.scales is not None) == request.param
    return made


@pytest.mark.parametrize("what", KEEP)
def test_rows_stay_rows(rows: Int8KVTensor, what: str) -> None:
    found = KEEP[what](rows)
    assert type(found) is Int8KVTensor and (found.scales is None) == (rows.scales is None)
    expected = KEEP[what](rows.dequantized_kv())
    assert found.shape == expected.shape and torch.equal(found.dequantized_kv(), expected)


@pytest.mark.parametrize("what", READ)
def test_values_are_ordinary_tensors(rows: Int8KVTensor, what: str) -> None:
    found, expected = READ[what](rows), READ[what](rows.dequantized_kv())
    assert type(found) is torch.Tensor and found.dtype == expected.dtype and torch.equal(found, expected)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x.__setitem__((slice(None), 1), torch.linspace(-2, 3, 16)),
    "channels": lambda x: x.__setitem__((..., slice(2, 5)), 0.25),
    "data": lambda x: setattr(x, "data", torch.ones(2, 3, 4, 16) / 3),
    "in place": lambda x: x.mul_(-0.5),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_what_is_written_is_rounded_where_it_is_kept(rows: Int8KVTensor, what: str) -> None:
    kept, before = (rows.rows, rows.scales), rows.dequantized_kv().clone()
    expected = before.clone()
    WRITTEN[what](rows)
    WRITTEN[what](expected)
    found = rows.dequantized_kv()
    assert all(now is then for now, then in zip((rows.rows, rows.scales), kept, strict=True))
    again = rounded(expected, rows.scales is not None).dequantized_kv()
    is_new = (expected != before).any(-1)
    assert is_new.any() and torch.equal(found[is_new], again[is_new])
    # Values that are rounded already may be rounded once more, and are then the same up to the dtype.
    torch.testing.assert_close(found[~is_new], before[~is_new])


def test_layouts_are_made_of_each_other(rows: Int8KVTensor) -> None:
    is_apart = rows.scales is not None
    other = rows.laid_out(not is_apart)
    assert rows.laid_out(is_apart) is rows and (other.scales is None) == is_apart
    assert other.shape == rows.shape and torch.equal(other.dequantized_kv(), rows.dequantized_kv())
    assert torch.equal(other.laid_out(is_apart).rows, rows.rows)


def test_its_text_has_the_values(rows: Int8KVTensor) -> None:
    assert repr(rows) == f"Int8KVTensor({rows.dequantized_kv()!r})"
