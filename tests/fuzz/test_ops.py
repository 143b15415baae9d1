"""Every op of the library on shapes, strides, dtypes and parameters that nobody chose.

`make asan` runs the same cases, many more of them, under the address and undefined behaviour sanitizers.
"""

from __future__ import annotations

import pytest
import torch
from fuzz import private, run, table

pytestmark = pytest.mark.usefixtures("native_only")

CASES = 40
SPOILED = 12
TIMES_MORE = 25  # in the second tier


def public_ops() -> set[str]:
    """Names of the ops that are registered, whatever their overload."""
    schemas = torch._C._jit_get_all_schemas()
    names = {
        schema.name.removeprefix("liteboost::") for schema in schemas if schema.name.startswith("liteboost::")
    }
    return {name for name in names if not name.startswith("_")}


OPS = sorted(table.load())


def test_every_op_is_fuzzed() -> None:
    assert public_ops() == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_results_and_arguments(name: str) -> None:
    assert run.valid(name, CASES, number=1) >= CASES


@pytest.mark.parametrize("name", OPS)
def test_refuses_what_the_reference_refuses(name: str) -> None:
    assert run.spoiled(name, SPOILED, number=1) >= SPOILED


@pytest.mark.parametrize("name", private.NAMES)
def test_what_no_public_op_describes(native_only: None, name: str) -> None:
    assert private.run_cases(name, CASES, number=1) >= CASES


@pytest.mark.full
@pytest.mark.parametrize("name", OPS)
def test_many_more(name: str) -> None:
    assert run.valid(name, TIMES_MORE * CASES, number=2) >= TIMES_MORE * CASES
    assert run.spoiled(name, TIMES_MORE * SPOILED, number=2) >= TIMES_MORE * SPOILED
