// Plans a call of attention, hands its tasks to torch's threads, and merges what they found.
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <limits>

#include "attention/attention_checks.h"
#include "attention/attention_cpu.h"
#include "attention/attention_invariant_plan.h"
#include "attention/attention_plan.h"
#include "common/batch_invariant.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

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

// Keys of one channel that is 0 for keys of none; rows of integers with a scale of 0, for theirs may be NaN.
at::Tensor without_channels(const at::Tensor& key) {
  if (key.scalar_type() != at::kChar) return one_zero_column(key);
  c10::DimVector sizes(key.sizes());
  sizes.back() += 1;
  return empty_cpu(sizes, at::kChar).zero_();
}

// Queries [begin, end) of a call, and of its keys those that they may see.
struct Queries {
  int64_t begin, end, hidden;
  // Of a tensor that has queries, or keys, along `dim`, unless all share one element.
  at::Tensor of(const at::Tensor& x) const { return x.size(2) > 1 ? x.narrow(2, begin, end - begin) : x; }
  at::Tensor keys(const at::Tensor& x, int64_t dim) const {
    return dim == 2 || x.size(dim) > 1 ? x.narrow(dim, 0, x.size(dim) - hidden) : x;
  }
};

bool is_invariant(int64_t queries) { return batch_invariant_rows() > 1 && queries <= batch_invariant_rows(); }

at::Tensor attend_in_parts(int64_t step, const at::Tensor& query, const at::Tensor& key,
                           const at::Tensor& value, const std::optional<at::Tensor>& mask, double scaling,
                           bool is_causal, int64_t sliding_window, double softcap,
                           const std::optional<at::Tensor>& sinks, at::Tensor* lse) {
  const int64_t count = query.size(2);
  std::vector<at::Tensor> outputs, sums;
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(begin + step, count);
    const Queries part{begin, end, is_causal ? std::min(count - end, key.size(2)) : 0};
    std::optional<at::Tensor> own_mask, own_sinks;
    if (mask.has_value()) own_mask = part.keys(part.of(*mask), 3);
    if (sinks.has_value()) own_sinks = sinks->dim() == 3 ? part.of(*sinks) : *sinks;
    at::Tensor own_lse;
    outputs.push_back(attend(part.of(query), part.keys(key, 2), part.keys(value, 2), own_mask, scaling,
                             is_causal, sliding_window, softcap, own_sinks,
                             lse == nullptr ? nullptr : &own_lse));
    if (lse != nullptr) sums.push_back(own_lse);
  }
  if (lse != nullptr) *lse = at::cat(sums, 1);
  return at::cat(outputs, 1);
}

}  // namespace

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                  int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks,
                  at::Tensor* lse) {
  if (query.size(3) == 0) {
    return attend(one_zero_column(query), without_channels(key), value, mask, scaling, is_causal,
                  sliding_window, softcap, sinks, lse);
  }
  const bool quantize_kv = key.scalar_type() == at::kChar;
  const int64_t value_dim = value.size(3) - (quantize_kv ? kInt8ScaleBytes : 0);
  if (is_invariant(query.size(2))) {
    const int64_t step = most_queries(query.size(0), query.size(1), key.size(2), value_dim);
    // Copied once, if at all.
    if (query.size(2) > step)
      return attend_in_parts(step, query, rows_contiguous(key), rows_contiguous(value), mask, scaling,
                             is_causal, sliding_window, softcap, sinks, lse);
  }
  at::Tensor output = empty_cpu({query.size(0), query.size(2), query.size(1), value_dim},
                                lse == nullptr ? query.scalar_type() : at::kFloat);
  if (output.numel() == 0 && lse == nullptr) return output;
  if (lse != nullptr) {
    *lse = empty_cpu({query.size(0), query.size(2), query.size(1)}, at::kFloat);
    lse->fill_(-std::numeric_limits<float>::infinity());
    if (lse->numel() == 0) return output;
  }
  if (key.size(2) == 0) return output.zero_();

  const at::Tensor q = rows_contiguous(query);
  const at::Tensor k = rows_contiguous(key);
  const at::Tensor v = rows_contiguous(value);
  AttentionArgs args = {};
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.output = output.mutable_data_ptr();
  if (lse != nullptr) args.lse = lse->mutable_data_ptr<float>();
  set_strides(q, args.query_strides);
  set_strides(k, args.key_strides);
  set_strides(v, args.value_strides);
  args.batch = q.size(0);
  args.num_heads = q.size(1);
  args.num_kv_heads = k.size(1);
  args.q_len = q.size(2);
  args.kv_len = k.size(2);
  args.head_dim = q.size(3);
  args.value_dim = value_dim;
  args.quantize_kv = quantize_kv;
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

  const int64_t threads = attention_threads(attention_work(args));
  std::vector<int64_t> split_origins;
  const int64_t tiles = is_invariant(args.q_len) ? plan_invariant_attention(args, split_origins)
                                                 : plan_attention(args, attention_tasks(threads));
  const int64_t tasks = tiles * args.kv_splits;
  const auto& kernels = LB_KERNELS(attention_kernels);
  at::Tensor partials;
  if (args.kv_splits > 1) {
    partials = empty_cpu({partial_floats(args, tiles)}, at::kFloat);
    args.partials = partials.mutable_data_ptr<float>();
  }
  const int64_t bytes = static_cast<int64_t>(kernels.scratch_bytes(args));
  // torch aligns CPU allocations to 64 bytes, and scratch_bytes is a multiple of that.
  at::Tensor scratch = empty_cpu({std::min(tasks, threads) * bytes}, at::kByte);
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  run_tasks(tasks, threads,
            [&](int64_t task, int64_t slot) { kernels.run(args, task, memory + slot * bytes); });
  if (args.kv_splits > 1) {
    run_tasks(tiles, threads, [&](int64_t tile, int64_t) { kernels.merge(args, tile); });
  }
  return output;
}

namespace {

at::Tensor attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                         int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_attention("attention", query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  return attend(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks, nullptr);
}

std::tuple<at::Tensor, at::Tensor> attention_part_cpu(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const std::optional<at::Tensor>& mask, double scaling,
                                                      bool is_causal, double softcap) {
  check_attention("attention_part", query, key, value, mask, scaling, is_causal, 0, softcap, std::nullopt);
  at::Tensor lse;
  at::Tensor output = attend(query, key, value, mask, scaling, is_causal, 0, softcap, std::nullopt, &lse);
  return {std::move(output), std::move(lse)};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("attention", &liteboost::attention_cpu);
  m.impl("attention_part", &liteboost::attention_part_cpu);
}
