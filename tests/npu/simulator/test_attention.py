"""Inference attention of the simulator against float64: layouts, masks, lengths, blocks, sinks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from npu.simulator.calls import ROUNDING, randn, run
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16]
BIG = 2**31 - 1
FIXED_MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, N, S, D]; the output (zeros where nothing is seen) and the log-sum-exp (infinite there)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        logits = logits + bias.double()
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.softmax(torch.cat((logits, column), -1), -1)[..., :-1]
        return weights @ v, torch.logsumexp(torch.cat((logits, column), -1), -1, keepdim=True)
    lse = torch.logsumexp(logits, -1, keepdim=True)
    return torch.softmax(logits, -1).nan_to_num(0.0) @ v, torch.where(lse.isinf(), torch.inf, lse)


def near(got: Tensor, want: Tensor) -> None:
    """Two roundings: of the probabilities (relative to the values they weigh) and of the output."""
    unit = ROUNDING[got.dtype]
    assert got.shape == want.shape and not got.isnan().any()
    assert (got.double() - want).abs().max() <= unit * (float(want.abs().max()) + 4.0)


def fia(
    version: int,
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    out: Tensor,
    *,
    heads: int,
    kv_heads: int,
    layout: str,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    q_lens: list[int] | None = None,
    kv_lens: list[int] | None = None,
    table: Tensor | None = None,
    q_padding: Tensor | None = None,
    kv_padding: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    modes: tuple[int, int] = (0, 0),
    scale: float = 1.0,
    pre: int = BIG,
    next_: int = BIG,
    sparse: int = 0,
    precise: int = 0,
    block: int = 0,
    lse: Tensor | None = None,
) -> tuple[str, list[object]]:
    """The operator's name and its arguments in the order of the version."""
    arguments: list[object] = [q, k, v, bias, mask, q_lens, kv_lens, *[None] * 7]
    arguments += [table, q_padding, kv_padding]
    arguments += [scales[0], None, scales[1], *[None] * 4]
    if version >= 3:
        arguments += [*(rope or (None, None)), None]
    if version >= 4:
        arguments += [None, sinks]
    if version >= 5:
        arguments += [None, None]
    arguments += [heads, scale, pre, next_, layout, kv_heads, sparse, precise, block, 0, lse is not None]
    arguments += [*modes, *[0] * max(version - 3, 0), out, lse]
    return f"aclnnFusedInferAttentionScoreV{version}", arguments


def infer(*arguments: object, **options: object) -> list[Tensor]:
    """Output and log-sum-exp."""
    op, all_arguments = fia(*arguments, **options)
    return run(op, *all_arguments)[-2:]


def to_layout(x: Tensor, layout: str) -> Tensor:
    """[B, N, S, D] in another order."""
    return {
        "BNSD": lambda: x,
        "BSND": lambda: x.transpose(1, 2),
        "BSH": lambda: x.transpose(1, 2).flatten(2),
        "NBSD": lambda: x.transpose(0, 1),
    }[layout]().contiguous()


def problem(
    dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, columns: int, d: int
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, heads, rows, d), (batch, kv_heads, columns, d), (batch, kv_heads, columns, d)
    return tuple(randn(*s, dtype=dtype) for s in shapes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "BNSD_BSND", "BSH_BNSD", "BSND_NBSD"])
@pytest.mark.parametrize("rows", [1, 7])
def test_layouts_and_grouped_heads(dtype: torch.dtype, layout: str, rows: int) -> None:
    q, k, v = problem(dtype, 2, 6, 2, rows, 11, 64)
    want, lse = attention64(q, k, v)
    into, _, from_ = layout.partition("_")
    tensors = [to_layout(x, into) for x in (q, k, v)]
    out = torch.empty_like(to_layout(q, from_ or into))
    for version in (2, 3, 4):
        options = {"heads": 6, "kv_heads": 2, "layout": layout, "scale": 0.125}
        got, got_lse = infer(
            version, tensors[0], [tensors[1]], [tensors[2]], out, lse=torch.empty(2, 6, rows, 1), **options
        )
        near(got, to_layout(want, from_ or into))
        assert (got_lse - lse).abs().max() < 1e-4


def causal(rows: int, columns: int, right: bool) -> Tensor:
    offset = columns - rows if right else 0
    return torch.ones(rows, columns, dtype=torch.bool).triu(offset + 1)


def band(rows: int, columns: int, pre: int, next_: int, offset: int) -> Tensor:
    ages = torch.arange(rows)[:, None] + offset - torch.arange(columns)
    return (ages > pre) | (-ages > next_)


@pytest.mark.parametrize("rows, columns", [(5, 9), (9, 9), (9, 5)])
def test_sparse_modes(rows: int, columns: int) -> None:
    q, k, v = problem(torch.float16, 1, 2, 2, rows, columns, 64)
    own = torch.rand(rows, columns) < 0.4
    own[:, 0] = False
    cases = [
        ({"sparse": 0, "pre": 1, "next_": 1}, None),  # without a mask they are without effect
        ({"sparse": 0, "mask": own}, own),
        ({"sparse": 0, "mask": own, "pre": 3, "next_": 2}, own | band(rows, columns, 3, 2, 0)),
        ({"sparse": 1, "mask": own, "pre": 1, "next_": 1}, own),
        ({"sparse": 2, "mask": FIXED_MASK, "pre": 1}, causal(rows, columns, False)),
        ({"sparse": 3, "mask": FIXED_MASK.byte(), "pre": 1}, causal(rows, columns, True)),
        ({"sparse": 4, "mask": FIXED_MASK, "pre": 2, "next_": 0}, band(rows, columns, 2, 0, columns - rows)),
    ]
    for options, hidden in cases:
        if options.get("mask") is own and hidden is not None and hidden.all(-1).any():
            options["precise"] = 2  # rows that see nothing
        want, lse = attention64(q, k, v, hidden)
        options |= {
            "heads": 2,
            "kv_heads": 0,
            "layout": "BNSD",
            "scale": 0.125,
            "lse": torch.empty(1, 2, rows, 1),
        }
        got, got_lse = infer(4, q, [k], [v], torch.empty_like(q), **options)
        near(got, want)
        assert torch.equal(got_lse.isinf(), lse.isinf())
        assert (got_lse - lse)[~lse.isinf()].abs().max() < 1e-4


@pytest.mark.parametrize("shape", ["(Q, KV)", "(B, Q, KV)", "(B, 1, Q, KV)", "(1, 1, Q, KV)", "wider"])
def test_mask_shapes(shape: str) -> None:
    q, k, v = problem(torch.bfloat16, 2, 2, 1, 3, 6, 64)
    one, two = torch.rand(3, 6) < 0.5, torch.rand(2, 3, 6) < 0.5
    one[:, 1] = two[:, :, 1] = False
    mask, hidden = {
        "(Q, KV)": (one, one),
        "(B, Q, KV)": (two, two[:, None]),
        "(B, 1, Q, KV)": (two[:, None], two[:, None]),
        "(1, 1, Q, KV)": (one[None, None], one),
        "wider": (torch.nn.functional.pad(one, (0, 10, 0, 13), value=True), one),
    }[shape]
    options = {"heads": 2, "kv_heads": 1, "layout": "BNSD", "scale": 0.125, "mask": mask.contiguous()}
    near(infer(3, q, [k], [v], torch.empty_like(q), **options)[0], attention64(q, k, v, hidden)[0])


def test_one_row_ignores_sparse_mode_and_window() -> None:
    # Of heads that IncreFlashAttention's tiling takes.
    q, k, v = problem(torch.float16, 2, 4, 4, 1, 9, 256)
    options = {"heads": 4, "kv_heads": 4, "layout": "BNSD", "scale": 256**-0.5, "pre": 0, "next_": 0}
    want = attention64(q, k, v)[0]
    for sparse in (0, 2, 3, 4):
        near(infer(4, q, [k], [v], torch.empty_like(q), sparse=sparse, **options)[0], want)
    hidden = torch.rand(2, 9) < 0.5
    hidden[:, 3] = False
    for mask in (hidden, hidden[:, None], hidden[:, None, None]):
        got = infer(4, q, [k], [v], torch.empty_like(q), sparse=2, mask=mask.contiguous(), **options)[0]
        near(got, attention64(q, k, v, hidden[:, None, None])[0])


def test_rows_that_see_nothing() -> None:
    """Without the repair of innerPrecise 2 and 3 such a row is the mean of all values."""
    q, k, v = problem(torch.float16, 1, 1, 1, 3, 5, 64)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1] = True
    options = {"heads": 1, "kv_heads": 1, "layout": "BNSD", "scale": 0.125, "mask": mask}
    out, lse = infer(4, q, [k], [v], torch.empty_like(q), precise=2, lse=torch.empty(1, 1, 3, 1), **options)
    near(out, attention64(q, k, v, mask)[0])
    assert lse[0, 0].isinf().flatten().tolist() == [False, True, False]
    out = infer(4, q, [k], [v], torch.empty_like(q), precise=0, **options)[0]
    near(out[0, 0, 1], v[0, 0].double().mean(0))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_ragged_lengths(layout: str) -> None:
    q, k, v = problem(torch.bfloat16, 3, 4, 2, 5, 9, 64)
    q_lens, kv_lens = [5, 2, 0], [9, 4, 7]
    out, want = torch.empty_like(q), torch.zeros_like(q).double()
    for b, (rows, columns) in enumerate(zip(q_lens, kv_lens, strict=True)):
        want[b, :, :rows] = attention64(
            q[b : b + 1, :, :rows],
            k[b : b + 1, :, :columns],
            v[b : b + 1, :, :columns],
            causal(rows, columns, True),
        )[0]
    tensors = [to_layout(x, layout) for x in (q, k, v, out)]
    options = {"heads": 4, "kv_heads": 2, "layout": layout, "scale": 0.125, "sparse": 3, "mask": FIXED_MASK}
    lse = torch.empty(3, 4, 5, 1)
    options |= {"q_lens": q_lens, "kv_lens": kv_lens}
    got, lse = infer(4, tensors[0], [tensors[1]], [tensors[2]], tensors[3], lse=lse, **options)
    near(got, to_layout(want, layout))
    assert lse[1, :, 2:].isinf().all() and lse[2].isinf().all()
    lists = [[to_layout(x[b : b + 1], layout) for b in range(3)] for x in (k, v)]
    assert torch.equal(infer(4, tensors[0], *lists, tensors[3], **options)[0], got)


def test_right_aligned_sequences() -> None:
    q, k, v = problem(torch.float16, 1, 2, 2, 6, 9, 64)
    options = {"heads": 2, "kv_heads": 2, "layout": "BNSD", "scale": 0.125, "q_lens": [4], "kv_lens": [7]}
    padding = {"q_padding": torch.tensor([1]), "kv_padding": torch.tensor([0])}
    got = infer(3, q, [k], [v], torch.empty_like(q), **options, **padding)[0]
    near(got[:, :, 1:5], attention64(q[:, :, 1:5], k[:, :, 2:], v[:, :, 2:])[0])
    assert not got[:, :, 0].any() and not got[:, :, 5].any()


def blocks(x: Tensor, lens: list[int], table: Tensor, size: int, form: str) -> Tensor:
    """A cache with the sequences of [B, N, S, D] in its blocks; what no sequence uses is NaN."""
    heads, d = x.shape[1], x.shape[3]
    cache = torch.full((int(table.max()) + 1, heads, size, d), float("nan"), dtype=x.dtype)
    for b, length in enumerate(lens):
        for t in range(length):
            cache[table[b, t // size], :, t % size] = x[b, :, t]
    if form == "BnNBsD":
        return cache
    if form == "BnBsH":
        return cache.transpose(1, 2).flatten(2).contiguous()
    return cache.unflatten(-1, (-1, 16)).transpose(2, 3).contiguous()


@pytest.mark.parametrize("form", ["BnNBsD", "BnBsH", "NZ"])
@pytest.mark.parametrize("layout", ["BNSD", "BSH", "TND"])
@pytest.mark.parametrize("rows", [1, 3])
def test_paged_cache(form: str, layout: str, rows: int) -> None:
    lens = [20, 0, 33]  # a sequence without keys gives zeros
    q, k, v = problem(torch.bfloat16, 3, 4, 2, rows, 40, 64)
    table = torch.tensor([[4, 0, 0], [1, 0, 0], [2, 5, 3]], dtype=torch.int32)
    caches = [blocks(x, lens, table, 16, form) for x in (k, v)]
    want = torch.cat([
        attention64(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal(rows, n, True))[0]
        for b, n in enumerate(lens)
    ])  # fmt: skip
    options = {"heads": 4, "kv_heads": 2, "scale": 0.125, "kv_lens": lens, "table": table, "block": 16}
    if rows > 1 or layout == "TND":
        options |= {"sparse": 3, "mask": FIXED_MASK}
    if layout == "TND":
        query, want = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, want))
        options["q_lens"] = [rows * (b + 1) for b in range(3)]
    else:
        query, want = to_layout(q, layout), to_layout(want, layout)
    for version in (2, 3, 4):
        near(
            infer(
                version, query, [caches[0]], [caches[1]], torch.empty_like(query), layout=layout, **options
            )[0],
            want,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["TND", "NTD", "NTD_TND"])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences(dtype: torch.dtype, layout: str, window: int | None) -> None:
    q_lens, kv_lens, d = [3, 1, 5], [4, 6, 5], 64
    parts = [problem(dtype, 1, 4, 2, m, n, d) for m, n in zip(q_lens, kv_lens, strict=True)]
    q, k, v = (torch.cat([p[i][0].transpose(0, 1) for p in parts]) for i in range(3))
    hidden = [
        causal(m, n, True) if window is None else band(m, n, window - 1, 0, n - m)
        for m, n in zip(q_lens, kv_lens, strict=True)
    ]
    wants = [attention64(*p, h) for p, h in zip(parts, hidden, strict=True)]
    want, lse = (torch.cat([w[i][0].transpose(0, 1) for w in wants]) for i in (0, 1))
    if layout != "TND":
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    if layout == "NTD":
        want = want.transpose(0, 1)
    options = {"sparse": 3} if window is None else {"sparse": 4, "pre": window - 1, "next_": 0}
    options |= {"heads": 4, "kv_heads": 2, "layout": layout, "scale": 0.125, "mask": FIXED_MASK}
    sums = [list(itertools.accumulate(lens)) for lens in (q_lens, kv_lens)]
    out, lse_out = torch.empty(want.shape, dtype=dtype), torch.empty(sum(q_lens), 4, 1)
    got, got_lse = infer(4, q, [k], [v], out, q_lens=sums[0], kv_lens=sums[1], lse=lse_out, **options)
    near(got, want)
    assert (got_lse - lse).abs().max() < 1e-4


@pytest.mark.parametrize("rows", [1, 4])
def test_sinks_take_a_part_of_the_softmax(rows: int) -> None:
    q, k, v = problem(torch.bfloat16, 2, 4, 2, rows, 6, 64)
    sinks = randn(4, dtype=torch.bfloat16) * 2
    options = {"heads": 4, "kv_heads": 2, "layout": "BNSD", "scale": 0.125, "sinks": sinks}
    near(infer(4, q, [k], [v], torch.empty_like(q), **options)[0], attention64(q, k, v, sinks=sinks)[0])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_bias_is_added_after_the_scale(rows: int, batch: int) -> None:
    q, k, v = problem(torch.float16, 2, 4, 2, rows, 6, 64)
    bias = randn(batch, 4, rows, 16, dtype=torch.float16)  # wider than the keys
    options = {"heads": 4, "kv_heads": 2, "layout": "BNSD", "scale": 0.125, "bias": bias}
    near(
        infer(3, q, [k], [v], torch.empty_like(q), **options)[0], attention64(q, k, v, bias=bias[..., :6])[0]
    )


def test_rotated_part_of_latent_attention_comes_apart() -> None:
    q, k, v = problem(torch.bfloat16, 1, 4, 1, 3, 5, 128)
    rope = randn(1, 4, 3, 64, dtype=torch.bfloat16), randn(1, 1, 5, 64, dtype=torch.bfloat16)
    options = {"heads": 4, "kv_heads": 1, "layout": "BNSD", "scale": 0.1, "sparse": 3, "mask": FIXED_MASK}
    got = infer(3, q, [k], [v], torch.empty_like(q), rope=rope, **options)[0]
    whole = torch.cat((q, rope[0]), -1), torch.cat((k, rope[1]), -1)
    near(got, attention64(*whole, v, causal(3, 5, True), scale=0.1)[0])


def integers(*shape: int) -> tuple[Tensor, Tensor]:
    """int8 [B, N, S, D], and what a row of them is multiples of, [B, N, S]."""
    return torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[:3]) * 0.02 + 0.001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("length", [None, 7])
def test_integers_with_a_scale_for_each_token_and_head(
    dtype: torch.dtype, layout: str, length: int | None
) -> None:
    q = randn(3, 4, 1, 64, dtype=dtype)
    (k, k_scales), (v, v_scales) = integers(3, 2, 11, 64), integers(3, 2, 11, 64)
    end = length or 11
    want, _ = attention64(
        q, *((x.double() * s.double()[..., None])[:, :, :end] for x, s in ((k, k_scales), (v, v_scales)))
    )
    tensors = [to_layout(x, layout) for x in (q, k, v)]
    out = torch.empty_like(tensors[0])
    options = {"heads": 4, "kv_heads": 2, "layout": layout, "scale": 0.125, "modes": (3, 3)}
    options |= {"kv_lens": [length] if length else None, "scales": (k_scales, v_scales)}
    for version in (2, 3, 4):
        got, _ = infer(version, tensors[0], [tensors[1]], [tensors[2]], out, **options)
        near(got, to_layout(want, layout))


def test_integers_with_a_scale_for_each_token() -> None:
    q = randn(3, 4, 5, 64, dtype=torch.bfloat16)
    (k, k_scales), (v, v_scales) = integers(3, 1, 11, 64), integers(3, 1, 11, 64)
    hidden = torch.ones(5, 11, dtype=torch.bool).triu(11 - 5 + 1)
    exact = [x.double() * s.double()[..., None] for x, s in ((k, k_scales), (v, v_scales))]
    want, _ = attention64(q, *exact, hidden=hidden)
    options = {"heads": 4, "kv_heads": 1, "layout": "BNSD", "scale": 0.125, "modes": (1, 1)}
    scales = k_scales[:, 0].contiguous(), v_scales[:, 0].contiguous()
    got, _ = infer(3, q, [k], [v], torch.empty_like(q), sparse=3, mask=FIXED_MASK, scales=scales, **options)
    near(got, want)
    one = q[:, :, -1:].contiguous()
    scales = tuple(x[None] for x in scales)
    got, _ = infer(3, one, [k], [v], torch.empty_like(one), scales=scales, **options)
    near(got, want[:, :, -1:])
