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

struct Plan {
  std::vector<Planned> requests;  // and behind them the totals
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
int64_t group_keys(const AttentionArgs& args) {
  return (ceil_div(args.kv_len, args.kv_splits) + kGroupKeys - 1) / kGroupKeys * kGroupKeys;
}

// The parts of a request's keys that fit a cache, or 0 where it has more than a few rows, several tasks of a kv head, or
// keys and values of which the rows of all kv heads are not one piece.
int64_t parts_of_whole_rows(const AttentionArgs& a) {
  const int64_t heads = a.num_kv_heads;
  const bool has_task_of_head = a.direct && a.task_queries == a.q_len && a.task_heads * heads == a.num_heads;
  const bool has_whole_rows = a.pages != nullptr && heads > 1 && a.key_strides[1] == a.head_dim &&
                              a.value_strides[1] == a.value_dim && a.key_strides[2] == heads * a.head_dim &&
                              a.value_strides[2] == heads * a.value_dim;
  if (!has_task_of_head || !has_whole_rows || a.window > 0) return 0;
  const int64_t size = a.dtype == DType::f32 ? 4 : 2;
  return ceil_div(a.kv_len * heads * (a.head_dim + a.value_dim) * size, kGroupBytes);
}

// Cuts the requests so that threads read whole rows of keys and values, once and in one piece, if there are enough for
// all threads; otherwise leaves them.
bool plan_whole_rows(std::vector<AttentionArgs>& requests, int64_t threads) {
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

// Plans each request by its share of the work; long tasks come first, so that the last ones to end are short.
Plan plan_requests(std::vector<AttentionArgs>& requests) {
  int64_t work = 0;
  for (const AttentionArgs& args : requests) work += attention_work(args);
  Plan plan = {{}, attention_threads(work), false};
  const int64_t wanted = attention_tasks(plan.threads);
  std::stable_sort(requests.begin(), requests.end(), [](const AttentionArgs& a, const AttentionArgs& b) {
    return attention_work(a) > attention_work(b);
  });
  for (AttentionArgs& args : requests) {
    const double share =
        static_cast<double>(attention_work(args)) / static_cast<double>(std::max<int64_t>(work, 1));
    const auto tasks = static_cast<int64_t>(share * static_cast<double>(wanted)) + 1;
    plan.requests.push_back({plan_attention(args, std::min(wanted, tasks)), 0, 0, 0});
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

// Calls f(request, number within it) for the n-th of what `first` counts.
template <typename F>
void find(const std::vector<Planned>& planned, int64_t Planned::* first, int64_t n, const F& f) {
  const auto behind = std::upper_bound(planned.begin(), planned.end() - 1, n,
                                       [&](int64_t value, const Planned& p) { return value < p.*first; });
  const auto found = behind - 1;
  f(static_cast<size_t>(found - planned.begin()), n - (*found).*first);
}

// Keys of a request, all heads of which one thread attends to.
struct Group {
  const AttentionArgs* args;
  int64_t part;
};

// Each thread knows the group it takes next, and asks for it meanwhile.
template <typename Run>
void run_groups(const std::vector<AttentionArgs>& requests, int64_t threads, const Run& run) {
  std::vector<Group> groups;
  for (const AttentionArgs& args : requests) {
    for (int64_t part = 0; part < args.kv_splits; ++part) groups.push_back({&args, part});
  }
  std::atomic<size_t> next{0};
  std::atomic<int64_t> slots{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const int64_t slot = slots++;
    for (size_t group = next++, following; group < groups.size(); group = following) {
      following = next++;
      AttentionArgs args = *groups[group].args;
      if (following < groups.size()) {
        const Group& behind = groups[following];
        const int64_t keys = group_keys(*behind.args);
        args.next = behind.args;
        args.next_begin = behind.part * keys;
        args.next_end = std::min(args.next_begin + keys, behind.args->kv_len);
      }
      for (int64_t head = 0; head < args.num_kv_heads; ++head)
        run(args, head * args.kv_splits + groups[group].part, slot);
    }
  });
}

void run_requests(std::vector<AttentionArgs>& requests) {
  const Plan plan = plan_requests(requests);
  const Planned& all = plan.totals();
  const auto& kernels = LB_KERNELS(attention_kernels);
  at::Tensor partials;
  if (all.first_partial > 0) partials = empty_cpu({all.first_partial}, at::kFloat);
  int64_t bytes = 0;
  for (size_t r = 0; r < requests.size(); ++r) {
    if (requests[r].kv_splits > 1) {
      requests[r].partials = partials.mutable_data_ptr<float>() + plan.requests[r].first_partial;
    }
    bytes = std::max(bytes, static_cast<int64_t>(kernels.scratch_bytes(requests[r])));
  }
  // torch aligns CPU allocations to 64 bytes, and scratch_bytes is a multiple of that.
  at::Tensor scratch = empty_cpu({std::min(all.first_task, plan.threads) * bytes}, at::kByte);
  char* memory = static_cast<char*>(scratch.mutable_data_ptr());
  const auto run = [&](const AttentionArgs& args, int64_t task, int64_t slot) {
    kernels.run(args, task, memory + slot * bytes);
  };
  if (plan.groups_heads) {
    run_groups(requests, plan.threads, run);
  } else {
    run_tasks(all.first_task, plan.threads, [&](int64_t n, int64_t slot) {
      find(plan.requests, &Planned::first_task, n,
           [&](size_t r, int64_t task) { run(requests[r], task, slot); });
    });
  }
  if (all.first_partial == 0) return;
  run_tasks(all.first_tile, plan.threads, [&](int64_t n, int64_t) {
    find(plan.requests, &Planned::first_tile, n, [&](size_t r, int64_t tile) {
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
