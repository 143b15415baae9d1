"""The gated delta rule against float64, and its two ops against each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import DTYPES, assert_refused, assert_same_on_any_threads
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from liteboost_adaptor.ops import delta_rule

recurrent = torch.ops.liteboost.recurrent_gated_delta_rule
chunk = torch.ops.liteboost.chunk_gated_delta_rule

NAN = float("nan")

# batch, tokens, k_heads, v_heads, k_dim, v_dim
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 1, 2, 4, 16, 8),
    (1, 2, 1, 3, 5, 7),
    (1, 4, 2, 2, 33, 70),
    (1, 7, 1, 1, 64, 17),
    (2, 8, 1, 2, 15, 31),
    (1, 9, 2, 4, 16, 64),
    (1, 70, 1, 2, 32, 65),
    (1, 130, 1, 1, 128, 128),
]


def make(size: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    """Query, key, value, g, beta; and a state."""
    torch.manual_seed(seed)
    batch, tokens, k_heads, v_heads, k_dim, v_dim = size
    query, key = (torch.randn(batch, tokens, k_heads, k_dim).to(dtype) for _ in range(2))
    value = torch.randn(batch, tokens, v_heads, v_dim).to(dtype)
    g = -2.0 * torch.rand(batch, tokens, v_heads)
    beta = torch.rand(batch, tokens, v_heads).to(dtype)
    return (query, key, value, g, beta), torch.randn(batch, v_heads, k_dim, v_dim)


def transposed(x: Tensor) -> Tensor:
    """The same values with the tokens of a channel adjacent, as a convolution leaves them."""
    batch, tokens, heads, dim = x.shape
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).view(batch, tokens, heads, dim)


def error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def in_float64(arguments: tuple[Tensor, ...], state: Tensor | None, **form: Any) -> tuple[Tensor, Tensor]:
    """Token by token, as the models decode."""
    doubled = [x.double() for x in arguments]
    shape = (doubled[2].shape[0], doubled[2].shape[2], doubled[1].shape[3], doubled[2].shape[3])
    memory = torch.zeros(shape, dtype=torch.float64) if state is None else state.double().clone()
    return delta_rule.recurrent_gated_delta_rule(*doubled, memory, **form), memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values(isa: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Nearer to float64 than 1.5 times the models' own code, or a few roundings of fp32."""
    arguments, state = make(size, dtype)
    scaling = size[4] ** -0.5
    exact, exact_state = in_float64(arguments, state, scaling=scaling, normalize=True)
    for layout in (lambda x: x, transposed):
        given = (*map(layout, arguments[:3]), *arguments[3:])
        out, final = chunk(*given, state, scaling=scaling, normalize=True)
        assert out.dtype == dtype and out.is_contiguous() and final.is_contiguous()
        assert out.shape == arguments[2].shape and final.shape == state.shape
        plain, plain_state = modeling.torch_recurrent_gated_delta_rule(
            *given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert error(out, exact) <= 1.5 * error(plain, exact) + 4 * 2.0**-24
        assert error(final, exact_state) <= 1.5 * error(plain_state, exact_state) + 4 * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_ops_are_one_calculation(isa: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    arguments, state = make(size, dtype)
    out, final = chunk(*arguments, state.clone(), scaling=0.3)
    memory = state.clone()
    again = recurrent(*arguments, memory, scaling=0.3)
    torch.testing.assert_close(again.float(), out.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(memory, final, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_references_are_one_calculation() -> None:
    for size in SIZES:
        arguments, state = make(size, torch.float64)
        for start in (state.double(), None):
            exact, exact_state = in_float64(arguments, start, scaling=0.3, normalize=True)
            out, final = delta_rule.chunk_gated_delta_rule(
                *(x.double() for x in arguments), start, scaling=0.3, normalize=True
            )
            assert error(out, exact) < 1e-13 and error(final, exact_state) < 1e-13


@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("normalize", [True, False])
def test_it_is_the_rule_of_the_models(isa: str, name: str, normalize: bool) -> None:
    (query, key, value, g, beta), state = make((2, 70, 2, 4, 16, 24), torch.float32)
    key = key if normalize else key / 8
    out, final = modeling.__dict__[name](
        query,
        key,
        value,
        g,
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )
    ours, ours_final = chunk(query, key, value, g, beta, state, scaling=16**-0.5, normalize=normalize)
    torch.testing.assert_close(ours, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_final, final, rtol=1e-5, atol=1e-5)


def test_in_parts(isa: str) -> None:
    """What is known after a prompt goes on with the next one, of any length, and with single tokens."""
    arguments, state = make((1, 40, 1, 2, 16, 24), torch.float32)
    whole, final = chunk(*arguments, state, scaling=0.3, normalize=True)
    parts, at = [], 0
    memory = state.clone()
    for length in (1, 3, 8, 9, 1, 1, 17):
        part = [x[:, at : at + length] for x in arguments]
        if length == 1:
            parts.append(recurrent(*part, memory, scaling=0.3, normalize=True))
        else:
            out, memory = chunk(*part, memory, scaling=0.3, normalize=True)
            parts.append(out)
        at += length
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memory, final, rtol=1e-5, atol=1e-5)


def test_without_a_state_it_starts_from_zeros(isa: str) -> None:
    arguments, state = make((2, 11, 1, 2, 16, 24), torch.bfloat16)
    nothing, zeros = (chunk(*arguments, start, scaling=0.3, normalize=True) for start in (None, 0 * state))
    assert all(map(torch.equal, nothing, zeros))


def test_a_given_state_is_left_as_it_is(isa: str) -> None:
    for tokens in (0, 1, 12):
        arguments, state = make((1, tokens, 1, 2, 16, 24), torch.float32)
        before = state.clone()
        _, final = chunk(*arguments, state, scaling=0.3)
        assert torch.equal(state, before) and final.data_ptr() != state.data_ptr()


def test_a_state_in_bf16_is_rounded_once(isa: str) -> None:
    for tokens in (1, 5):
        arguments, state = make((2, tokens, 1, 2, 16, 24), torch.bfloat16)
        short = state.bfloat16().transpose(2, 3).contiguous().transpose(2, 3)
        wide = short.float()
        expected = recurrent(*arguments, wide, scaling=0.3, normalize=True)
        out = recurrent(*arguments, short, scaling=0.3, normalize=True)
        assert torch.equal(out, expected) and torch.equal(short, wide.bfloat16())
        assert not short.is_contiguous()


def test_a_state_of_any_strides_is_updated_in_place(isa: str) -> None:
    arguments, state = make((2, 3, 1, 2, 16, 24), torch.float32)
    expected = state.clone()
    out = recurrent(*arguments, expected, scaling=0.3)
    host = torch.full((2, 2, 26, 18), NAN)
    for view in (host.transpose(2, 3)[:, :, 1:17, 2:], state.transpose(0, 1).contiguous().transpose(0, 1)):
        view.copy_(state)
        assert torch.equal(recurrent(*arguments, view, scaling=0.3), out) and torch.equal(view, expected)
    assert int(host.isnan().sum()) == host.numel() - state.numel()


def test_autograd_notices_the_update() -> None:
    arguments, state = make((1, 1, 1, 1, 4, 4), torch.float32)
    before = state._version
    recurrent(*arguments, state, scaling=0.3)
    assert state._version > before


def test_the_state_of_an_inference_mode_is_written_in_such_a_mode_alone() -> None:
    with torch.inference_mode():
        arguments, state = make((1, 1, 1, 1, 4, 4), torch.float32)
        recurrent(*arguments, state, scaling=0.3)
    arguments, _ = make((1, 1, 1, 1, 4, 4), torch.float32)
    before = state.clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
        recurrent(*arguments, state, scaling=0.3)
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_offsets(isa: str, native_only: None, dtype: torch.dtype) -> None:
    arguments, state = make((2, 13, 2, 4, 20, 35), dtype)
    expected = chunk(*arguments, state, scaling=0.3, normalize=True)

    def inside(x: Tensor) -> Tensor:
        host = torch.full((x.shape[0], x.shape[1] + 2, *(n + 3 for n in x.shape[2:])), NAN, dtype=x.dtype)
        view = host[(slice(None), slice(1, -1), *(slice(2, -1),) * (x.dim() - 2))]
        return view.copy_(x)

    def step(x: Tensor) -> Tensor:
        return torch.stack([x, torch.full_like(x, NAN)], -1)[..., 0]

    for layout in (inside, step, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)):
        found = chunk(*map(layout, arguments), state, scaling=0.3, normalize=True)
        assert all(map(torch.equal, found, expected))
    found = chunk(*map(transposed, arguments[:3]), *arguments[3:], state, scaling=0.3, normalize=True)
    assert all(map(torch.equal, found, expected))


def test_a_state_that_is_wiped_out_stays_so(isa: str) -> None:
    """g = -inf: what was before such a token does not reach what comes after, in whatever chunk it stands."""
    (query, key, value, g, beta), state = make((1, 12, 1, 1, 8, 9), torch.float32)
    for at in (0, 3, 9):
        wiped = g.clone()
        wiped[:, at] = -float("inf")
        _, first = chunk(query, key, value, wiped, beta, state, scaling=1.0, normalize=True)
        _, second = chunk(query, key, value, wiped, beta, 100 * state, scaling=1.0, normalize=True)
        assert first.isfinite().all()
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_head(isa: str) -> None:
    (query, key, value, g, beta), state = make((2, 9, 1, 2, 8, 9), torch.float32)
    clean, clean_state = chunk(query, key, value, g, beta, state, scaling=1.0, normalize=True)
    value[1, 4, 1, 3] = NAN
    out, final = chunk(query, key, value, g, beta, state, scaling=1.0, normalize=True)
    assert out[1, 4:, 1, 3].isnan().all() and final[1, 1, :, 3].isnan().all()
    assert torch.equal(out[0], clean[0]) and torch.equal(out[1, :, 0], clean[1, :, 0])
    assert torch.equal(out[1, :4], clean[1, :4]) and torch.equal(final[0], clean_state[0])


@pytest.mark.parametrize(
    "size", [(0, 3, 1, 2, 4, 5), (2, 0, 1, 2, 4, 5), (1, 3, 1, 0, 4, 5), (1, 3, 1, 2, 0, 5)]
)
def test_nothing_to_do(size: tuple[int, ...]) -> None:
    arguments, state = make(size, torch.float32)
    out, final = chunk(*arguments, state, scaling=1.0, normalize=True)
    assert torch.equal(out, torch.zeros_like(arguments[2])) and torch.equal(final, state)
    assert torch.equal(recurrent(*arguments, state, scaling=1.0), out)


def test_the_number_of_threads_changes_no_bit(isa: str, native_only: None) -> None:
    arguments, state = make((2, 40, 2, 4, 64, 64), torch.bfloat16)
    assert_same_on_any_threads(lambda: chunk(*arguments, state, scaling=0.3, normalize=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_opcheck(dtype: torch.dtype, tokens: int) -> None:
    arguments, state = make((2, tokens, 1, 2, 8, 9), dtype)
    form = {"scaling": 0.3, "normalize": True}
    torch.library.opcheck(recurrent.default, (*arguments, state), form)
    torch.library.opcheck(chunk.default, (*arguments, state), form)
    torch.library.opcheck(chunk.default, (*map(transposed, arguments[:3]), *arguments[3:]), form)


def test_compiles_whole() -> None:
    arguments, state = make((1, 5, 1, 2, 8, 9), torch.float32)

    def step(state: Tensor) -> tuple[Tensor, ...]:
        first, memory = chunk(*arguments, state, scaling=0.3)
        return first, recurrent(*(x[:, :1] for x in arguments), memory, scaling=0.3), memory

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(state), step(state)))


(Q, K, V, G, B), S = make((2, 3, 2, 4, 8, 5), torch.float32)
BAD = {
    "query_dim": (
        (Q[0], K, V, G, B, S),
        ValueError,
        r"query must have shape \[batch, tokens, k_heads, dim\], got",
    ),
    "value_dim": (
        (Q, K, V[0], G, B, S),
        ValueError,
        r"value must have shape \[batch, tokens, v_heads, dim\], got",
    ),
    "integer": (
        (Q.int(), K.int(), V.int(), G, B, S),
        TypeError,
        r"value must be float32, bfloat16 or float16, got",
    ),
    "key_dtype": ((Q, K.half(), V, G, B, S), TypeError, r"key must have the dtype of value .*got"),
    "key_shape": ((Q, K[..., :4], V, G, B, S), ValueError, r"key must have the shape of query"),
    "tokens": ((Q[:, :2], K[:, :2], V, G, B, S), ValueError, r"query must have batch and tokens of value"),
    "heads": (
        (Q, K, V[:, :, :3], G, B, S),
        ValueError,
        r"value must have a multiple of the 2 heads of query, got 3",
    ),
    "g_shape": (
        (Q, K, V, G[:, :, :2], B, S),
        ValueError,
        r"g must have shape .*= \[2, 3, 4\], got \[2, 3, 2\]",
    ),
    "beta_dtype": (
        (Q, K, V, G, B.half(), S),
        TypeError,
        r"beta must have the dtype of value .*or float32, got",
    ),
    "state_dtype": ((Q, K, V, G, B, S.int()), TypeError, r"(initial_)?state must be float32.*, got"),
    "state_turned": (
        (Q, K, V, G, B, S.transpose(2, 3)),
        ValueError,
        r"(initial_)?state must have shape .*= \[2, 4, 8, 5\], got \[2, 4, 5, 8\]",
    ),
    "state_device": (
        (Q, K, V, G, B, S.to("meta")),
        ValueError,
        r"(initial_)?state must be on the device of value",
    ),
}
#: Op and reference.
CALLS: dict[str, tuple[Callable[..., Any], ...]] = {
    "recurrent_gated_delta_rule": (recurrent, delta_rule.recurrent_gated_delta_rule),
    "chunk_gated_delta_rule": (chunk, delta_rule.chunk_gated_delta_rule),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", CALLS)
def test_errors_name_op_and_argument(case: str, name: str) -> None:
    args, kind, text = BAD[case]
    calls = tuple(functools.partial(call, scaling=1.0) for call in CALLS[name])
    assert_refused(calls, args, kind, f"liteboost::{name}: {text}")


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("name", CALLS)
def test_no_backward_is_an_error_in_grad_mode_only(name: str, at: int) -> None:
    arguments = [x.clone() for x in (Q, K, V, G, B, S)]
    arguments[at].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"liteboost::{name}: has no backward, but .* requires grad"):
        CALLS[name][0](*arguments, scaling=1.0)
    with torch.no_grad():
        CALLS[name][0](*arguments, scaling=1.0)
