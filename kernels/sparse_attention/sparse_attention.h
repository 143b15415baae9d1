// Attention in which each block of queries reads chosen blocks of keys, for long prompts.
//
// Shapes: query [B, H, q_len, D], key [B, K, kv_len, D], value [B, K, kv_len, Dv] -> [B, q_len, H, Dv]; dtypes,
// strides, grouped heads, scaling, causality and rounding as of attention (attention/attention.h). What is
// different is the keys that the softmax of a query is over: those of the blocks chosen for its block.
//
//   block_shape      [x, y]: queries i * x .. are block i, keys j * y .. are block j; the last of each is shorter.
//   select_idx       [B * ceil(q_len / x), heads, most] int64: of each block of queries (those of one sequence
//                    after those of the other) and head the blocks of keys, ascending and each once; behind
//                    the first select_num_idx of them -1, which a CPU does not read.
//   select_num_idx   [B * ceil(q_len / x), heads] int64.
//
// heads is H, or K where the query heads of a group share a choice and, on a CPU, each block of keys brought to
// them. Causal: query i, which stands at position i + kv_len - q_len, sees of the chosen blocks the keys at or
// before it. A query that sees no key gives 0.
//
// That is the contract of CANN's aclnnRainFusionAttention, with causality inside the blocks added to it. Blocks
// chosen anywhere give the same sums as blocks walked in order: the online softmax (arXiv:1805.02867) of
// attention.h visits only the chosen ones. Block-sparse attention: Child et al. 2019, arXiv:1904.10509; blocks
// chosen for each prompt: Jiang et al. 2024, arXiv:2407.02490.
#pragma once

#include "attention/attention.h"

namespace liteboost {

// Blocks that `length` positions make.
template <typename Int>
Int blocks_of(const Int& length, int64_t block) {
  return (length + (block - 1)) / block;
}

}  // namespace liteboost
