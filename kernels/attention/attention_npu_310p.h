// Attention on a 310P, which has an operator for prompts and one for a single query in place of
// FusedInferAttentionScore.
#pragma once

#include "attention/attention_npu_hiding.h"
#include "attention/attention_npu_operands.h"
#include "npu/serve.h"

namespace liteboost {

// Why neither takes a call.
npu::Refusal refusal_on_310p(const Call& call);

// How the operator is to read the tensors of a call; `within_cache` as of `plan`.
Plan plan_on_310p(const Call& call, bool within_cache);

// Runs it: [B, q_len, N, D].
at::Tensor attend_on_310p(const Call& call, const Plan& plan);

}  // namespace liteboost
