"""Code that does nothing with what attention and MLP give but add it: there both are reduced at once."""

from __future__ import annotations

import ast
import textwrap

import pytest
from torch import nn

from liteboost_adaptor.parallel.tensor import parallel_branches, source_checks


class Layer(nn.Module):
    """Its forward is what a test says."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = f"def forward(self, x):\n{textwrap.indent(textwrap.dedent(code), '    ')}"
        self.dropout, self.linear = nn.Dropout(), nn.Linear(2, 2)
        self.parallel, self.kind, self.scale = True, "both", 0.5


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "forward_of", lambda module: ast.parse(module.code).body[0])


CALLS = "a = self.attention(x)\nb = self.mlp(x)\n"


@pytest.mark.parametrize(
    "code",
    [
        f"{CALLS}return_ = x + a + b\nreturn return_",
        f"{CALLS}b += a\nreturn b + x",
        "a, weights = self.attention(x)\nb = self.dropout(self.mlp(x))\n"
        "a = self.dropout(a)\ny = b + a + x\nreturn y",
        f"{CALLS}if self.parallel and not self.kind == 'one':\n    y = a + b\nelse:\n    y = a * b\nreturn y",
    ],
    ids=["a sum", "added to", "behind dropouts", "in the branch that runs"],
)
def test_outputs_that_are_only_added_are_reduced_at_once(code: str) -> None:
    assert parallel_branches._only_added(Layer(code), "attention", "mlp")


@pytest.mark.parametrize(
    "code",
    [
        f"{CALLS}return a + b",
        f"{CALLS}a += b\nreturn a",
        f"{CALLS}y = a * b\nreturn y",
        f"{CALLS}y = a + b + a\nreturn y",
        f"{CALLS}y = a + b + a.sum()\nreturn y",
        f"{CALLS}y = a + b\nreturn y + a",
        f"{CALLS}a = self.linear(a)\ny = a + b\nreturn y",
        f"{CALLS}print(a)\ny = a + b\nreturn y",
        "b = self.mlp(x)\na = self.attention(x)\ny = a + b\nreturn y",
        "a = self.attention(x)\na = self.mlp(x)\ny = a + a\nreturn y",
        "a = self.attention(x)\nb = self.mlp(a)\ny = a + b\nreturn y",
        "a = self.attention(x)\na = self.attention(x)\nb = self.mlp(x)\ny = a + b\nreturn y",
        "a = self.attention(x) * 2\nb = self.mlp(x)\ny = a + b\nreturn y",
        "self.kept = self.attention(x)\nb = self.mlp(x)\ny = self.kept + b\nreturn y",
        f"{CALLS}if self.scale:\n    a = 2 * a\ny = a + b\nreturn y",
        f"{CALLS}y = a + b",
    ],
)
def test_outputs_that_are_used_otherwise_are_reduced_apart(code: str) -> None:
    assert not parallel_branches._only_added(Layer(code), "attention", "mlp")


@pytest.mark.parametrize(
    ("code", "is_direct"),
    [
        ("y = self.out(x)\nreturn y", True),
        ("return self.dropout(self.out(x))", True),
        ("y = self.out(x)\ny = self.dropout(y)\nreturn y, None", True),
        ("y = self.out(x)\nif x.any():\n    return y\nreturn y, x", True),
        ("if x.any():\n    raise ValueError\nreturn self.out(x)", True),
        ("y = self.out(x) + 1\nreturn y", False),
        ("y = self.out(self.out(x))\nreturn y", False),
        ("y = self.out(x)\nz = y + 1\nreturn y", False),
        ("y = self.out(x)\nreturn y, y", False),
        ("y = self.out(x)\nif x.any():\n    return y\nreturn x", False),
        ("y = self.out(x)", False),
    ],
)
def test_a_part_that_returns_what_its_last_layer_gives(code: str, is_direct: bool) -> None:
    part = Layer(code)
    paths = parallel_branches._paths(part, source_checks.forward_of(part))
    found = bool(paths) and all(parallel_branches._gives(part, path, "out") for path in paths)
    assert found is is_direct


def test_code_of_too_many_paths_is_not_followed() -> None:
    branches = "if x.any():\n    x = x + 1\n"
    few, many = Layer(branches * 3 + "return x"), Layer(branches * 9 + "return x")
    assert len(parallel_branches._paths(few, source_checks.forward_of(few))) == 8
    assert parallel_branches._paths(many, source_checks.forward_of(many)) == []
