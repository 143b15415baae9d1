// How a call of attention is cut into tasks, and how threads take them. For the CPU kernels of the families that
// run the loops of attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>

#include "attention/attention.h"
#include "common/resources.h"

namespace liteboost {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a call costs, in products of a query with an element of a key or value.
inline int64_t attention_work(const AttentionArgs& args) {
  const int64_t keys = args.window > 0 ? std::min(args.kv_len, args.window + args.q_len - 1) : args.kv_len;
  const int64_t products = args.batch * args.num_heads * args.q_len * keys * (args.head_dim + args.value_dim);
  // Few rows are bound by reading keys and values: count those as if they served a few rows each.
  const int64_t reads = args.batch * args.num_kv_heads * keys * (args.head_dim + args.value_dim) * 4;
  return std::max(products, reads);
}

inline int64_t attention_threads(int64_t work) {
  // Below this much work, a thread costs more than it saves. In a model keys and values come from memory, from
  // which one thread reads at half the speed of two. Where it sleeps, on a Zen 4, 8 heads of 64 in float32: 256 keys take
  // one thread 70 us from memory and 25 from the cache, two 68 and 38; 500 keys 138 and 46, and 123 and 63.
  constexpr int64_t kWorkPerThread = 1 << 18, kWorkAsleep = 3 << 18;
  return std::clamp<int64_t>(work / (threads_sleep() ? kWorkAsleep : kWorkPerThread), 1,
                             at::get_num_threads());
}

// How many tasks `threads` should find.
inline int64_t attention_tasks(int64_t threads) {
  // So that the last ones to end do not leave the others idle for long.
  constexpr int64_t kTasksPerThread = 4;
  return threads == 1 ? 1 : threads * kTasksPerThread;
}

// Sets the plan in `args`: tiles large enough to share packed keys, and `wanted` tasks if there can be as many.
// Returns the number of tiles.
inline int64_t plan_attention(AttentionArgs& args, int64_t wanted) {
  // Rows that make the packing of a block of keys a small part of the work on it, if there are as many.
  constexpr int64_t kRowsPerTask = 256;
  // Up to this many rows it is cheaper to read keys and values in place, each time, than to pack them.
  constexpr int64_t kDirectRows = 16;
  // A task that walks fewer keys than this does not pay for the merge.
  constexpr int64_t kMinSplitKeys = 256;

  const int64_t group = args.num_heads / args.num_kv_heads;
  const auto tiles = [&] {
    return args.batch * args.num_kv_heads * ceil_div(group, args.task_heads) *
           ceil_div(args.q_len, args.task_queries);
  };
  // Heads of a group share packed keys as well as more queries of one head would, and leave the tasks of a
  // causal call more even; but each tile should have some queries in a row.
  args.task_queries = std::min<int64_t>(args.q_len, std::max<int64_t>(32, kRowsPerTask / group));
  args.task_heads = std::min(group, std::max<int64_t>(1, kRowsPerTask / args.task_queries));
  while (tiles() < wanted && args.task_queries > 32) args.task_queries = ceil_div(args.task_queries, 2);
  args.direct = args.task_heads * args.task_queries <= kDirectRows;

  args.kv_splits = 1;
  if (tiles() < wanted) {
    const int64_t keys = args.window > 0 ? std::min(args.kv_len, args.window + args.q_len - 1) : args.kv_len;
    args.kv_splits = std::clamp<int64_t>(keys / kMinSplitKeys, 1, ceil_div(wanted, tiles()));
  }
  return tiles();
}

// Numbers that the partial results of a planned call take.
inline int64_t partial_floats(const AttentionArgs& args, int64_t tiles) {
  if (args.kv_splits == 1) return 0;
  return tiles * args.kv_splits * args.task_heads * args.task_queries * (args.value_dim + 2);
}

// Calls f(task, slot) for every task, each thread taking the next one when it is done with its last: tasks
// differ in length, by causality and masks. Slots number the calling threads.
template <typename F>
void run_tasks(int64_t tasks, int64_t threads, const F& f) {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> slots{0};
  parallel_for(0, std::min(tasks, threads), 1, [&](int64_t, int64_t) {
    const int64_t slot = slots++;
    for (int64_t task = next++; task < tasks; task = next++) f(task, slot);
  });
}

}  // namespace liteboost
