"""Text of transformers' rotary functions with one thing changed: refused, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import state
from support.rotary_forms import FORMS, arguments_of, calling, check_served, outcome, results, source_of

import liteboost_adaptor

pytestmark = pytest.mark.usefixtures("no_grad")

PAIR = "rotate_half apply_rotary_pos_emb"
#: What differs -> family, functions, old text, new text. Names and signatures stay.
MISSES: dict[str, tuple[str, str, str, str]] = {
    "Gemma 4: minus": ("gemma4", PAIR, "(x * cos) +", "(x * cos) -"),
    "Gemma 4: cosine alone": ("gemma4", PAIR, "(rotate_half(x) * sin)", "rotate_half(x)"),
    "Gemma 4: neighbours": ("gemma4", PAIR, "x1 = x[..., : x.shape[-1] // 2]", "x1 = x[..., ::2]"),
    "NanoChat: minus": ("nanochat", PAIR, "(q * cos) +", "(q * cos) -"),
    "NanoChat: halves in order": ("nanochat", PAIR, "(x2, -x1)", "(-x1, x2)"),
    "DeepSeek V4: first channels": (
        "deepseek_v4",
        PAIR,
        "nope, rope = x[..., :-rope_dim], x[..., -rope_dim:]",
        "rope, nope = x[..., :rope_dim], x[..., rope_dim:]",
    ),
    "DeepSeek V4: in the dtype of x": ("deepseek_v4", PAIR, "rope.float() * cos", "rope * cos"),
    "DeepSeek V4: sign": ("deepseek_v4", PAIR, "(-x2, x1)", "(x2, -x1)"),
    "ERNIE 4.5: in the dtype of q": ("ernie4_5", PAIR, "q.float() * cos", "q * cos"),
    "ERNIE 4.5: second half": (
        "ernie4_5",
        PAIR,
        "cos[..., : cos.shape[-1] // 2]",
        "cos[..., cos.shape[-1] // 2 :]",
    ),
    "ERNIE 4.5: repeated as a whole": (
        "ernie4_5",
        PAIR,
        "cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)",
        "cos[..., : cos.shape[-1] // 2].repeat(1, 1, 1, 2)",
    ),
    "GLM: halves": ("glm", PAIR, "x1 = x[..., 0::2]", "x1 = x[..., : x.shape[-1] // 2]"),
    "GLM: last channels": ("glm", PAIR, "torch.cat([q_embed, q_pass]", "torch.cat([q_pass, q_embed]"),
    "Helium: sine for cosine": ("helium", PAIR, "(q * cos)", "(q * sin)"),
    "Helium: angles of every second": (
        "helium",
        PAIR,
        "cos[..., : cos.shape[-1] // 2]",
        "cos[..., ::2]",
    ),
    "BLT: sign": ("blt", PAIR, "[-x2, x1]", "[x2, -x1]"),
    "BLT: order": ("blt", PAIR, "[-x2, x1]", "[x1, -x2]"),
    "GPT-J: cos and sin swapped": (
        "gptj",
        "rotate_every_two apply_rotary_pos_emb",
        "(tensor * cos) + (rotate_every_two(tensor) * sin)",
        "(tensor * sin) + (rotate_every_two(tensor) * cos)",
    ),
    "GPT-J: heads first": (
        "gptj",
        "rotate_every_two apply_rotary_pos_emb",
        "sin[:, :, None, :]",
        "sin[:, None, :, :]",
    ),
    "DeepSeek V3: interleaved result": (
        "deepseek_v3",
        "apply_rotary_pos_emb_interleave",
        "torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)",
        "torch.stack([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1).flatten(-2)",
    ),
    "DeepSeek V3: sign": (
        "deepseek_v3",
        "apply_rotary_pos_emb_interleave",
        "[q1 * cos - q2 * sin, q2 * cos + q1 * sin]",
        "[q1 * cos + q2 * sin, q2 * cos - q1 * sin]",
    ),
    "DeepSeek V2: conjugate": (
        "deepseek_v2",
        "apply_rotary_emb",
        "(xq_ * freqs_cis)",
        "(xq_ * freqs_cis.conj())",
    ),
    "DeepSeek V2: result in fp32": (
        "deepseek_v2",
        "apply_rotary_emb",
        ".flatten(3).type_as(xq)",
        ".flatten(3)",
    ),
    "Llama 4: real and imaginary parts apart": (
        "llama4",
        "apply_rotary_emb",
        "torch.view_as_real(xq_ * freqs_cis[:, :, None, :]).flatten(3)",
        "torch.view_as_real(xq_ * freqs_cis[:, :, None, :]).mT.flatten(3)",
    ),
    "Qwen4: keys not turned": (
        "qwen4_exp",
        PAIR,
        "k_rope = (k_rope * cos) + (rotate_half(k_rope) * sin)",
        "k_rope = k_rope * 1",
    ),
    "ModernBERT: in the dtype of q": ("modernbert_decoder", PAIR, "(q.float() * cos)", "(q * cos)"),
    "Qwen2-VL: heads of another dimension": (
        "qwen2_vl",
        "rotate_half apply_rotary_pos_emb_vision",
        "cos.unsqueeze(-2)",
        "cos.unsqueeze(-3)",
    ),
}
ORIGINALS = {form.family: name for name, form in reversed(FORMS.items())}


@pytest.mark.parametrize("name", MISSES)
def test_look_alikes_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    family, functions, old, new = MISSES[name]
    text = source_of(family, *functions.split())
    assert old in text, f"transformers' {family} has no {old!r} any more"
    function = functions.split()[-1]
    form = FORMS[ORIGINALS[family]]
    unchanged = calling(function, text, tmp_path)
    given = arguments_of(form, torch.bfloat16, torch.bfloat16)
    check_served(unchanged, form, *given)

    module = calling(function, text.replace(old, new, 1), tmp_path)
    expected, original = outcome(module, given), results(unchanged(*given))
    same = not isinstance(expected, Exception) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results(expected), original, strict=True)
    )
    assert not same, "the change changes nothing"
    liteboost_adaptor.apply(module)
    assert state.rows("rope").keys() == {"refused"}
    (row,) = state.rows("rope")["refused"]
    assert row.id == "rope.*" and "not in the catalogue" in row.reason and len(row.reason) > 60
    found = outcome(module, given)
    assert type(found) is type(expected)
    if not isinstance(expected, Exception):
        assert all(map(torch.equal, results(found), results(expected)))
