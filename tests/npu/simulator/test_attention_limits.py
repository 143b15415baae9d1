"""What inference attention refuses, each with its message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cann_sim.releases import DEFAULT_RELEASE
from npu.simulator.calls import refused, run, started, strided
from npu.simulator.test_attention import FIXED_MASK, fia
from torch import Tensor

HALF = torch.float16
#: Those whose tiling is public.
PUBLIC_RELEASES = ("8.5.0", "9.0.0", "9.1.0")


def zeros(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def call(
    version: int = 4, rows: int = 4, columns: int = 6, d: int = 64, **options: object
) -> tuple[str, list[object]]:
    """A call that is accepted, but for `options`: BNSD, 8 heads, 2 key heads."""
    q, key = zeros(2, 8, rows, d), zeros(2, 2, columns, d)
    defaults = {"heads": 8, "kv_heads": 2, "layout": "BNSD", "q": q, "k": [key], "v": [key], "out": q}
    options = defaults | options
    tensors = [options.pop(name) for name in ("q", "k", "v", "out")]
    return fia(version, *tensors, **options)


def check(
    message: str, code: int = 161002, soc: str = "910B", release: str = DEFAULT_RELEASE, **options: object
) -> None:
    op, arguments = call(**options)
    refused(op, *arguments, message=message, code=code, soc=soc, release=release)


def accepted(releases: Sequence[str] = PUBLIC_RELEASES, **options: object) -> None:
    """Phase 1 takes the call; what its result is other tests say."""
    op, arguments = call(**options)
    for release in releases:
        run(op, *arguments, release=release)


def test_the_call_the_others_differ_from_is_accepted() -> None:
    for version in (2, 3, 4):
        op, arguments = call(version)
        run(op, *arguments)


def test_availability() -> None:
    for version in (2, 3, 4):
        check("not supported on Ascend310P3", soc="310P", version=version)
    for version in (2, 3, 4):
        op, arguments = call(version)
        started("910C").run(op, *arguments)


def test_tensors() -> None:
    q, key = zeros(2, 8, 4, 64), zeros(2, 2, 6, 64)
    check("query is null", code=161001, q=None)
    check("key or value is null", code=161001, k=None)
    check("attentionOut is null", code=161001, out=None)
    check("query is Float; supported here: Half, BFloat16", q=q.float())
    check("key is BFloat16, query is Half", k=[key.bfloat16()])
    check("attentionOut is Float, query is Half", out=q.float())
    check("query is not contiguous", q=strided(q))
    check("key is not contiguous", k=[strided(key)])
    check("attenMask is not contiguous", mask=strided(torch.zeros(4, 6, dtype=torch.bool)))
    check("key has shape [2, 2, 6, 64], value [2, 2, 5, 64]", v=[zeros(2, 2, 5, 64)])
    check("attentionOut has shape [2, 8, 4, 32]", out=zeros(2, 8, 4, 32))
    check("key is a list of 3 tensors with B 2", k=[zeros(1, 2, 6, 64)] * 3, v=[zeros(1, 2, 6, 64)] * 3)
    check("key has batch 2, it must be 1", k=[key, key], v=[key, key])


def test_heads() -> None:
    check("D is 24, it must be a multiple of 16", d=24)
    check("D is 528, it must be a multiple of 16 and at most 512", d=528)
    check("numHeads 8 is no multiple of numKeyValueHeads 3", kv_heads=3)
    check("key has 2 heads, numKeyValueHeads is 4", kv_heads=4)
    check("query has 8 heads, numHeads is 4", heads=4)
    wide = zeros(1, 65, 2, 16)
    many = {"q": wide, "out": wide, "k": [wide[:, :1]], "v": [wide[:, :1]], "heads": 65, "kv_heads": 1}
    check("numHeads / numKeyValueHeads is 65", **many)
    check("numHeads is 300", q=zeros(1, 300, 2, 16), heads=300)
    merged = zeros(2, 4, 100)
    check("H 100 is no multiple of numHeads 8", q=merged, out=merged, layout="BSH")
    check(
        "key has H 100, it must be numKeyValueHeads * D = 128",
        q=zeros(2, 4, 512),
        k=[zeros(2, 6, 100)],
        v=[zeros(2, 6, 100)],
        layout="BSH",
    )


def test_head_sizes_of_one_row() -> None:
    """Of several rows, and where the incremental tiling takes one, heads are multiples of 16."""
    accepted(("9.0.0", "9.1.0"), rows=1, d=8)
    check("D is 8, it must be a multiple of 16", rows=1, d=8, release="8.5.0")
    check("D is 8, it must be a multiple of 16", rows=1, d=8, layout="BNSD_BSND")


def test_without_keys() -> None:
    """Nothing of them is looked at, nor of masks."""
    options = {"columns": 0, "kv_heads": 1, "mask": torch.zeros(2, 4, 9, dtype=torch.bool)}
    accepted(("9.0.0", "9.1.0"), **options)
    op, arguments = call(**options)
    out = started().run(op, *arguments)[-2]
    assert out.shape == (2, 8, 4, 64) and not out.any()
    check("attentionOut has shape [2, 8, 3, 64]", out=zeros(2, 8, 3, 64), **options)
    check("key has 2 heads, numKeyValueHeads is 1", release="8.5.0", **options)


def test_values_of_another_size_than_keys() -> None:
    def sizes(d: int, value: int) -> dict[str, object]:
        return {"d": d, "v": [zeros(2, 2, 6, value)], "out": zeros(2, 8, 4, value)}

    accepted(**sizes(192, 128))
    for d, value in ((192, 64), (128, 192), (96, 64)):
        check(f"D is {d} and that of values {value}", **sizes(d, value))
    check("pseShift does not go with values of another D", bias=zeros(2, 8, 4, 6), **sizes(192, 128))
    lists = sizes(192, 128) | {"k": [zeros(1, 2, 6, 192)] * 2, "v": [zeros(1, 2, 6, 128)] * 2}
    check("a list of keys does not go with values of another D", **lists)


def test_attributes() -> None:
    check('inputLayout "SBH" is not supported', layout="SBH")
    check("innerPrecise is 4", precise=4)
    check("sparseMode is 5", sparse=5)
    check("sparseMode 9 (tree) is not simulated", sparse=9)
    check("actualSeqLengthsKv has 7, it must be 0 to 6", kv_lens=[7])
    check("actualSeqLengths has 5, it must be 0 to 4", q_lens=[5, 1])


def test_precision_modes_by_tiling() -> None:
    narrow = {"d": 32, "rows": 1, "precise": 2}
    check("innerPrecise is 2; one query row with D 32", release="8.5.0", **narrow)
    accepted(("9.0.0", "9.1.0"), **narrow)
    accepted(rows=1, precise=2)
    wide = {"d": 256, "rows": 1, "precise": 2}
    key = zeros(2, 8, 6, 256)
    multi_head = wide | {"k": [key], "v": [key], "kv_heads": 8}
    for release in ("9.0.0", "9.1.0"):
        check("innerPrecise is 2; one query row with D 256", release=release, **multi_head)
        for rows, precise in ((1, 0), (1, 1), (16, 2)):
            accepted((release,), **integers(rows, precise=precise))
        check("innerPrecise is 2", release=release, **integers(precise=2))
    check("innerPrecise is 2", release="8.5.0", **integers(precise=2))
    accepted(("9.0.0", "9.1.0"), **wide)


def test_masks() -> None:
    own = torch.zeros(4, 6, dtype=torch.bool)
    for sparse in (2, 3, 4):
        check(f"sparseMode {sparse} needs the fixed mask", sparse=sparse)
        check("needs a mask of (2048, 2048), it has shape [4, 6]", sparse=sparse, mask=own)
    check("the band of preTokens -3 and nextTokens 1 is empty", sparse=4, mask=FIXED_MASK, pre=-3, next_=1)
    check("sparseMode 1 needs the whole mask", sparse=1)
    check("attenMask is Half; supported here: Bool, Char, Byte", mask=own.half())
    check("attenMask has shape [3, 6]", mask=own[:3])
    check("attenMask has shape [4, 5]", mask=own[:, :5].contiguous())
    check("attenMask has shape [2, 8, 4, 6]", mask=own.expand(2, 8, 4, 6).contiguous())
    check("attenMask has shape [3, 4, 6]", mask=own.expand(3, 4, 6).contiguous())
    op, arguments = call(mask=FIXED_MASK.logical_not(), sparse=3)
    assert "is not that of a 2048 x 2048 strict upper triangle" in started().call(op, *arguments)["message"]


def test_masks_of_two_axes() -> None:
    """Refused beside rotated parts, values of another size than keys, and layouts that change."""
    own = torch.zeros(4, 6, dtype=torch.bool)
    sizes = {"d": 192, "v": [zeros(2, 2, 6, 128)], "out": zeros(2, 8, 4, 128)}
    rope = {"d": 128, "rope": (zeros(2, 8, 4, 64), zeros(2, 2, 6, 64)), "version": 3}
    for release in PUBLIC_RELEASES:
        for options in (sizes, rope):
            check("values of another size than keys, it needs 3 or 4", mask=own, release=release, **options)
            accepted((release,), mask=own[None, None], **options)
    keys, out = [zeros(2, 6, 2, 64)], zeros(2, 8, 4, 64)
    back = {"layout": "BSND_BNSD", "q": zeros(2, 4, 8, 64), "k": keys, "v": keys, "out": out}
    check("with layout BSND_BNSD it needs 3 or 4 axes", mask=own, **back)
    accepted(mask=own[None, None], **back)


def test_columns_of_masks_and_biases_are_those_of_the_cache() -> None:
    short = torch.zeros(2, 1, 4, 3, dtype=torch.bool)
    check("attenMask has shape [2, 1, 4, 3]", mask=short, kv_lens=[3])
    check("pseShift has shape [2, 8, 4, 3]", bias=zeros(2, 8, 4, 3), kv_lens=[3])
    check("pseShift has shape [2, 8, 1, 3]", rows=1, bias=zeros(2, 8, 1, 3), kv_lens=[3])
    row = torch.zeros(2, 3, dtype=torch.bool)
    for release in PUBLIC_RELEASES:
        check("attenMask has shape [2, 3]", rows=1, mask=row, kv_lens=[3], release=release)
    # Head sizes that 8.5.0 leaves to the tiling of IncreFlashAttention, and integers in every release.
    accepted(("8.5.0",), rows=1, mask=row, kv_lens=[3], d=32)
    check("attenMask has shape [2, 3]", rows=1, mask=row, kv_lens=[3], d=32, release="9.1.0")
    accepted(**integers(mask=row, kv_lens=[3]))


def test_mask_of_one_row() -> None:
    check("one query row with sparseMode 3 is not simulated", rows=1, sparse=3, mask=FIXED_MASK)
    old = {"rows": 1, "d": 32, "release": "8.5.0"}
    check("needs a mask of (2048, 2048)", sparse=3, mask=torch.zeros(2, 6, dtype=torch.bool), **old)
    check("attenMask has shape [1, 6]", rows=1, mask=torch.zeros(1, 6, dtype=torch.bool))
    check("attenMask has shape [2, 8, 1, 6]", rows=1, mask=torch.zeros(2, 8, 1, 6, dtype=torch.bool))
    check("KV_S at least 6", rows=1, mask=torch.zeros(2, 5, dtype=torch.bool))
    accepted(rows=1, mask=torch.zeros(1, 1, 1, 6, dtype=torch.bool))
    row = "one query row takes (B, KV_S), (B, 1, KV_S) or (B, 1, 1, KV_S) with B 2"
    check(row, mask=torch.zeros(1, 1, 1, 6, dtype=torch.bool), **old)
    check(row, **integers(mask=torch.zeros(1, 1, 1, 6, dtype=torch.bool)))


def test_bias_and_sinks() -> None:
    check("pseShift has shape [2, 8, 4, 5]", bias=zeros(2, 8, 4, 5))
    check("pseShift is BFloat16, query is Half", bias=zeros(2, 8, 4, 6, dtype=torch.bfloat16))
    check("learnableSink is Float", sinks=torch.zeros(8))
    for release in ("9.0.0", "9.1.0"):
        check("learnableSink is Half; supported here: BFloat16", sinks=zeros(8), release=release)
        accepted((release,), sinks=zeros(8, dtype=torch.bfloat16), d=32)
    accepted(("8.5.0",), sinks=zeros(8))
    sinks = zeros(8, dtype=torch.bfloat16)
    check("learnableSink has shape [4]", sinks=sinks[:4].clone())
    check("learnableSink does not go with pseShift", sinks=sinks, bias=zeros(2, 8, 4, 6))
    check("learnableSink is BFloat16, query is Half", sinks=sinks, release="8.5.0")
    check("learnableSink needs values of D 64 or 128, it is 32", sinks=zeros(8), d=32, release="8.5.0")


def test_outputs() -> None:
    check("softmaxLse has shape [2, 8, 4]", lse=torch.zeros(2, 8, 4))
    check("softmaxLse is Half", lse=zeros(2, 8, 4, 1))


def paged(cache: tuple[int, ...], message: str, **options: object) -> None:
    table = torch.zeros(2, 3, dtype=torch.int32)
    check(
        message,
        **{"k": [zeros(*cache)], "v": [zeros(*cache)], "table": table, "kv_lens": [20, 33], "block": 16}
        | options,
    )


def test_paged_caches() -> None:
    good = (6, 2, 16, 64)
    paged(good, "a paged cache needs actualSeqLengthsKv", kv_lens=None)
    paged(good, "blockSize is 24, it must be a positive multiple of 16", block=24)
    paged(good, "blockSize is 0", block=0)
    paged((6, 2, 2048, 64), "blockSize is 2048, at most 1024", block=2048)
    paged((6, 2, 16, 96), "blockSize is 16 with D 96 and more than one query row: a multiple of 128", d=96)
    paged(
        (6, 2, 1024, 96),
        "blockSize is 1024 with D 96 and one query row: at most 512",
        d=96,
        block=1024,
        rows=1,
    )
    paged(
        good,
        "blockTable has 2 columns, the longest sequence has 3",
        table=torch.zeros(2, 2, dtype=torch.int32),
    )
    paged(good, "blockTable has 1 rows, B is 2", table=torch.zeros(1, 3, dtype=torch.int32))
    paged(good, "blockTable is Long", table=torch.zeros(2, 3, dtype=torch.int64))
    paged((4, 2, 16, 64), "the cache has 4 blocks, the sequences have 5")
    paged((6, 16, 2, 64), "the cache has shape [6, 16, 2, 64], it must be [6, 2, 16, 64]")
    paged((6, 2, 4, 16, 8), "in FRACTAL_NZ it is [6, 2, 4, 16, 16]")
    paged((6, 16, 65536), "N * D of the cache is 65536, at most 65535")
    paged(good, "a paged cache does not go with left padding", kv_padding=torch.tensor([0]))
    paged(good, "KV_S at least 48", rows=1, mask=torch.zeros(2, 33, dtype=torch.bool))
    table = torch.full((2, 3), 7, dtype=torch.int32)
    op, arguments = call(k=[zeros(*good)], v=[zeros(*good)], table=table, kv_lens=[20, 33], block=16)
    assert "a block id is not in the cache of 6 blocks" in started().call(op, *arguments)["message"]


def packed(
    message: str, tokens: int = 5, d: int = 64, heads: int = 8, kv_heads: int = 2, **options: object
) -> None:
    q, key = zeros(tokens, heads, d), zeros(tokens, kv_heads, d)
    lens = {"q_lens": [2, 5], "kv_lens": [2, 5]}
    tensors = {
        "q": q,
        "k": [key],
        "v": [key],
        "out": q,
        "heads": heads,
        "kv_heads": kv_heads,
        "layout": "TND",
    }
    check(message, **tensors | lens | options)


def test_packed_layouts() -> None:
    packed("layout TND needs actualSeqLengths and actualSeqLengthsKv", q_lens=None)
    packed("actualSeqLengths ends with 4, there are 5 tokens", q_lens=[2, 4])
    packed("actualSeqLengths is [5, 2]", q_lens=[5, 2])
    packed("actualSeqLengths and actualSeqLengthsKv have 2 and 1 entries", kv_lens=[5])
    packed("packed layouts take sparseMode 0 without a mask", mask=torch.zeros(5, 5, dtype=torch.bool))
    packed("packed layouts take sparseMode 0, 3 and 4", sparse=2, mask=FIXED_MASK)
    packed("packed layouts do not go with pseShift", bias=zeros(1, 8, 5, 5))
    packed("layout TND with D 80, sparseMode 0 and innerPrecise 1: 64 or 128", d=80, precise=1)
    packed(
        "layout TND with D 80, sparseMode 0 and innerPrecise 0: 64 or 128", d=80, kv_heads=8, release="8.5.0"
    )
    packed("layout TND with D 320", d=320)
    # A window over heads of 256, as Gemma has them.
    window = {"d": 256, "sparse": 4, "mask": FIXED_MASK, "pre": 3, "next_": 0}
    packed("layout TND with D 256, sparseMode 4", release="8.5.0", **window)
    packed("layout TND with D 320, sparseMode 4", **window | {"d": 320})
    cache = zeros(2, 256, 128)
    packed(
        "packed layouts take at most 128 in a cache [blocks, size, N * D]",
        k=[cache],
        v=[cache],
        block=256,
        table=torch.zeros(2, 1, dtype=torch.int32),
        kv_lens=[2, 3],
    )


def test_latent_attention() -> None:
    rope = zeros(2, 8, 4, 64), zeros(2, 2, 6, 64)
    check("queryRope and keyRope go together", rope=(rope[0], None), version=3)
    check("queryRope needs D 512 or 128, it is 64", rope=rope, version=3)
    latent = {"d": 512, "version": 3}
    for heads in (128, 256):
        given = latent | {
            "q": zeros(2, heads, 4, 512),
            "k": [zeros(2, 1, 6, 512)],
            "v": [zeros(2, 1, 6, 512)],
        }
        given |= {"rope": (zeros(2, heads, 4, 64), zeros(2, 1, 6, 64)), "heads": heads, "kv_heads": 1}
        given["out"] = given["q"]
        if heads == 128:
            accepted(**given)
        else:
            check("numHeads / numKeyValueHeads is 256, at most 128", **given)
    check(
        "queryRope has D 32, it must be 64", rope=(zeros(2, 8, 4, 32), zeros(2, 2, 6, 32)), d=128, version=3
    )


def integers(rows: int = 1, d: int = 64, dtype: torch.dtype = torch.bfloat16, **others: object) -> dict:
    """Options of a call with keys and values of 8 bits: one query row, or several with one key head."""
    kv_heads = 2 if rows == 1 else 1
    q, key = zeros(2, 8, rows, d, dtype=dtype), zeros(2, kv_heads, 6, d, dtype=torch.int8)
    shape = (2, kv_heads, 6) if rows == 1 else (2, 6)
    scales = zeros(*shape, dtype=torch.float32)
    mode = 3 if rows == 1 else 1
    given = {"q": q, "k": [key], "v": [key], "out": q, "kv_heads": kv_heads}
    return given | {"scales": (scales, scales), "modes": (mode, mode)} | others


def test_integers() -> None:
    for rows, dtype in ((1, torch.bfloat16), (1, HALF), (16, torch.bfloat16)):
        for version in (2, 3, 4):
            op, arguments = call(version, **integers(rows, dtype=dtype))
            run(op, *arguments)
    scales = zeros(2, 2, 6, dtype=torch.float32)
    check("keyAntiquantScale and valueAntiquantScale go together", **integers(scales=(scales, None)))
    check("keyAntiquantMode is 3, valueAntiquantMode 1", **integers(modes=(3, 1)))
    check("key is BFloat16; supported here: Char", **integers(k=[zeros(2, 2, 6, 64, dtype=torch.bfloat16)]))
    check("keyAntiquantScale is Half", **integers(scales=(scales.half(), scales)))
    check("keyAntiquantScale has shape [2, 1, 6]", **integers(scales=(scales[:, :1].contiguous(), scales)))
    check("keyAntiquantScale is not contiguous", **integers(scales=(strided(scales), scales)))
    check("keyAntiquantMode 2 is not simulated", **integers(modes=(2, 2)))
    check("D is 80, with integers it must be a multiple of 32", **integers(d=80))
    check(
        "integers do not go with packed layouts", version=4, **integers(sinks=zeros(8, dtype=torch.bfloat16))
    )


def test_integers_and_several_query_rows() -> None:
    check("query has 17 rows, with integers at most 16", **integers(17))
    check("query (several rows, with integers) is Half", **integers(4, dtype=HALF))
    check("several query rows take keyAntiquantMode 0 and 1, it is 3", **integers(4, modes=(3, 3)))
    padding = torch.zeros(1, dtype=torch.int64)
    check("do not go with left padding", **integers(4, kv_padding=padding, kv_lens=[4]))


def test_a_950_has_v5_and_limits_of_its_own() -> None:
    new = {"soc": "950", "version": 5}
    for version in (2, 3, 4):
        check("not supported on Ascend950", soc="950", version=version)
    check("not supported on Ascend910B2", version=5)
    for options in ({}, {"d": 80}, {"mask": zeros(1, 4, 6, dtype=torch.bool)}):
        op, arguments = call(5, **options)
        started("950").run(op, *arguments)
    sinks = torch.zeros(8, dtype=HALF)
    op, arguments = call(5, sinks=sinks)
    started("950").run(op, *arguments)
    check("learnableSink is BFloat16, query is Half", sinks=sinks.bfloat16(), **new)
    check("learnableSink needs D 64, 128 or 192", sinks=sinks, d=80, **new)
    check("learnableSink needs innerPrecise 0", sinks=sinks, precise=2, **new)
    check("attenMask has 2 axes", mask=zeros(4, 6, dtype=torch.bool), **new)
    narrow = {"v": [zeros(2, 2, 6, 32)], "out": zeros(2, 8, 4, 32)}
    op, arguments = call(5, **narrow)
    started("950").run(op, *arguments)
    check("others than 128 beside 192 are at most 128", d=256, **narrow, **new)
    check("sparseMode 4 does not go with values", sparse=4, mask=FIXED_MASK, **narrow, **new)
