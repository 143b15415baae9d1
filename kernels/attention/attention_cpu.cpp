// Plans a call of attention, hands its tasks to torch's threads, and merges what they found.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

#include "attention/attention_checks.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

// Rows that make the packing of a block of keys a small part of the work on it, if there are as many.
constexpr int64_t kRowsPerTask = 256;
// Up to this many rows it is cheaper to read keys and values in place, each time, than to pack them.
constexpr int64_t kDirectRows = 16;
// Tasks a thread, so that the last ones to end do not leave the others idle for long.
constexpr int64_t kTasksPerThread = 4;
// Below this many products of a query with a key or value element, a thread costs more than it saves.
constexpr int64_t kProductsPerThread = 1 << 20;
// A task that walks fewer keys than this does not pay for the merge.
constexpr int64_t kMinSplitKeys = 256;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

at::Tensor rows_contiguous(const at::Tensor& states) {
  return states.size(3) <= 1 || states.stride(3) == 1 ? states : states.contiguous();
}

void set_strides(const at::Tensor& states, int64_t (&strides)[3]) {
  for (int dim = 0; dim < 3; ++dim) strides[dim] = states.stride(dim);
}

AttentionMask mask_type(const at::Tensor& mask) {
  switch (mask.scalar_type()) {
    case at::kBool:
      return AttentionMask::boolean;
    case at::kBFloat16:
      return AttentionMask::bf16;
    case at::kHalf:
      return AttentionMask::f16;
    default:
      return AttentionMask::f32;
  }
}

struct Plan {
  int64_t tiles;
  int64_t threads;
};

// Sets the plan in `args`: tiles large enough to share packed keys, and tasks enough for every thread.
Plan plan(AttentionArgs& args) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t keys = args.window > 0 ? std::min(args.kv_len, args.window + args.q_len - 1) : args.kv_len;
  const int64_t products = args.batch * args.num_heads * args.q_len * keys * (args.head_dim + args.value_dim);
  // Few rows are bound by reading keys and values: count those as if they served a few rows each.
  const int64_t reads = args.batch * args.num_kv_heads * keys * (args.head_dim + args.value_dim) * 4;
  const int64_t threads =
      std::clamp<int64_t>(std::max(products, reads) / kProductsPerThread, 1, at::get_num_threads());
  const int64_t wanted = threads == 1 ? 1 : threads * kTasksPerThread;

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
    args.kv_splits = std::clamp<int64_t>(keys / kMinSplitKeys, 1, ceil_div(wanted, tiles()));
  }
  return {tiles(), threads};
}

// Calls f(task, slot) for every task, each thread taking the next one when it is done with its last: tasks
// differ in length, by causality and masks. Slots number the calling threads.
template <typename F>
void run_tasks(int64_t tasks, int64_t threads, const F& f) {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> slots{0};
  at::parallel_for(0, std::min(tasks, threads), 1, [&](int64_t, int64_t) {
    const int64_t slot = slots++;
    for (int64_t task = next++; task < tasks; task = next++) f(task, slot);
  });
}

at::Tensor attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                         int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_attention(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  if (query.size(3) == 0) {
    return attention_cpu(one_zero_column(query), one_zero_column(key), value, mask, scaling, is_causal,
                         sliding_window, softcap, sinks);
  }
  at::Tensor output =
      empty_cpu({query.size(0), query.size(2), query.size(1), value.size(3)}, query.scalar_type());
  if (output.numel() == 0) return output;
  if (key.size(2) == 0) return output.zero_();

  const at::Tensor q = rows_contiguous(query);
  const at::Tensor k = rows_contiguous(key);
  const at::Tensor v = rows_contiguous(value);
  AttentionArgs args = {};
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.output = output.mutable_data_ptr();
  set_strides(q, args.query_strides);
  set_strides(k, args.key_strides);
  set_strides(v, args.value_strides);
  args.batch = q.size(0);
  args.num_heads = q.size(1);
  args.num_kv_heads = k.size(1);
  args.q_len = q.size(2);
  args.kv_len = k.size(2);
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scaling = static_cast<float>(scaling);
  args.softcap = static_cast<float>(softcap);
  // A window as long as the keys hides none.
  args.window = sliding_window < args.kv_len ? sliding_window : 0;
  args.is_causal = is_causal;
  args.dtype = dtype_of(q);
  args.mask_type = AttentionMask::none;
  if (mask.has_value()) {
    args.mask = mask->const_data_ptr();
    args.mask_type = mask_type(*mask);
    for (int dim = 0; dim < 4; ++dim) args.mask_strides[dim] = mask->size(dim) == 1 ? 0 : mask->stride(dim);
  }
  at::Tensor sink_logits;
  if (sinks.has_value()) {
    sink_logits = sinks->to(at::kFloat);
    args.sinks = sink_logits.const_data_ptr<float>();
    if (sink_logits.dim() == 1) {
      args.sink_strides[1] = sink_logits.stride(0);
    } else {
      set_strides(sink_logits, args.sink_strides);
    }
  }

  const Plan planned = plan(args);
  const auto& kernels = LB_KERNELS(attention_kernels);
  at::Tensor partials;
  if (args.kv_splits > 1) {
    partials = empty_cpu(
        {planned.tiles * args.kv_splits * args.task_heads * args.task_queries * (args.value_dim + 2)},
        at::kFloat);
    args.partials = partials.mutable_data_ptr<float>();
  }
  const int64_t bytes = static_cast<int64_t>(kernels.scratch_bytes(args));
  // torch aligns CPU allocations to 64 bytes, and scratch_bytes is a multiple of that.
  at::Tensor scratch =
      empty_cpu({std::min(planned.tiles * args.kv_splits, planned.threads) * bytes}, at::kByte);
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  run_tasks(planned.tiles * args.kv_splits, planned.threads,
            [&](int64_t task, int64_t slot) { kernels.run(args, task, memory + slot * bytes); });
  if (args.kv_splits > 1) {
    run_tasks(planned.tiles, planned.threads, [&](int64_t tile, int64_t) { kernels.merge(args, tile); });
  }
  return output;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("attention", &liteboost::attention_cpu); }
