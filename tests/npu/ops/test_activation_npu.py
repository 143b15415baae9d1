"""`activation` and `gated_activation` as aclnn operators: values, launches, layouts."""

from __future__ import annotations

import pytest
import torch
from support import npu_ops
from support.compare import DTYPES

from liteboost_adaptor.ops.activation import ACTIVATIONS

#: relu squared and the sigmoid are rounded before the product.
ROUNDINGS = {"relu2": 2, "sigmoid": 2}
GATED = {"silu": "SwiGlu", "gelu": "GeGluV3", "gelu_tanh": "GeGluV3"}
ALONE = {"silu": ["Silu"], "relu": ["Relu"], "relu2": ["Relu", "Mul"], "sigmoid": ["Sigmoid"]}
GPT_OSS = {"alpha": 1.702, "limit": 1.5, "up_offset": 1.0}


def make(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = torch.randn(2, *shape).mul(2).to(dtype)
    return gate.clone(), up.clone()


def exact(x: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    """In float64; torch's own gelu cancels below -5."""
    match activation:
        case "gelu":
            return x * torch.special.erfc(-x / 2**0.5) / 2
        case "gelu_tanh":
            return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
        case "silu":
            return x * torch.sigmoid(alpha * x)
        case "sigmoid":
            return torch.sigmoid(x)
    return x.relu() ** (2 if activation == "relu2" else 1)


def check(gate: torch.Tensor, up: torch.Tensor | None, activation: str = "silu", **form: float) -> list[str]:
    """Values against float64, and what was launched. ``up`` None: the activation alone."""
    arguments = {"x": gate} if up is None else {"gate": gate, "up": up}
    found = npu_ops.run(
        "activation" if up is None else "gated_activation", activation=activation, **arguments, **form
    )
    assert found.reasons == []
    (result,), g = found.results, gate.double()
    u = torch.ones_like(g) if up is None else up.double()
    if "limit" in form:
        g, u = g.clamp(max=form["limit"]), u.clamp(-form["limit"], form["limit"])
    u = u + form.get("up_offset", 0.0)
    want = exact(g, activation, form.get("alpha", 1.0)) * u
    assert result.shape == want.shape and result.dtype == gate.dtype and result.is_contiguous()
    # Each rounding, fp32 arithmetic whose terms cancel in the tails, and the smallest fp16 numbers.
    roundings = ROUNDINGS.get(activation, 1)
    bound = 1.02 * roundings * torch.finfo(gate.dtype).eps / 2 * want.abs()
    bound += 2.0**-22 * (1 + g.abs()) * (1 + u.abs())
    assert bool(((result.double() - want).abs() <= bound).all())
    return found.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 96), (3, 7, 129), (5,), (2, 2, 2, 2, 48)], ids=str)
def test_gate_and_up_in_places_of_their_own(
    activation: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gate, up = make(*shape, dtype=dtype)
    expected = ["Cat", GATED[activation]] if activation in GATED else [*ALONE[activation], "Mul"]
    assert check(gate, up, activation) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("rows", [1, 6])
def test_the_halves_of_one_tensor_are_read_where_they_are(
    activation: str, dtype: torch.dtype, rows: int
) -> None:
    both = torch.randn(2, rows, 2 * 80).to(dtype)
    stacked = torch.randn(2, rows, 80).to(dtype)
    for gate, up in (both.chunk(2, -1), stacked.unbind(0)):
        assert check(gate, up, activation) == [GATED[activation]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_only_looks_like_halves_is_put_together(dtype: torch.dtype) -> None:
    both = torch.randn(4, 160).to(dtype)
    wide = torch.randn(4, 200).to(dtype)
    views = {
        "up before gate": (both[:, 80:], both[:, :80]),
        "overlapping": (both[:, :80], both[:, 40:120]),
        "rows further apart": (wide[:, :80], wide[:, 80:160]),
        "transposed": (both.view(2, 320)[:, :16].t(), both.view(2, 320)[:, 16:32].t()),
        "one tensor twice": (both[:, :80], both[:, :80]),
        "expanded": (both[:1, :80].expand(4, 80), both[:1, 80:].expand(4, 80)),
    }
    for name, (gate, up) in views.items():
        launches = check(gate, up)
        assert launches.count("SwiGlu") == 1 and "Cat" in launches, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["pairs", "halves", "apart"])
def test_clamped_form_of_gpt_oss(dtype: torch.dtype, layout: str) -> None:
    both = torch.randn(5, 2 * 96).mul(2).to(dtype)
    views = {"pairs": (both[:, ::2], both[:, 1::2]), "halves": both.chunk(2, -1)}
    gate, up = views[layout] if layout in views else make(5, 96, dtype=dtype)
    assert check(gate, up, **GPT_OSS) == [*(["Cat"] if layout == "apart" else []), "ClippedSwiglu"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_alone(activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50, 7).mul(2).to(dtype)
    for view in (x, x.transpose(0, 2), x[:, ::2], x[0, 0, 0]):
        assert check(view, None, activation) == ALONE.get(activation, ["GeluV2"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quick_gelu(dtype: torch.dtype) -> None:
    assert check(torch.randn(3, 50).to(dtype), None, alpha=1.702) == ["Swish"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"limit": 0.0}, "a limit of 0"),
        ({"activation": "gelu", "limit": 1.0}, "a limit or an offset without silu"),
    ],
)
def test_what_no_operator_does_runs_as_the_reference(arguments: dict[str, object], reason: str) -> None:
    gate, up = make(3, 64, dtype=torch.bfloat16)
    found = npu_ops.run("gated_activation", gate=gate, up=up, **arguments)
    assert found.reasons == [reason]


def test_nothing() -> None:
    for shape in ((0,), (3, 0), (0, 5)):
        gate, up = make(*shape, dtype=torch.bfloat16)
        found = npu_ops.run("gated_activation", gate=gate, up=up)
        assert found.results[0].shape == shape and found.reasons == ["no elements"]
