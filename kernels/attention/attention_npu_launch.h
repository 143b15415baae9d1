// What attention and attention_part have in common: which calls the operators take, and the one for inference.
#pragma once

#include <string>

#include "attention/attention_npu_hiding.h"
#include "attention/attention_npu_operands.h"
#include "npu/serve.h"

namespace liteboost {

enum Precision : int64_t { kPrecise = 0, kPreciseAndRepaired = 2 };

// What a kind of verdict says behind phase and options: the head size (of values), and whether there are so many keys that
// the operators divide them among cores, as they do with prompts of more than one block of the causal mask.
constexpr int64_t kLongFrom = 2049;
inline std::string sizes_kind(int64_t head_dim, int64_t kv_len) {
  return " head-" + std::to_string(head_dim) + (kv_len >= kLongFrom ? " long" : "");
}

// Why no operator takes a call.
npu::Refusal refusal_of(const Call& call);

// Runs FusedInferAttentionScore. Returns the logarithms of the sums of exponentials, [B, N, q_len, 1] in fp32,
// where they are wanted; those of queries that see no key mean nothing.
at::Tensor infer(const Call& call, const Operands& on, const Hiding& how, const at::Tensor& after,
                 Precision precise, bool want_lse);

// How many positions behind those that count do not, as the operator reads it.
at::Tensor counted_from_end(int64_t after, const at::Device& device);

}  // namespace liteboost
