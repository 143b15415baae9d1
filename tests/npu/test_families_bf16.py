"""Families in bf16 on an NPU: every norm, rotation, attention and gate is one of our aclnn calls."""

from __future__ import annotations

from typing import Any

import pytest
from support import families, npu_families

#: Of the first tier; the rest is in the second.
SAMPLE = ("llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "mixtral", "olmo2", "starcoder2")
#: Families of which something else runs on an NPU, and what.
_DELTA_RULE = "chunk_gated_delta_rule: normalized keys, which would be rounded to bf16"
NOT_WHOLE = {
    "cpmant": "gated: CpmAntDenseGatedACT",
    "deepseek_v4": "rms_norm: a weight of another dtype than x",
    "dots3_note": "rope: apply_rotary_pos_emb_interleave",
    "dots3_note_text": "rope: apply_rotary_pos_emb_interleave",
    "gemma2": "attention: a softcap",
    "inkling2_text": "gated: Inkling2SoftcappedSwiGLU",
    **dict.fromkeys(
        (
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen4_exp",
            "qwen4_exp_text",
        ),
        _DELTA_RULE,
    ),
    "reformer": "its hash draws its random projections on the device",
    "roformer": "rope: RoFormerSelfAttention.apply_rotary_position_embeddings",
    "rwkv": "gated: RwkvFeedForward",
    "vaultgemma": "attention: a softcap",
    "xlnet": "the original multiplies fp32 by bf16, which torch_npu refuses",
    "zaya": "norm: ZayaQKNorm",
}
#: Those that cannot be compared with the CPU at all.
NOT_COMPARABLE = ("reformer", "xlnet")


def _marked(family: str) -> Any:
    return pytest.param(family, marks=[] if family in SAMPLE else [pytest.mark.full])


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


@pytest.mark.parametrize("family", [_marked(f) for f in families.buildable() if f not in NOT_WHOLE])
def test_nothing_but_aclnn_calls_and_as_near_as_the_original(family: str) -> None:
    outcome = npu_families.examine(family)
    assert outcome.is_whole, outcome.unserved
    assert outcome.is_near, outcome


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in NOT_WHOLE if family not in NOT_COMPARABLE])
def test_what_is_listed_as_not_whole_is_near_all_the_same(family: str) -> None:
    outcome = npu_families.examine(family)
    found = "; ".join(sorted({words.rsplit(" x ", 1)[0] for words in outcome.unserved}))
    assert found == NOT_WHOLE[family]
    assert outcome.is_near, outcome
