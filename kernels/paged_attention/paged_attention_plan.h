// How the requests of a call of paged_attention are cut into tasks, for the CPU kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_invariant_plan.h"
#include "attention/attention_plan.h"
#include "common/batch_invariant.h"

namespace liteboost {

// Where the tasks and tiles of a planned request begin among those of all.
struct Planned {
  int64_t tiles, first_task, first_tile, first_partial;
};

struct Plan {
  std::vector<Planned> requests;  // and behind them the totals
  // Of each request, what its arguments point to.
  std::vector<std::vector<int64_t>> split_origins;
  int64_t threads;
  // Whether threads take all kv heads of some keys together.
  bool groups_heads;
  const Planned& totals() const { return requests.back(); }
};

// Bytes of keys and values of all heads that a thread reads in one go: beside as many that are on their way they stay in
// its second cache.
constexpr int64_t kGroupBytes = 768 << 10;
// The loops cut parts at multiples of their panels, of so many keys at most. A smaller panel makes no difference but to what
// is asked for ahead.
constexpr int64_t kGroupKeys = 64;

// Keys of a request that are walked together.
inline int64_t group_keys(const AttentionArgs& args) {
  return (ceil_div(args.kv_len, args.kv_splits) + kGroupKeys - 1) / kGroupKeys * kGroupKeys;
}

// The parts of a request's keys that fit a cache, or 0 where it has more than a few rows, several tasks of a kv head,
// keys and values of which the rows of all kv heads are not one piece, or parts that are given.
inline int64_t parts_of_whole_rows(const AttentionArgs& a) {
  const int64_t heads = a.num_kv_heads;
  const bool has_task_of_head = a.direct && a.task_queries == a.q_len && a.task_heads * heads == a.num_heads;
  const bool has_whole_rows = a.pages != nullptr && heads > 1 && a.key_strides[1] == a.head_dim &&
                              a.value_strides[1] == a.value_dim && a.key_strides[2] == heads * a.head_dim &&
                              a.value_strides[2] == heads * a.value_dim;
  if (!has_task_of_head || !has_whole_rows || a.window > 0 || a.split_keys > 0) return 0;
  const int64_t size = a.dtype == DType::f32 ? 4 : 2;
  return ceil_div(a.kv_len * heads * (a.head_dim + a.value_dim) * size, kGroupBytes);
}

// Cuts the requests so that threads read whole rows of keys and values, once and in one piece, if there are enough for
// all threads; otherwise leaves them.
inline bool plan_whole_rows(std::vector<AttentionArgs>& requests, int64_t threads) {
  int64_t groups = 0;
  for (const AttentionArgs& args : requests) {
    const int64_t parts = parts_of_whole_rows(args);
    if (parts == 0) return false;
    groups += parts;
  }
  if (groups < 2 * threads) return false;
  for (AttentionArgs& args : requests) args.kv_splits = parts_of_whole_rows(args);
  return true;
}

// Plans each request by its share of the work, or where each query is to have the bits it has alone, as if it were alone;
// long tasks come first, so that the last ones to end are short.
inline Plan plan_requests(std::vector<AttentionArgs>& requests) {
  int64_t work = 0;
  for (const AttentionArgs& args : requests) work += attention_work(args);
  Plan plan = {{}, std::vector<std::vector<int64_t>>(requests.size()), attention_threads(work), false};
  const int64_t wanted = attention_tasks(plan.threads);
  std::stable_sort(requests.begin(), requests.end(), [](const AttentionArgs& a, const AttentionArgs& b) {
    return attention_work(a) > attention_work(b);
  });
  for (size_t r = 0; r < requests.size(); ++r) {
    AttentionArgs& args = requests[r];
    const double share =
        static_cast<double>(attention_work(args)) / static_cast<double>(std::max<int64_t>(work, 1));
    const auto tasks = static_cast<int64_t>(share * static_cast<double>(wanted)) + 1;
    const int64_t tiles = is_length_invariant() ? plan_invariant_attention(args, plan.split_origins[r])
                                                : plan_attention(args, std::min(wanted, tasks));
    plan.requests.push_back({tiles, 0, 0, 0});
  }
  plan.groups_heads = plan_whole_rows(requests, plan.threads);
  Planned next = {};
  for (size_t r = 0; r < requests.size(); ++r) {
    next.tiles = plan.requests[r].tiles;
    plan.requests[r] = next;
    next.first_task += next.tiles * requests[r].kv_splits;
    next.first_tile += next.tiles;
    next.first_partial += partial_floats(requests[r], next.tiles);
  }
  plan.requests.push_back(next);
  return plan;
}

}  // namespace liteboost
