// The gated delta rule: linear attention whose state decays and is corrected by what it did not foretell.
//
// For each value head, with a state S [k_dim, v_dim] and one token after the other:
//
//   S     <- exp(g) S
//   delta  = beta (v - S^T k)
//   S     <- S + k delta^T
//   out    = S^T (scaling q)
//
// recurrent_gated_delta_rule(query, key, value, g, beta, state, scaling, normalize) -> out
//   updates `state` in place.
// chunk_gated_delta_rule(query, key, value, g, beta, initial_state, scaling, normalize) -> (out, final_state)
//   leaves initial_state as it is; without one it starts from zeros.
//
//   query, key     [batch, tokens, k_heads, k_dim]   float32, bfloat16 or float16, one dtype with value
//   value          [batch, tokens, v_heads, v_dim]   v_heads a multiple of k_heads: key head h serves the
//                                                    v_heads / k_heads value heads from h v_heads / k_heads on
//   g, beta        [batch, tokens, v_heads]          dtype of value or float32; g is meant to be <= 0
//   states         [batch, v_heads, k_dim, v_dim]    float32; contiguous after chunk_gated_delta_rule
//   out            shape and dtype of value, contiguous
//   scaling        as a model has it, 1 / sqrt(k_dim)
//   normalize      query and key are first divided by their lengths: x * rsqrt(sum(x^2) + 1e-6), in fp32
//
// Any strides of query, key, value, g and beta are read in place, the transposed ones that a convolution over
// tokens leaves among them. A state that is not contiguous is copied, and copied back.
//
// Rounding: all of it in fp32; out is rounded once, to the dtype of value.
//
// Both ops are the same loops, in the chunked form of the rule with chunks of a few tokens. With P_i the product of the
// decays up to token i of a chunk and D(i, j) that from behind j up to i,
//
//   delta_i = beta_i (v_i - P_i S^T k_i - sum over j < i of D(i, j) (k_i . k_j) delta_j)
//   out_i   = P_i S^T q_i + sum over j <= i of D(i, j) (q_i . k_j) delta_j
//   S      <- P S + sum over j of D(last, j) k_j delta_j^T
//
// so the state is read twice and written once a chunk, and not a token. The decays are multiplied, not their
// logarithms subtracted: one of 0 (g = -inf) stays one. What is not finite of a chunk is done once more, token by
// token: NaN and infinities reach what the rule as written makes of them, and no token before. Chunks are short because the state then stays in a cache near
// by, and the products of a chunk with itself stay few; an NPU's matrix unit wants them longer (delta_rule_npu.cpp). Where
// tokens are to have the bits that each has in a call of its own (common/batch_invariant.h), a chunk is one token.
//
// Source: Yang et al. 2024, arXiv:2412.06464 (gated delta rule), arXiv:2406.06484 (chunked form);
// torch_recurrent_gated_delta_rule and torch_chunk_gated_delta_rule of transformers 5.23. No backward.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/order.h"

namespace liteboost {

// Elements; of g and beta `dim` is not used.
struct DeltaRuleStrides {
  int64_t batch, token, head, dim;
};

struct DeltaRuleArgs {
  const void *query, *key, *value, *g, *beta;
  void* out;                // [batch, tokens, v_heads, v_dim], contiguous
  const float* state_from;  // [batch, v_heads, k_dim, v_dim], contiguous, or null: zeros; may be state
  float* state;             // the same, written
  DeltaRuleStrides query_strides, key_strides, value_strides, g_strides, beta_strides;
  int64_t tokens, k_heads, v_heads, k_dim, v_dim;
  DType dtype, g_dtype, beta_dtype;
  float scaling;
  bool normalize;
  Order order;  // that of one row: chunks of one token
};

struct DeltaRuleKernels {
  // Floats that `run` wants as scratch.
  int64_t (*scratch_floats)(const DeltaRuleArgs& args);
  // Value heads [begin, end) of [batch, v_heads], all tokens.
  void (*run)(const DeltaRuleArgs& args, float* scratch, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(DeltaRuleKernels, delta_rule_kernels)

}  // namespace liteboost
