"""Families with integers on an NPU: every such layer is served by aclnn, near its dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest
from support import families, npu_families

#: Of linear layers, by scheme.
OPS = {"w8a16": "linear_packed", "w4a16": "linear_packed", "w8a8": "linear_w8a8", "w4a8": "linear_packed"}
#: Of the first tier; the rest is in the second.
SAMPLE = ("llama", "qwen3", "gemma3_text", "phi3", "mixtral")
#: Their experts are integers, too.
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
#: As in `test_families_bf16`: random projections on the device; an original that torch_npu refuses.
NOT_COMPARABLE = ("reformer", "xlnet")
#: Of w8a8: rounded activations leave too few positions at which no router has a close choice.
UNCLEAR = (
    *("bailing_hybrid", "deepseek_v2", "flex_olmo", "granitemoe", "granitemoe_swa", "hy_v4", "jamba"),
    *("kimi_linear", "lfm2_moe", "llama4", "llama4_text", "longcat_flash"),
)


pytestmark = pytest.mark.usefixtures("no_grad", "undone")


def _cases() -> Any:
    for family in families.buildable():
        for scheme in OPS:
            if family not in NOT_COMPARABLE and not (scheme == "w8a8" and family in UNCLEAR):
                yield pytest.param(family, scheme, marks=[] if family in SAMPLE else [pytest.mark.full])


@pytest.mark.parametrize(("family", "scheme"), [*_cases()])
def test_layers_of_integers_are_aclnn_calls_and_near(family: str, scheme: str) -> None:
    outcome = npu_families.examine_quantized(family, scheme)
    # A family whose layers are of classes of its own has but a head, of 8 bits.
    assert sum(outcome.launches.get(op, 0) for op in set(OPS.values())) > 0, outcome
    if family in SAMPLE:
        assert outcome.launches[OPS[scheme]] > 10, outcome
    if family in EXPERTS:
        assert outcome.launches.get("experts_packed", 0) > 0, outcome
    assert outcome.is_whole, outcome.unserved
    assert outcome.is_near, outcome


def test_enough_families_are_served() -> None:
    families_of = {case.values[0] for case in _cases() if case.values[1] in ("w8a16", "w4a16")}
    assert len(families_of) >= 60 and set(EXPERTS) <= families_of
