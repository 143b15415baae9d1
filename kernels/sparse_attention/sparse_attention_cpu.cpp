// Runs the loops of attention over the chosen blocks: a task is a block of queries of one head, or of several
// heads that share a choice.
#include <torch/library.h>

#include <algorithm>

#include "attention/attention_plan.h"
#include "common/tensors.h"
#include "sparse_attention/sparse_attention_checks.h"

namespace liteboost {
namespace {

// Rows that make the packing of a block of keys a small part of the work on it, if there are as many.
constexpr int64_t kRowsPerTask = 256;
// Up to this many rows it is cheaper to read keys and values in place, each time, than to pack them.
constexpr int64_t kDirectRows = 16;

at::Tensor channels_adjacent(const at::Tensor& states) {
  return states.size(3) <= 1 || states.stride(3) == 1 ? states : states.contiguous();
}

AttentionArgs args_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scaling,
                      bool is_causal) {
  AttentionArgs args = {};
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  for (int dim = 0; dim < 3; ++dim) {
    args.query_strides[dim] = q.stride(dim);
    args.key_strides[dim] = k.stride(dim);
    args.value_strides[dim] = v.stride(dim);
  }
  args.batch = q.size(0);
  args.num_heads = q.size(1);
  args.num_kv_heads = k.size(1);
  args.q_len = q.size(2);
  args.kv_len = k.size(2);
  args.head_dim = q.size(3);
  args.value_dim = v.size(3);
  args.scaling = static_cast<float>(scaling);
  args.is_causal = is_causal;
  args.dtype = dtype_of(q);
  args.mask_type = AttentionMask::none;
  return args;
}

// Sets the plan in `args`; returns the number of tasks.
int64_t plan(AttentionArgs& args, int64_t query_block) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  const bool shared = args.selected_heads == args.num_kv_heads;
  args.task_queries = query_block;
  args.task_heads = shared ? std::clamp<int64_t>(kRowsPerTask / query_block, 1, group) : 1;
  args.direct = args.task_heads * std::min(query_block, args.q_len) <= kDirectRows;
  args.kv_splits = 1;
  return args.batch * args.num_kv_heads * ceil_div(group, args.task_heads) *
         ceil_div(args.q_len, args.task_queries);
}

// Products of a query with an element of a chosen key or value, or somewhat more.
int64_t work_of(const AttentionArgs& args) {
  const int64_t keys = std::min(args.kv_len, args.most_selected * args.block_keys);
  return args.batch * args.num_heads * args.q_len * keys * (args.head_dim + args.value_dim);
}

at::Tensor block_sparse_attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& select_idx, const at::Tensor& select_num_idx,
                                      at::IntArrayRef block_shape, double scaling, bool is_causal) {
  check_block_sparse_attention(query, key, value, select_idx, select_num_idx, block_shape, scaling);
  const at::Tensor blocks = select_idx.contiguous(), counts = select_num_idx.contiguous();
  check_selection(blocks, counts, blocks_of(key.size(2), block_shape[1]));
  at::Tensor output =
      empty_cpu({query.size(0), query.size(2), query.size(1), value.size(3)}, query.scalar_type());
  if (output.numel() == 0) return output;
  if (key.size(2) == 0) return output.zero_();

  const bool no_channels = query.size(3) == 0;
  const at::Tensor q = no_channels ? one_zero_column(query) : channels_adjacent(query);
  const at::Tensor k = no_channels ? one_zero_column(key) : channels_adjacent(key);
  const at::Tensor v = channels_adjacent(value);
  AttentionArgs args = args_of(q, k, v, scaling, is_causal);
  args.output = output.mutable_data_ptr();
  args.selected = blocks.const_data_ptr<int64_t>();
  args.selected_counts = counts.const_data_ptr<int64_t>();
  args.selected_heads = blocks.size(1);
  args.most_selected = blocks.size(2);
  args.block_keys = std::min(block_shape[1], args.kv_len);

  // No longer than there are queries, or memory for a task would follow the block.
  const int64_t tasks = plan(args, std::min(block_shape[0], args.q_len));
  const int64_t threads = attention_threads(work_of(args));
  const auto& kernels = LB_KERNELS(attention_kernels);
  const int64_t bytes = static_cast<int64_t>(kernels.scratch_bytes(args));
  // torch aligns CPU allocations to 64 bytes, and scratch_bytes is a multiple of that.
  at::Tensor scratch = empty_cpu({std::min(tasks, threads) * bytes}, at::kByte);
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  run_tasks(tasks, threads,
            [&](int64_t task, int64_t slot) { kernels.run(args, task, memory + slot * bytes); });
  return output;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("block_sparse_attention", &liteboost::block_sparse_attention_cpu);
}
