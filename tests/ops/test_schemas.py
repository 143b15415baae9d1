"""Python's and C++'s schemas are one, every op is complete, and the fallback ops behave like the native."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.processes import python_json

from liteboost_adaptor import ops

NAMES = sorted(ops.ops())

# Runs in a process where the native library is never loaded.
FALLBACK = """
import json, torch
from liteboost_adaptor import ops
ops.register_reference_ops()
ops.register_reference_ops()
namespace = torch.ops.liteboost
x, w = torch.randn(3, 8), torch.randn(8)
compiled = torch.compile(lambda x: namespace.rms_norm(x, w, 1e-6) + 1, fullgraph=True, backend="eager")
try:
    namespace.rms_norm(x, w.clone().requires_grad_(), 1e-6)
    refusal = ""
except RuntimeError as error:
    refusal = str(error)
print(json.dumps({
    "schemas": {name: str(getattr(namespace, name).default._schema) for name in ops.ops()},
    "same": torch.equal(namespace.rms_norm(x, w, 1e-6), ops.norm.rms_norm(x, w, 1e-6)),
    "meta": list(namespace.rms_norm(x.to("meta"), w.to("meta"), 1e-6).shape),
    "compiled": torch.equal(compiled(x), namespace.rms_norm(x, w, 1e-6) + 1),
    "refusal": refusal,
}))
"""


@pytest.fixture(scope="module")
def fallback() -> dict:
    return python_json(FALLBACK, is_forked=True)


def registered(name: str) -> str:
    return str(getattr(torch.ops.liteboost, name).default._schema)


@pytest.mark.parametrize("name", NAMES)
def test_python_and_native_schema_are_the_same(name: str) -> None:
    # Parsed, so that spelling of defaults does not matter: the parser is torch's.
    assert registered(name) == str(torch._C.parse_schema(f"liteboost::{ops.ops()[name].schema}"))


def test_every_native_op_has_a_reference(native_only: None) -> None:
    found = {
        schema.name.removeprefix("liteboost::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("liteboost::")
    }
    assert {name for name in found if not name.startswith("_")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_reference_takes_the_arguments_of_the_schema(name: str) -> None:
    op = ops.ops()[name]
    parameters = inspect.signature(op.reference).parameters
    arguments = torch._C.parse_schema(f"liteboost::{op.schema}").arguments
    assert list(parameters) == [argument.name for argument in arguments]
    for argument in arguments:
        default = parameters[argument.name].default
        if argument.has_default_value():
            assert default == argument.default_value
        else:
            assert default is inspect.Parameter.empty


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_documented(name: str) -> None:
    text = inspect.getdoc(ops.ops()[name].reference) or ""
    for section in ("Args:", "Returns:", "Raises:", "Numerics:", "Source:"):
        assert section in text, section
    for parameter in inspect.signature(ops.ops()[name].reference).parameters:
        assert f"\n    {parameter}: " in text, parameter


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["CPU", "Meta"])
def test_kernels_are_registered(native_only: None, name: str, key: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"liteboost::{name}", key)


#: What an op changes beside returning something: the states of a recurrence, a cache.
WRITTEN = {
    "recurrent_gated_delta_rule": ("state",),
    "causal_conv1d_update": ("state",),
    "kv_append": ("keys", "values"),
    "rope_": ("q", "k"),
}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_is_mutated_and_nothing_is_aliased(name: str) -> None:
    schema = torch._C.parse_schema(f"liteboost::{ops.ops()[name].schema}")
    written = tuple(value.name for value in schema.arguments if value.alias_info is not None)
    assert written == ops.ops()[name].written == WRITTEN.get(name, ())
    assert all(value.alias_info.is_write for value in schema.arguments if value.name in written)
    assert all(value.alias_info is None for value in schema.returns)


def test_fallback_ops_have_the_same_schemas(fallback: dict) -> None:
    assert fallback["schemas"] == {name: registered(name) for name in NAMES}


def test_fallback_ops_compute_trace_and_refuse_gradients(fallback: dict) -> None:
    assert fallback["same"] and fallback["compiled"]
    assert fallback["meta"] == [3, 8]
    assert "liteboost::rms_norm: has no backward" in fallback["refusal"]
