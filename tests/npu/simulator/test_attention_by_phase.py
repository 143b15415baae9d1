"""PromptFlashAttention and IncreFlashAttention against float64, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from npu.simulator.calls import randn, refused, started
from npu.simulator.test_attention import BIG, FIXED_MASK, attention64, near
from torch import Tensor

HALF = torch.float16
PROMPT, INCREMENTAL = "aclnnPromptFlashAttentionV3", "aclnnIncreFlashAttentionV4"
Call = tuple[str, list[Any]]


def half(*shape: int) -> Tensor:
    return randn(*shape, dtype=HALF)


def prompt(rows: int = 32, columns: int = 32, d: int = 64, **changes: Any) -> Call:
    """A call that is taken, but for `changes`: BNSD, 4 heads, 2 key heads."""
    q, k, v = half(2, 4, rows, d), half(2, 2, columns, d), half(2, 2, columns, d)
    a = {"q": q, "k": k, "v": v, "mask": FIXED_MASK, "bias": None, "q_lengths": None, "lengths": None}
    a |= {"heads": 4, "pre": BIG, "next": 0, "layout": "BNSD", "kv_heads": 2, "sparse": 0, "precise": 0}
    a |= changes
    tensors = [a["q"], a["k"], a["v"], a["bias"], a["mask"], a["q_lengths"], a["lengths"], *[None] * 5]
    numbers = [a["heads"], 0.125, a["pre"], a["next"], a["layout"], a["kv_heads"], a["sparse"], a["precise"]]
    return PROMPT, [*tensors, *numbers, a.get("out", torch.zeros_like(a["q"]))]


def one(columns: int = 9, d: int = 64, **changes: Any) -> Call:
    q, k, v = half(2, 4, 1, d), half(2, 2, columns, d), half(2, 2, columns, d)
    a = {"q": q, "k": k, "v": v, "mask": None, "lengths": None, "table": None}
    a |= {"heads": 4, "layout": "BNSD", "kv_heads": 2, "precise": 0} | changes
    tensors = [a["q"], [a["k"]], [a["v"]], None, a["mask"], a["lengths"], *[None] * 7, a["table"], None]
    out = a.get("out", torch.zeros_like(a["q"]))
    return INCREMENTAL, [*tensors, a["heads"], 0.125, a["layout"], a["kv_heads"], 0, a["precise"], out]


def result(call: Call) -> Tensor:
    return started("310P").run(call[0], *call[1])[-1]


def check(message: str, call: Call, code: int = 161002) -> None:
    refused(call[0], *call[1], message=message, code=code, soc="310P")


def test_a_prompt() -> None:
    causal = torch.ones(32, 32, dtype=torch.bool).triu(1)
    call = prompt()
    q, k, v = call[1][:3]
    near(result(call), attention64(q, k, v, causal, scale=0.125)[0])
    mask = torch.rand(2, 1, 32, 64) > 0.6
    mask[..., 0] = False
    call = prompt(mask=mask, next=BIG)
    q, k, v = call[1][:3]
    near(result(call), attention64(q, k, v, mask[..., :32], scale=0.125)[0])
    call = prompt(rows=9, columns=21, mask=None, layout="BNSD_BSND", out=half(2, 9, 4, 64), lengths=[17])
    q, k, v = call[1][:3]
    near(result(call).transpose(1, 2), attention64(q, k[:, :, :17], v[:, :, :17], scale=0.125)[0])


def test_a_hidden_key_has_its_logit_lowered() -> None:
    """A row that sees nothing is what it would be without a mask: no zeros."""
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 5, :] = True
    call = prompt(mask=mask, next=BIG)
    q, k, v = call[1][:3]
    assert (result(call).double() - attention64(q, k, v, scale=0.125)[0]).abs().max() < 1e-2


def test_one_query() -> None:
    mask = torch.rand(2, 1, 1, 12) > 0.6
    mask[..., 0] = False
    call = one(columns=12, mask=mask, lengths=[7])
    q, k, v = call[1][0], call[1][1][0][:, :, :7], call[1][2][0][:, :, :7]
    near(result(call), attention64(q, k, v, mask[..., :7], scale=0.125)[0])
    same = {"k": half(2, 9, 4, 192), "v": half(2, 9, 4, 192), "q": half(2, 1, 4, 192), "kv_heads": 0}
    call = one(**same, layout="BSND")
    q, k, v = (x.transpose(1, 2) for x in (call[1][0], call[1][1][0], call[1][2][0]))
    near(result(call).transpose(1, 2), attention64(q, k, v, scale=0.125)[0])


def test_what_both_refuse() -> None:
    for make in (prompt, one):
        q = make()[1][0]
        check("query is BFloat16", make(q=q.bfloat16(), out=q))
        check("D is 72", make(d=72))
        check("numHeads 4 is no multiple", make(kv_heads=3))
        check("key has shape", make(k=half(2, 2, 5, 64)))
        check("a length of keys is 40", make(lengths=[40]))
        check("inputLayout", make(layout="TND"))
        check("innerPrecise is 2", make(precise=2))
    op, arguments = one()
    refused(op, *arguments, message="not simulated but for a 310P")


def test_what_prompts_refuse() -> None:
    mask = torch.zeros(2, 1, 64, 64, dtype=torch.bool)
    check("as many queries as keys", prompt(rows=9, columns=9, mask=mask))
    check("as many queries as keys", prompt(rows=16, mask=mask))
    check("attenMask has shape", prompt(rows=64, columns=64, mask=mask[:, :, :48].contiguous()))
    check("attenMask has shape", prompt(mask=mask[:, :, :, :40].contiguous()))
    check("attenMask is Char", prompt(mask=mask.char()))
    check("preTokens is 5", prompt(pre=5))
    check("nextTokens is 5", prompt(next=5))
    check("sparseMode is 3", prompt(sparse=3))
    check("no pseShift", prompt(bias=half(2, 4, 32, 32)))
    check("B is 130", prompt(q=half(130, 4, 32, 64), k=half(130, 2, 32, 64), v=half(130, 2, 32, 64)))
    check("D 16 needs", prompt(d=16))


def test_what_one_query_refuses() -> None:
    check("must be one", one(q=half(2, 4, 2, 64)))
    check("numHeads / numKeyValueHeads is 2 and D 192", one(d=192))
    many = {"q": half(1, 66, 1, 64), "k": half(1, 2, 9, 64), "v": half(1, 2, 9, 64), "heads": 66}
    check("numHeads / numKeyValueHeads is 33", one(**many))
    swapped = {"q": half(2, 1, 4, 64), "k": half(2, 9, 2, 64), "v": half(2, 9, 2, 64), "layout": "BSND"}
    check("fewer key heads in BNSD only", one(**swapped))
    check("attenMask has shape", one(mask=torch.zeros(1, 9, dtype=torch.bool)))
    check("attenMask has shape", one(mask=torch.zeros(2, 8, dtype=torch.bool)))
    check("paged caches", one(table=torch.zeros(2, 1, dtype=torch.int32)))


def check_on_910b(message: str, call: Call, code: int = 161002) -> None:
    for soc in ("910B", "910C"):
        refused(call[0], *call[1], message=message, code=code, soc=soc)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_a_prompt_on_a_910b(dtype: torch.dtype) -> None:
    def on_910b(call: Call) -> Tensor:
        return started("910B").run(call[0], *call[1])[-1].double()

    def of(rows: int, columns: int, d: int, **changes: Any) -> tuple[Call, list[Tensor]]:
        q, k, v = (x.to(dtype) for x in (half(2, 4, rows, d), half(2, 2, columns, d), half(2, 2, columns, d)))
        return prompt(**{"q": q, "k": k, "v": v, "mask": None, **changes}), [q, k, v]

    allowed = 4e-3 if dtype == HALF else 3e-2
    hidden = torch.ones(9, 21, dtype=torch.bool).triu(13)
    # D of no multiple of 16, rows and columns of no multiple of anything, the last rows at the last columns.
    call, values = of(9, 21, 72, mask=FIXED_MASK, sparse=3, precise=2)
    assert (on_910b(call) - attention64(*values, hidden, scale=0.125)[0]).abs().max() < allowed
    mask = torch.rand(2, 1, 9, 21) > 0.6
    mask[..., 0] = False
    call, values = of(9, 21, 64, mask=mask.char(), next=BIG)
    expected = attention64(*values, mask, scale=0.125)[0]
    assert (on_910b(call) - expected).abs().max() < allowed
    q, k, v = (x.transpose(1, 2).flatten(2).contiguous() for x in values)
    call = prompt(q=q, k=k, v=v, mask=mask, next=BIG, layout="BSH")
    assert (on_910b(call) - expected.transpose(1, 2).flatten(2)).abs().max() < allowed


def test_what_prompts_on_a_910b_refuse() -> None:
    q, out = half(2, 4, 32, 64), half(2, 32, 4, 64)
    check_on_910b("query is Float", prompt(q=q.float(), out=q.float()))
    check_on_910b("key is Half, query is BFloat16", prompt(q=q.bfloat16(), out=q.bfloat16()))
    check_on_910b("attentionOut has shape [2, 4, 32, 64], it must be", prompt(layout="BNSD_BSND", out=q))
    check_on_910b("attentionOut has shape [2, 32, 4, 64], it must be", prompt(out=out))
    check_on_910b("attenMask is Half", prompt(mask=FIXED_MASK.half()))
    check_on_910b("attenMask has shape", prompt(mask=FIXED_MASK[:31, :32].contiguous()))
    check_on_910b("sparseMode 3 needs the fixed mask", prompt(mask=None, sparse=3))
    check_on_910b("D is 528", prompt(d=528))
    many = {"q": half(130, 4, 2, 8), "k": half(130, 2, 2, 8), "v": half(130, 2, 2, 8), "mask": None}
    check_on_910b("B is 130, with D 8", prompt(**many))
    check_on_910b("innerPrecise is 4", prompt(precise=4))
    check_on_910b("numHeads 4 is no multiple", prompt(kv_heads=3))
    check_on_910b('inputLayout "SH" is not simulated', prompt(layout="SH"))
    check_on_910b("actualSeqLengthsKv has 40", prompt(lengths=[40]))
    check_on_910b("key or value is null", prompt(k=None), code=161001)
