// The plan of a call in which each query is to have the bits that it has in a call of its own (common/batch_invariant.h).
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_plan.h"
#include "common/batch_invariant.h"

namespace liteboost {

// So many that merging the splits takes little beside reading them.
constexpr int64_t kSplitKeys = 512;

// Numbers that partial results of one call take, unless those of a single query take more.
constexpr int64_t kMostPartialFloats = 8 << 20;

// Numbers that the partial results of one query take at most.
inline int64_t query_partial_floats(int64_t batch, int64_t heads, int64_t keys, int64_t value_dim) {
  return batch * heads * (ceil_div(keys, kSplitKeys) + 1) * (value_dim + 2);
}

// Queries of one plan.
inline int64_t most_queries(int64_t batch, int64_t heads, int64_t keys, int64_t value_dim) {
  constexpr int64_t kMost = 64;
  const int64_t of_one = query_partial_floats(batch, heads, keys, value_dim);
  return std::clamp<int64_t>(kMostPartialFloats / std::max<int64_t>(1, of_one), 1, kMost);
}

// Numbers of a float mask down to which they hide a key: the least of a dtype, and -inf, are below.
inline float hiding_limit(AttentionMask type) { return type == AttentionMask::f16 ? -65000.0f : -1e37f; }

// The first of `keys` elements of a mask from `mask` on, `stride` apart, that shows its key; `keys` where none does.
template <typename T>
int64_t first_shown(const T* mask, int64_t stride, int64_t keys, float limit) {
  int64_t key = 0;
  while (key < keys && !(static_cast<float>(mask[key * stride]) > limit)) ++key;
  return key;
}

inline int64_t first_shown(const AttentionArgs& args, int64_t offset, int64_t keys) {
  const int64_t stride = args.mask_strides[3];
  const float limit = hiding_limit(args.mask_type);
  switch (args.mask_type) {
    case AttentionMask::none:
      return 0;
    case AttentionMask::boolean:
      return first_shown(static_cast<const uint8_t*>(args.mask) + offset, stride, keys, 0.0f);
    case AttentionMask::f32:
      return first_shown(static_cast<const float*>(args.mask) + offset, stride, keys, limit);
    case AttentionMask::bf16:
      return first_shown(static_cast<const at::BFloat16*>(args.mask) + offset, stride, keys, limit);
    case AttentionMask::f16:
      return first_shown(static_cast<const at::Half*>(args.mask) + offset, stride, keys, limit);
  }
  return 0;
}

// The first key that a query sees, with any of its heads; 0 where it sees none.
inline int64_t first_seen_key(const AttentionArgs& args, int64_t batch, int64_t query) {
  const int64_t position = query + args.kv_len - args.q_len;
  const int64_t first = args.window > 0 ? std::max<int64_t>(0, position + 1 - args.window) : 0;
  const int64_t last = args.is_causal ? std::max<int64_t>(0, position + 1) : args.kv_len;
  const int64_t heads = args.mask_strides[1] == 0 ? 1 : args.num_heads;
  int64_t seen = last;
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t offset = batch * args.mask_strides[0] + head * args.mask_strides[1] +
                           query * args.mask_strides[2] + first * args.mask_strides[3];
    seen = std::min(seen, first + first_shown(args, offset, std::max<int64_t>(0, seen - first)));
  }
  return seen < last ? seen : 0;
}

// Sets the plan: keys are read where they lie, in splits that depend neither on the other queries nor on the threads. Where
// lengths may change no bit either, they begin at the first key that a query sees: behind padding, keys are added up in the
// same groups as without. Hidden keys add exact zeros. Returns the number of tiles. `origins` holds what the plan points to.
inline int64_t plan_invariant_attention(AttentionArgs& args, std::vector<int64_t>& origins) {
  // Rows of a tile: each reads its keys again, from the second cache where others have read them.
  constexpr int64_t kRows = 32;
  const int64_t group = args.num_heads / args.num_kv_heads;
  args.task_heads = std::min(group, kRows);
  args.task_queries = std::min<int64_t>(args.q_len, std::max<int64_t>(1, kRows / args.task_heads));
  args.direct = true;
  args.split_keys = kSplitKeys;
  args.split_origins = nullptr;
  if (is_length_invariant() && (args.window > 0 || args.mask_type != AttentionMask::none)) {
    origins.resize(args.batch * args.q_len);
    bool is_shared = true;
    for (int64_t i = 0; i < args.batch * args.q_len; ++i) {
      origins[i] = first_seen_key(args, i / args.q_len, i % args.q_len) % kSplitKeys;
      is_shared = is_shared && origins[i] == origins[i / args.q_len * args.q_len];
    }
    args.split_origins = origins.data();
    if (!is_shared) args.task_queries = 1;
  }
  args.kv_splits = ceil_div(args.kv_len, kSplitKeys) + (args.split_origins == nullptr ? 0 : 1);
  if (args.window > 0)
    args.kv_splits = std::min(args.kv_splits, ceil_div(args.window + args.task_queries, kSplitKeys) + 1);
  return args.batch * args.num_kv_heads * ceil_div(group, args.task_heads) *
         ceil_div(args.q_len, args.task_queries);
}

}  // namespace liteboost
