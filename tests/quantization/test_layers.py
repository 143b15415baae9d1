"""`QuantizedLinear`: its values, gradients, casts, copies and files."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from support import quantized_layers

from liteboost_adaptor.quantization import QuantizedLinear, QuantScheme

SCHEMES = [
    QuantScheme("w8a16"),
    QuantScheme("w4a16"),
    QuantScheme("w4a16", 64, symmetric=False),
    QuantScheme("w8a8"),
    QuantScheme("w4a8", 64, False),
]


def made(scheme: QuantScheme, dtype: torch.dtype = torch.float32) -> QuantizedLinear:
    return quantized_layers.linear(torch.nn.Linear(128, 33).to(dtype), scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_values_are_those_of_the_weight_dequantized(
    scheme: QuantScheme, dtype: torch.dtype, rows: int, no_grad: None
) -> None:
    layer = made(scheme, dtype)
    x = torch.randn(2, rows, 128).to(dtype)
    exact = F.linear(layer.quantized_input(x.double()), layer.dequantize(torch.float64), layer.bias.double())
    plain = F.linear(layer.quantized_input(x), layer.dequantize(dtype), layer.bias).double()
    found = layer(x)
    assert found.dtype == dtype and found.shape == (2, rows, 33)
    assert (found.double() - exact).norm() <= 1.5 * (plain - exact).norm() + 2e-7 * exact.norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_of_zeros_are_zeros(
    scheme: QuantScheme, dtype: torch.dtype, rows: int, no_grad: None
) -> None:
    linear = torch.nn.Linear(256, 33, bias=False).to(dtype)
    linear.weight[5] = 0
    linear.weight[7] = torch.finfo(dtype).smallest_normal / 64  # of which no scale is left
    layer = quantized_layers.linear(linear, scheme)
    x = torch.randn(rows, 256).to(dtype) * 1000
    assert (layer(x)[:, 5] == 0).all()
    assert layer(x)[:, 7].abs().max() < 1e-30


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_reach_the_input_and_the_bias(scheme: QuantScheme) -> None:
    layer = made(scheme)
    x = torch.randn(3, 128, requires_grad=True)
    layer(x).square().sum().backward()
    found = x.grad.clone(), layer.bias.grad.clone()
    x.grad = layer.bias.grad = None
    F.linear(layer.quantized_input(x), layer.dequantize(), layer.bias).square().sum().backward()
    assert torch.equal(found[0], x.grad) and torch.equal(found[1], layer.bias.grad)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_casts_leave_integers_and_scales(scheme: QuantScheme, no_grad: None) -> None:
    layer = made(scheme)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        layer.to(dtype)
        assert layer.bias.dtype == dtype and layer(torch.randn(2, 128).to(dtype)).dtype == dtype
    for name, buffer in layer.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_copies_pickles_and_state_dicts(scheme: QuantScheme, no_grad: None) -> None:
    layer = made(scheme)
    x = torch.randn(3, 128)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    other = QuantizedLinear(128, 33, True, scheme)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if not each.quantizes_activations], ids=str)
def test_arranged_it_is_the_same_to_the_bit_and_saved_the_same(scheme: QuantScheme, no_grad: None) -> None:
    layer = made(scheme)
    twin = copy.deepcopy(layer)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(3, 128)
    expected, whole = layer(x), layer.dequantize()
    layer.prepack()
    layer.prepack()
    assert layer.is_packed and layer.weight.shape[0] == 3
    assert torch.equal(layer(x), expected) and torch.equal(layer.dequantize(), whole)
    state = layer.state_dict()
    assert state.keys() == before.keys() and list(state) == list(before)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    for assign in (False, True):
        changed = {name: tensor.clone() for name, tensor in before.items()}
        changed["scales"] *= 2
        layer.load_state_dict(changed, assign=assign)
        twin.load_state_dict(changed)
        assert layer.is_packed and torch.equal(layer(x), twin(x))
    assert not layer.to("meta").is_packed  # tiles are for CPUs
    assert {name: tensor.shape for name, tensor in layer.state_dict().items()} == {
        name: tensor.shape for name, tensor in before.items()
    }


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if not each.quantizes_activations], ids=str)
def test_arranged_gradients_reach_the_input(scheme: QuantScheme) -> None:
    layer = made(scheme)
    found = []
    for _ in range(2):
        x = torch.ones(3, 128, requires_grad=True)
        layer(x).square().sum().backward()
        found.append(x.grad)
        layer.prepack()
    assert torch.equal(found[0], found[1])


def test_autocast_decides_the_dtype(no_grad: None) -> None:
    layer = made(QuantScheme("w4a16"))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 128)).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compiles_whole(scheme: QuantScheme, no_grad: None) -> None:
    layer = made(scheme)
    x = torch.randn(3, 128)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_bytes_are_those_of_the_scheme() -> None:
    def nbytes(scheme: QuantScheme) -> int:
        return sum(buffer.nbytes for buffer in QuantizedLinear(1024, 64, False, scheme).buffers())

    weights = 1024 * 64
    assert nbytes(QuantScheme("w8a16")) == weights + 64 * 4
    assert nbytes(QuantScheme("w4a16")) == weights / 2 + weights / 32 * 2
    assert nbytes(QuantScheme("w4a16", 128, False)) == weights / 2 + weights / 128 * 3
