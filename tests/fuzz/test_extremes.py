"""What chance does not draw: offsets beyond 2^31 and 2^32, and tensors that are not plain memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("native_only")

ops = torch.ops.liteboost
FAR = 2**31 + 3  # elements; beyond 2^32 bytes


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """Two times `FAR` elements of a file of which only the pages that are written exist."""
    path: Path = tmp_path_factory.mktemp("sparse") / "plane"
    with path.open("wb") as file:
        file.truncate(2 * (2 * FAR))
    return torch.from_file(str(path), shared=True, size=2 * FAR, dtype=torch.bfloat16)


def far_apart(plane: Tensor, size: tuple[int, ...], dim: int, offset: int = 0) -> Tensor:
    """A tensor of random numbers whose two slices of dimension ``dim`` lie `FAR` elements apart."""
    assert size[dim] == 2
    strides, run = [0] * len(size), 1
    for each in reversed(range(len(size))):
        strides[each] = FAR if each == dim else run
        run *= 1 if each == dim else size[each]
    values = torch.randn(size, generator=torch.Generator().manual_seed(offset))
    return plane.as_strided(size, strides, offset).copy_(values)


def appended(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    ops.kv_append(keys, values, key, value, torch.tensor([[2, 0]]))
    return [keys.clone(), values.clone()]


CALLS: dict[str, Callable[[Callable[..., Tensor]], object]] = {
    "rms_norm": lambda far: ops.rms_norm(far((2, 40), 0), None, 1e-6),
    "add_rms_norm": lambda far: ops.add_rms_norm(far((2, 40), 0), far((2, 40), 0, 1000), None, 1e-6),
    "gated_rms_norm": lambda far: ops.gated_rms_norm(
        far((2, 40), 0), far((2, 40), 0, 1000), torch.ones(40, dtype=torch.bfloat16), 1e-6
    ),
    "layer_norm": lambda far: ops.layer_norm(far((2, 40), 0), None, None, 1e-6),
    "gated_activation": lambda far: ops.gated_activation(far((2, 40), 0), far((2, 40), 0, 1000)),
    "gated_activation, columns": lambda far: ops.gated_activation(far((5, 2), 1), far((5, 2), 1, 1000)),
    "rope, heads": lambda far: ops.rope(
        far((1, 2, 3, 16), 1), far((1, 2, 3, 16), 1, 1000), *torch.randn(2, 3, 16).bfloat16()
    ),
    "rope, tables": lambda far: ops.rope(
        *torch.randn(2, 1, 2, 2, 16).bfloat16(), far((2, 16), 0), far((2, 16), 0, 1000)
    ),
    "linear": lambda far: ops.linear(torch.randn(3, 40).bfloat16(), far((2, 40), 0)),
    "recurrent_gated_delta_rule": lambda far: ops.recurrent_gated_delta_rule(
        far((1, 2, 1, 40), 1),
        far((1, 2, 1, 40), 1, 1000),
        far((1, 2, 1, 40), 1, 2000),
        *torch.rand(2, 1, 2, 1).neg(),
        torch.ones(1, 1, 40, 40),
        scaling=1.0,
        normalize=True,
    ),
    "attention, keys": lambda far: ops.attention(
        torch.randn(1, 2, 1, 32).bfloat16(), far((1, 1, 2, 32), 2), far((1, 1, 2, 32), 2, 1000), None, 0.1
    ),
    "attention, packed": lambda far: ops.attention(
        torch.randn(1, 2, 40, 32).bfloat16(), far((1, 1, 2, 32), 2), far((1, 1, 2, 32), 2, 1000), None, 0.1
    ),
    "attention, mask": lambda far: ops.attention(
        *torch.randn(3, 1, 1, 2, 32).bfloat16(), far((1, 1, 2, 2), 2), 0.1
    ),
    "paged_attention, pages": lambda far: ops.paged_attention(
        torch.randn(2, 2, 32).bfloat16(),
        far((2, 3, 1, 32), 0),
        far((2, 3, 1, 32), 0, 1000),
        *torch.tensor([[0, 2], [0, 5]]),
        torch.tensor([[1, 0]]),
        0.1,
    ),
    "kv_append, cache": lambda far: appended(
        far((1, 2, 3, 16), 1), far((1, 2, 3, 16), 1, 1000), *torch.randn(2, 1, 2, 2, 16).bfloat16()
    ),
    "kv_append, tokens": lambda far: appended(
        *torch.zeros(2, 1, 2, 3, 16).bfloat16(), far((1, 2, 2, 16), 1), far((1, 2, 2, 16), 2, 1000)
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_offsets_beyond_32_bits(isa: str, call: str, plane: Tensor) -> None:
    def near(size: tuple[int, ...], dim: int, offset: int = 0) -> Tensor:
        return far_apart(plane, size, dim, offset).clone(memory_format=torch.contiguous_format)

    torch.manual_seed(1)
    found = CALLS[call](lambda *place: far_apart(plane, *place))
    torch.manual_seed(1)
    torch.testing.assert_close(found, CALLS[call](near), rtol=0, atol=0)


def test_views_that_negate_are_read_as_negated() -> None:
    x = torch.randn(5, 40, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(ops.rms_norm(x, None, 1e-6), ops.rms_norm(x.resolve_neg(), None, 1e-6))


def test_tensors_without_strides_are_refused() -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(NotImplementedError):
        ops.rms_norm(sparse, None, 1e-6)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_numbers_at_addresses_that_are_not_multiples_of_their_size(isa: str, name: str) -> None:
    """As in a file that was mapped with a header of odd length."""
    values = {"x": torch.randn(3, 40), "weight": torch.randn(40)}
    expected = ops.rms_norm(values["x"], values["weight"], 1e-6)
    memory = bytearray(b"\0" * 3 + values[name].numpy().tobytes())
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=3).view_as(values[name])
    assert odd.data_ptr() % 4
    assert torch.equal(ops.rms_norm(**{**values, name: odd}, eps=1e-6), expected)
