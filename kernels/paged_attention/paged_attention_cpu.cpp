// Plans each request as a call of attention of its own, and hands the tasks of all of them to torch's threads.
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "attention/attention_plan.h"
#include "common/tensors.h"
#include "paged_attention/paged_attention.h"
#include "paged_attention/paged_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor channels_adjacent(const at::Tensor& states) {
  return states.size(-1) <= 1 || states.stride(-1) == 1 ? states : states.contiguous();
}

// What the requests have in common.
AttentionArgs common_args(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scaling,
                          bool is_causal, double softcap) {
  AttentionArgs args = {};
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.query_strides[1] = q.stride(1);
  args.query_strides[2] = q.stride(0);
  args.key_page_stride = k.stride(0);
  args.value_page_stride = v.stride(0);
  args.page_rows = k.size(1);
  for (int dim : {1, 2}) {
    args.key_strides[dim] = k.stride(3 - dim);
    args.value_strides[dim] = v.stride(3 - dim);
  }
  args.batch = 1;
  args.num_heads = q.size(1);
  args.num_kv_heads = k.size(2);
  args.head_dim = q.size(2);
  args.value_dim = v.size(3);
  args.scaling = static_cast<float>(scaling);
  args.softcap = static_cast<float>(softcap);
  args.is_causal = is_causal;
  args.dtype = dtype_of(q);
  args.mask_type = AttentionMask::none;
  return args;
}

// The requests that have queries and keys, each with its own part of everything.
std::vector<AttentionArgs> requests_of(const AttentionArgs& common, const at::Tensor& q, at::Tensor& output,
                                       const Spans& spans, const std::vector<int64_t>& pages, int64_t columns,
                                       int64_t window) {
  const auto at = [](const void* data, int64_t elements, int64_t size) {
    return static_cast<const char*>(data) + elements * size;
  };
  std::vector<AttentionArgs> requests;
  for (int64_t r = 0; r < spans.count(); ++r) {
    if (spans.q_len(r) == 0 || spans.kv_len(r) == 0) continue;
    const int64_t first = spans.queries[static_cast<size_t>(r)], size = q.itemsize();
    AttentionArgs args = common;
    args.query = at(q.const_data_ptr(), first * q.stride(0), size);
    args.output = static_cast<char*>(output.mutable_data_ptr()) + first * output.stride(0) * size;
    args.q_len = spans.q_len(r);
    args.kv_len = spans.kv_len(r);
    // A window as long as the keys hides none.
    args.window = window < args.kv_len ? window : 0;
    if (pages.empty()) {
      const int64_t row = spans.keys[static_cast<size_t>(r)];
      args.key = at(common.key, row * common.key_strides[2], size);
      args.value = at(common.value, row * common.value_strides[2], size);
    } else {
      args.pages = pages.data() + r * columns;
    }
    requests.push_back(args);
  }
  return requests;
}

// Where the tasks and tiles of a planned request begin among those of all.
struct Planned {
  int64_t tiles, first_task, first_tile, first_partial;
};

// Plans each request by its share of the work; long tasks come first, so that the last ones to end are short.
std::vector<Planned> plan_requests(std::vector<AttentionArgs>& requests, int64_t& threads) {
  int64_t work = 0;
  for (const AttentionArgs& args : requests) work += attention_work(args);
  threads = attention_threads(work);
  const int64_t wanted = attention_tasks(threads);
  std::stable_sort(requests.begin(), requests.end(), [](const AttentionArgs& a, const AttentionArgs& b) {
    return attention_work(a) > attention_work(b);
  });
  std::vector<Planned> planned;
  Planned next = {};
  for (AttentionArgs& args : requests) {
    const double share =
        static_cast<double>(attention_work(args)) / static_cast<double>(std::max<int64_t>(work, 1));
    const auto tasks = static_cast<int64_t>(share * static_cast<double>(wanted)) + 1;
    next.tiles = plan_attention(args, std::min(wanted, tasks));
    planned.push_back(next);
    next.first_task += next.tiles * args.kv_splits;
    next.first_tile += next.tiles;
    next.first_partial += partial_floats(args, next.tiles);
  }
  planned.push_back(next);
  return planned;
}

// Calls f(request, number within it) for the n-th of what `first` counts.
template <typename F>
void find(const std::vector<Planned>& planned, int64_t Planned::* first, int64_t n, const F& f) {
  const auto behind = std::upper_bound(planned.begin(), planned.end() - 1, n,
                                       [&](int64_t value, const Planned& p) { return value < p.*first; });
  const auto found = behind - 1;
  f(static_cast<size_t>(found - planned.begin()), n - (*found).*first);
}

void run_requests(std::vector<AttentionArgs>& requests) {
  int64_t threads = 1;
  const std::vector<Planned> planned = plan_requests(requests, threads);
  const Planned& all = planned.back();
  const auto& kernels = LB_KERNELS(attention_kernels);
  at::Tensor partials;
  if (all.first_partial > 0) partials = empty_cpu({all.first_partial}, at::kFloat);
  int64_t bytes = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    if (requests[r].kv_splits > 1) {
      requests[r].partials = partials.mutable_data_ptr<float>() + planned[r].first_partial;
    }
    bytes = std::max(bytes, static_cast<int64_t>(kernels.scratch_bytes(requests[r])));
  }
  // torch aligns CPU allocations to 64 bytes, and scratch_bytes is a multiple of that.
  at::Tensor scratch = empty_cpu({std::min(all.first_task, threads) * bytes}, at::kByte);
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  run_tasks(all.first_task, threads, [&](int64_t n, int64_t slot) {
    find(planned, &Planned::first_task, n,
         [&](size_t r, int64_t task) { kernels.run(requests[r], task, memory + slot * bytes); });
  });
  if (all.first_partial == 0) return;
  run_tasks(all.first_tile, threads, [&](int64_t n, int64_t) {
    find(planned, &Planned::first_tile, n, [&](size_t r, int64_t tile) {
      if (requests[r].kv_splits > 1) kernels.merge(requests[r], tile);
    });
  });
}

at::Tensor paged_attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                               const std::optional<at::Tensor>& block_table, double scaling, bool is_causal,
                               int64_t sliding_window, double softcap,
                               const std::optional<at::Tensor>& sinks) {
  check_paged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, scaling, is_causal,
                        sliding_window, softcap, sinks);
  const Spans spans = spans_of(query, key, cu_seqlens_q, cu_seqlens_k, block_table);
  const std::vector<int64_t> pages = pages_of(key, block_table, spans);
  at::Tensor output = empty_cpu({query.size(0), query.size(1), value.size(3)}, query.scalar_type());
  if (output.numel() == 0) return output;
  const bool no_channels = query.size(2) == 0;
  const at::Tensor q = no_channels ? one_zero_column(query) : channels_adjacent(query);
  const at::Tensor k = no_channels ? one_zero_column(key) : channels_adjacent(key);
  const at::Tensor v = channels_adjacent(value);

  AttentionArgs common = common_args(q, k, v, scaling, is_causal, softcap);
  at::Tensor sink_logits;
  if (sinks.has_value()) {
    sink_logits = sinks->to(at::kFloat);
    common.sinks = sink_logits.const_data_ptr<float>();
    common.sink_strides[1] = sink_logits.stride(0);
  }
  const int64_t columns = block_table.has_value() ? block_table->size(1) : 0;
  std::vector<AttentionArgs> requests = requests_of(common, q, output, spans, pages, columns, sliding_window);
  int64_t served = 0;
  for (const AttentionArgs& args : requests) served += args.q_len;
  if (served < output.size(0)) output.zero_();
  if (!requests.empty()) run_requests(requests);
  return output;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("paged_attention", &liteboost::paged_attention_cpu); }
