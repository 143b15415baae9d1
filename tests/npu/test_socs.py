"""Which operators serve the SoCs that lack FusedInferAttentionScore's usual forms and GemmaRmsNorm."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from npu.launching import simulated

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).with_name("socs_program.py")
V5 = "aclnnFusedInferAttentionScoreV5"
PROMPT, INCREMENTAL = ["aclnnPromptFlashAttentionV3"], ["aclnnIncreFlashAttentionV4"]
WIDE = "attention: more than 32 query heads for a key head, or heads of more than 128, on a 310P"


@functools.cache
def ran(soc: str, dtype: str) -> dict[str, Any]:
    """What `socs_program.py` prints; with a softcap nothing is served on any."""
    found: dict[str, Any] = json.loads(simulated("--soc", soc, PROGRAM, dtype)[-1])
    assert found["attention"].pop("a softcap")["reasons"] == ["attention: a softcap"]
    return found


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_310p_has_one_operator_for_prompts_and_one_for_a_query() -> None:
    found = ran("310P", "float16")["attention"]
    assert all(case["error"] < 1e-3 for case in found.values()), found
    left = {label: case["reasons"] for label, case in found.items() if case["reasons"]}
    assert left == {
        "one, wide heads": [WIDE],
        "behind keys": ["attention: queries behind earlier keys on a 310P"],
        "bias": ["attention: a float mask on a 310P"],
        "sinks": ["attention: sinks on a 310P"],
    }
    for label, case in found.items():
        one = INCREMENTAL if label.startswith("one") else PROMPT
        assert case["operators"] == ([] if label in left else one), label


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_950_has_one_form_of_the_operator(dtype: str) -> None:
    found = ran("950", dtype)
    allowed = 2e-2 if dtype == "bfloat16" else 3e-3
    for label, case in found["attention"].items():
        assert case["error"] < allowed and case["reasons"] == [], (label, case)
        assert case["operators"] == [V5], label
    packed = {"against": "", "operators": ["aclnnWeightQuantBatchMatmulV2"]}
    integers = found["quantized"]
    assert integers["linear_packed 4 bits"] == integers["linear_packed 8 bits bias"] == packed
    assert integers["linear_w8a8"]["operators"] == ["aclnnDynamicQuant", "aclnnQuantMatmulV5"]
    assert integers["int8_attention decode cache head-64"]["operators"] == [V5]
    assert integers["experts_packed 8 bits"] == packed  # one expert after the other
    assert all(case["against"] == "" for case in integers.values()), integers
    llama = found["llama"]
    assert llama["operators"] == [V5] and llama["reasons"] == []
    # In bf16 rounding decides among tokens that are as likely, on a 910B the same.
    assert llama["tokens 2"] == llama["tokens 0"] or dtype == "bfloat16"


@pytest.mark.parametrize(("soc", "dtype"), [("310P", "float16"), ("950", "bfloat16"), ("950", "float16")])
def test_gemmas_norm_is_a_reference_but_not_in_a_recorded_sum(soc: str, dtype: str) -> None:
    found, reason = ran(soc, dtype)["norms"], f"Gemma's norm on a {soc}"
    allowed = 2e-2 if dtype == "bfloat16" else 3e-3
    assert all(case["error"] < allowed for case in found.values()), found
    assert {label: (case["reasons"], case["operators"]) for label, case in found.items()} == {
        "offset": ([f"rms_norm: {reason}"], []),
        "sum, offset": ([f"add_rms_norm: {reason}"], []),
        "sum, as recorded": ([], ["aclnnAddRmsNorm"]),
    }


def test_a_llama_on_a_310p() -> None:
    found = ran("310P", "float16")["llama"]
    assert found["tokens 2"] == found["tokens 0"]
    assert found["operators"] == INCREMENTAL + PROMPT and found["reasons"] == []
