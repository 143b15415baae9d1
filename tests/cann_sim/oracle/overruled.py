"""Sets that one check of an operator accepts, and another refuses before or after it.

A test of a tiling never meets ``op_api``, one of ``op_api`` never the tiling, and neither the definition of
the operator. So that one of them accepts is no verdict where the simulator refuses for another; each row says
which other. A set that a test expects to be refused is never overruled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Overruling:
    operator: str
    #: part of the simulator's message
    message: str
    source: str


_NORM = "ops-nn, norm/add_rms_norm/op_host/add_rms_norm_def.cpp"
_ROW_NORM = (
    "ops-nn, norm/add_rms_norm_dynamic_quant/op_host/op_api/aclnn_add_rms_norm_dynamic_quant.cpp, "
    "CheckDtypeValid"
)
_GROUPED = "ops-transformer, gmm/grouped_matmul, op_api/aclnn_grouped_matmul.cpp, "
_WEIGHT = "ops-nn, matmul/weight_quant_batch_matmul_v2, op_api/aclnn_weight_quant_batch_matmul_v2.cpp, "
_QUANT = "ops-nn, matmul/quant_batch_matmul_v3/op_api/aclnn_quant_matmul_v4.cpp, "

_ATTENTION = (
    "ops-transformer, attention/fused_infer_attention_score/op_host/fused_infer_attention_score_def.cpp"
)
_PROMPT = (
    "ops-transformer, attention/prompt_flash_attention/op_api/aclnn_prompt_flash_attention_inner.cpp, "
    "CheckResultOutShapePfa"
)
_SCATTER = "ops-nn, index/scatter/op_host/arch35/scatter_tiling_arch35.cpp, "
_ROUTING = "ops-transformer, moe/moe_init_routing_v3/op_host/moe_init_routing_v3_tiling.cpp"
_UNROUTING = (
    "ops-transformer, moe/moe_finalize_routing_v2/op_host/moe_finalize_routing_v2_tiling_membase.cpp, "
)

#: Each read in 9.1.0, those of grouped products and prompts in 8.5.0 and 9.0.0 too; taken for the other
#: releases too.
OVERRULINGS = (
    # Tests of its tiling give scales to every product, and write of a list of groups only how many there are.
    Overruling("aclnnGroupedMatmulV4", "belong to quantized x", _GROUPED + "IsGmmQuantEmpty"),
    Overruling("aclnnGroupedMatmulV4", "groupList has 1 axes", _GROUPED + "CheckGroupListCommonTensor"),
    Overruling("aclnnGroupedMatmulV4", "scale is Float with BFloat16", _GROUPED + "CheckQuantParamsDtype"),
    Overruling("aclnnGroupedMatmulV4", "bias is Float; supported", _GROUPED + "CheckNonQuantMatmulDataType"),
    Overruling("aclnnGroupedMatmulV4", "2 takes no bias", _GROUPED + "CheckParamDifferentGroupType"),
    # Of two dtypes for query and key only integers beside 16 bits are columns of the definition.
    Overruling("aclnnFusedInferAttentionScoreV4", "key is Half, query is BFloat16", _ATTENTION),
    # The test's output is of no axes, as the shape that its bench infers.
    Overruling("aclnnPromptFlashAttentionV3", "attentionOut has shape []", _PROMPT),
    # Of the test there are four indices for two rows. That of a 910B is not public, this is a 950's.
    Overruling("aclnnInplaceScatterUpdate", "rows, indices", _SCATTER + "CheckShapes"),
    # The test's y has half of the rows of x, too; CheckY of the tiling looks at one axis.
    Overruling(
        "aclnnClippedSwiglu",
        "out has shape",
        "ops-nn, activation/clipped_swiglu/op_host/clipped_swiglu_infershape.cpp",
    ),
    Overruling("aclnnMoeInitRoutingV3", "scale has shape", _ROUTING),
    Overruling("aclnnMoeFinalizeRoutingV2", "on 310P the last axis", _UNROUTING + "Check310pParams"),
    Overruling("aclnnGroupedMatmulV4", "as many outputs as weights", _GROUPED + "CheckCaseSplitM"),
    Overruling("aclnnGroupedMatmulV4", "groupType -1 takes no groupList", _GROUPED + "PreCheckGroupType"),
    Overruling("aclnnAddRmsNorm", "rstdOut is BFloat16", _NORM),
    # Its tiling knows integers of 4 bits for aclnnAddRmsNormDynamicQuantV2, which takes them packed.
    Overruling("aclnnAddRmsNormDynamicQuant", "y1Out is Int; supported", _ROW_NORM),
    Overruling("aclnnGroupedMatmulV4", "needs splitItem", _GROUPED + "SplitMSingleXSingleWeightSingleY"),
    Overruling("aclnnGroupedMatmulV4", "perTokenScale has shape", _GROUPED + "CheckPerTokenScale"),
    Overruling("aclnnGroupedMatmulV4", "groupType 2 needs x transposed", _GROUPED + "CheckCaseSplitK"),
    Overruling("aclnnWeightQuantBatchMatmulV2", "y is Char, x is", _WEIGHT + "CheckDtypeValid"),
    Overruling("aclnnQuantMatmulV4", "x1 must be ND", _QUANT + "CheckFormat"),
    Overruling(
        "aclnnRecurrentGatedDeltaRule",
        "gk has shape",
        "ops-transformer, attention/recurrent_gated_delta_rule/op_host/recurrent_gated_delta_rule_tiling.cpp",
    ),
)  # fmt: skip


def overruling(operator: str, message: str) -> Overruling | None:
    """The check that refuses for this reason what another accepts."""
    fitting = (
        one for one in OVERRULINGS if one.operator == operator and re.search(re.escape(one.message), message)
    )
    return next(fitting, None)
