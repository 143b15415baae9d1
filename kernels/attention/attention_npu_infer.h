// FusedInferAttentionScore, as all attentions call it: which of its forms takes a call depends on the SoC.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost::npu {

constexpr int64_t kAllTokens = std::numeric_limits<int32_t>::max();

// What the operator is told of a call. What is left as it is here is not used.
struct Inference {
  at::Tensor query;
  std::vector<at::Tensor> keys, values;
  int64_t heads = 0, kv_heads = 0;
  double scaling = 1.0;
  Text layout = nullptr;
  std::vector<int64_t> q_lengths, kv_lengths;
  // True where hidden, what is added to the logits, and logits beside those of the keys.
  at::Tensor mask, shift, sinks;
  int64_t mode = 0, before = kAllTokens, after = kAllTokens;  // sparseMode, preTokens, nextTokens
  int64_t precise = 0;                                        // innerPrecise
  at::Tensor block_table, positions_behind;                   // positions_behind: kvPaddingSize
  int64_t page_rows = 0;
  // Of keys and values that are integers: their scales, and which of them have one together (antiquantMode).
  at::Tensor key_scales, value_scales;
  int64_t scaled_by = 0;
  at::Tensor query_rope, key_rope;
};

// Why no form of the operator takes calls with or without sinks.
Refusal inference_refusal(bool has_sinks);

// Writes to `out`, and the logarithms of the sums of exponentials to `lse` where they are wanted: the operator asks for a
// place for them in any case.
void infer(const Inference& call, const at::Tensor& out, const at::Tensor& lse, bool want_lse);

}  // namespace liteboost::npu
