"""Arguments spoiled one at a time: the kernel must refuse exactly what the reference refuses."""

from __future__ import annotations

from typing import Any

import torch
from fuzz.table import Case
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from liteboost_adaptor.ops.paged_attention import PageError

#: What a number may be instead. No NaN: nothing is asked of it.
NUMBERS = [-1, 0, 1, 2, 3, 7, 10**6, -(2**40), 2**40]
FLOATS = [-1.0, -0.5, float("inf"), -float("inf")]
ERRORS = (TypeError, ValueError, IndexError, RuntimeError)
#: Those that are about values.
VALUES = (IndexError, PageError)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def spoiled(draw: DrawFn, cases: st.SearchStrategy[Case]) -> dict[str, Any]:
    """The arguments of a case, one of them replaced by something that may be wrong."""
    arguments = dict(draw(cases).arguments)
    name = draw(st.sampled_from([name for name, value in arguments.items() if value is not None]))
    arguments[name] = _spoil(draw, arguments[name])
    return arguments


def _spoil(draw: DrawFn, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _spoil_tensor(draw, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, torch.dtype):
        return draw(st.sampled_from(DTYPES))
    if isinstance(value, str):
        return draw(st.sampled_from(["", value + " ", value.upper(), "silu", "relu", "half"]))
    if isinstance(value, list):
        wrong = draw(st.sampled_from(NUMBERS))
        return draw(st.sampled_from([value[:-1], [*value, wrong], [wrong, *value[1:]], [*value[:-1], wrong]]))
    return draw(st.sampled_from(NUMBERS if isinstance(value, int) else FLOATS))


def _spoil_tensor(draw: DrawFn, tensor: Tensor) -> Tensor:
    ways = ["dtype", "longer", "one more dimension"]
    ways += ["one dimension less", "shorter", "transposed"] if tensor.dim() else []
    way = draw(st.sampled_from(ways))
    if way == "dtype":
        return torch.zeros(tensor.shape, dtype=draw(st.sampled_from(DTYPES)))
    if way == "one more dimension":
        return tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
    if way == "longer" and not tensor.dim():
        return tensor.reshape(1)
    dim = draw(st.integers(0, tensor.dim() - 1))
    if way == "longer":
        more = list(tensor.shape)
        more[dim] += 1
        return torch.ones(more, dtype=tensor.dtype)
    if way == "transposed":
        return tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
    if way == "shorter":
        return tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))
    return tensor.sum(dim, dtype=tensor.dtype)


def outcome(function: Any, arguments: dict[str, Any]) -> str:
    """The name of the one of `ERRORS` that is raised, else the shapes and dtypes of the results."""
    try:
        result = function(**arguments)
    except ERRORS as error:
        return next(kind.__name__ for kind in ERRORS if isinstance(error, kind))
    results = [result] if isinstance(result, Tensor) else result or ()
    return str([(tuple(each.shape), each.dtype) for each in results])


def is_about_values(function: Any, arguments: dict[str, Any]) -> bool:
    """Whether ``function`` refuses values, which a kernel that only says shapes does not have."""
    try:
        function(**arguments)
    except ERRORS as error:
        return isinstance(error, VALUES)
    return False


def to_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without their values, for the kernel that only says shapes."""
    return {
        name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()
    }
