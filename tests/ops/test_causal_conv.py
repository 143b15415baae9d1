"""The causal convolutions against float64: every instruction set and layout, with and without a state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compare import DTYPES, assert_refused, assert_same_on_any_threads
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from liteboost_adaptor.ops import causal_conv

conv = torch.ops.liteboost.causal_conv1d
update = torch.ops.liteboost.causal_conv1d_update

NAN = float("nan")

# batch, channels, tokens, taps
SIZES = [
    (1, 1, 1, 1),
    (2, 5, 1, 4),
    (1, 64, 1, 4),
    (2, 70, 3, 4),
    (1, 129, 17, 3),
    (2, 7, 130, 4),
    (1, 3, 65, 7),
]


def make(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and a state of as many columns as taps."""
    batch, channels, tokens, taps = size
    x, state = (torch.randn(batch, channels, n).to(dtype) for n in (tokens, taps))
    return x, torch.randn(channels, taps).to(dtype), torch.randn(channels).to(dtype), state


def channels_adjacent(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", [Tensor.contiguous, channels_adjacent], ids=["tokens", "channels"])
def test_values(
    isa: str, layout: Callable[[Tensor], Tensor], size: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Nearer to float64 than 1.5 times the models' own code, or a few roundings of fp32."""
    x, weight, bias, state = make(size, dtype)
    x = layout(x)
    for given, activation in ((bias, "silu"), (None, "none"), (None, "silu"), (bias, "none")):
        form = (weight, given, activation)
        doubled = (weight.double(), None if given is None else given.double())
        name = None if activation == "none" else activation
        result = conv(x, *form)
        exact = modeling.causal_conv1d_fn(x.double(), *doubled, name)
        assert result.dtype == dtype and result.shape == x.shape and result.is_contiguous()
        assert (
            error(result, exact)
            <= 1.5 * error(modeling.causal_conv1d_fn(x, weight, given, name), exact) + 2e-7
        )

        memory, theirs, exactly = state.clone(), state.clone(), state.double()
        result = update(x, memory, *form)
        exact = modeling.causal_conv1d_update(x.double(), exactly, *doubled, name)
        plain = modeling.causal_conv1d_update(x, theirs, weight, given, name)
        assert result.shape == x.shape and result.is_contiguous()
        assert error(result, exact) <= 1.5 * error(plain, exact) + 2e-7
        assert torch.equal(memory, theirs)


def test_a_prompt_and_its_continuation(isa: str) -> None:
    x, weight, bias, _ = make((2, 70, 40, 4), torch.float32)
    whole = conv(x, weight, bias, "silu")
    for length in (3, 4, 9):
        state, parts, at = torch.zeros(2, 70, length), [], 0
        for tokens in (1, 5, 1, 1, 20, 2, 10):
            parts.append(update(x[:, :, at : at + tokens], state, weight, bias, "silu"))
            at += tokens
        assert torch.equal(torch.cat(parts, 2), whole) and torch.equal(state, x[:, :, -length:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_offsets(isa: str, native_only: None, dtype: torch.dtype) -> None:
    x, weight, bias, state = make((2, 67, 19, 4), dtype)
    expected_state = state.clone()
    expected = update(x, expected_state, weight, bias, "silu")

    def inside(tensor: Tensor) -> Tensor:
        host = torch.full([n + 3 for n in tensor.shape], NAN, dtype=tensor.dtype)
        return host[(slice(1, -2),) * tensor.dim()].copy_(tensor)

    def step(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.full_like(tensor, NAN)], -1)[..., 0]

    def turned(tensor: Tensor) -> Tensor:
        return (
            tensor.t().contiguous().t()
            if tensor.dim() == 2
            else tensor.transpose(0, -1).clone().transpose(0, -1)
        )

    for layout in (inside, step, turned):
        memory = layout(state)
        assert torch.equal(update(layout(x), memory, layout(weight), layout(bias), "silu"), expected)
        assert torch.equal(memory, expected_state)
    assert torch.equal(update(channels_adjacent(x), state, weight, bias, "silu"), expected)
    everywhere = x[:1].expand(2, 67, 19)
    assert torch.equal(conv(everywhere, weight), conv(everywhere.contiguous(), weight))


def test_nan_reaches_the_next_tokens_of_its_channel_alone(isa: str) -> None:
    x, weight, _, _ = make((1, 70, 20, 4), torch.float32)
    x[0, 5, 8] = NAN
    expected = torch.zeros(1, 70, 20, dtype=torch.bool)
    expected[0, 5, 8:12] = True
    assert torch.equal(conv(x, weight, None, "silu").isnan(), expected)


@pytest.mark.parametrize("size", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)])
def test_nothing_to_do(size: tuple[int, ...]) -> None:
    x, weight, bias, state = make(size, torch.float32)
    before = state.clone()
    assert conv(x, weight, bias).shape == x.shape
    assert update(x, state, weight, bias).shape == x.shape and torch.equal(state, before)


def test_the_number_of_threads_changes_no_bit(isa: str, native_only: None) -> None:
    x, weight, bias, _ = make((2, 300, 200, 4), torch.bfloat16)
    assert_same_on_any_threads(lambda: conv(x, weight, bias, "silu"))


def test_autograd_notices_the_update() -> None:
    x, weight, _, state = make((1, 2, 1, 3), torch.float32)
    before = state._version
    update(x, state, weight)
    assert state._version > before


def test_the_state_of_an_inference_mode_is_written_in_such_a_mode_alone() -> None:
    with torch.inference_mode():
        x, weight, _, state = make((1, 2, 1, 3), torch.float32)
        update(x, state, weight)
    x, weight, _, _ = make((1, 2, 1, 3), torch.float32)
    before = state.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        update(x, state, weight)
    assert torch.equal(state, before)


def test_a_state_that_is_one_column_many_times_cannot_be_updated() -> None:
    x, weight, _, state = make((2, 2, 1, 3), torch.float32)
    with pytest.raises(RuntimeError, match="memory location"):
        update(x, state[:1].expand(2, 2, 3), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_opcheck(dtype: torch.dtype, tokens: int) -> None:
    x, weight, bias, state = make((2, 9, tokens, 4), dtype)
    torch.library.opcheck(conv.default, (channels_adjacent(x), weight, bias, "silu"))
    torch.library.opcheck(update.default, (x, state, weight, None, "silu"))


def test_compiles_whole() -> None:
    x, weight, bias, state = make((1, 9, 5, 4), torch.float32)

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        return conv(x, weight, bias, "silu") + update(x, state, weight), state

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(state.clone()), step(state.clone())))


X, W, B, S = make((2, 6, 3, 4), torch.float32)
BAD = {
    "x_dim": ((X[0], S, W), ValueError, r"x must have shape \[batch, channels, tokens\], got"),
    "integer": ((X.int(), S.int(), W.int()), TypeError, r"x must be float32, bfloat16 or float16, got"),
    "weight_dtype": ((X, S, W.half()), TypeError, r"weight must have the dtype of x .*got"),
    "weight_dim": (
        (X, S, W[:, None]),
        ValueError,
        r"weight must have shape \[channels, taps\] .*= 6 .*got \[6, 1, 4\]",
    ),
    "no_taps": ((X, S, W[:, :0]), ValueError, r"weight must have shape .*a tap at least, got \[6, 0\]"),
    "bias_shape": ((X, S, W, B[:5]), ValueError, r"bias must have shape \[channels\] = \[6\], got \[5\]"),
    "activation": ((X, S, W, B, "gelu"), ValueError, r"activation must be none or silu, got 'gelu'"),
    "state_short": (
        (X, S[..., :2], W),
        ValueError,
        r"state must have shape .*= \[2, 6, 3\], got \[2, 6, 2\]",
    ),
    "state_dtype": ((X, S.half(), W), TypeError, r"state must have the dtype of x .*got"),
    "state_device": ((X, S.to("meta"), W), ValueError, r"state must be on the device of x \(cpu\), got meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_op_and_argument(case: str) -> None:
    (x, state, *rest), error, text = BAD[case]
    updates = (update, causal_conv.causal_conv1d_update)
    assert_refused(updates, (x, state, *rest), error, f"liteboost::causal_conv1d_update: {text}")
    if not case.startswith("state"):
        convs = (conv, causal_conv.causal_conv1d)
        assert_refused(convs, (x, *rest), error, f"liteboost::causal_conv1d: {text}")


@pytest.mark.parametrize("at", range(4))
def test_no_backward_is_an_error_in_grad_mode_only(at: int) -> None:
    arguments = [x.clone() for x in (X, S, W, B)]
    arguments[at].requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"liteboost::causal_conv1d_update: has no backward, but .* requires grad"
    ):
        update(*arguments)
    with torch.no_grad():
        update(*arguments)
