// Plans each request as a call of attention of its own, and hands the tasks of all of them to torch's threads.
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/attention_invariant_plan.h"
#include "attention/attention_plan.h"
#include "common/batch_invariant.h"
#include "common/tensors.h"
#include "paged_attention/paged_attention.h"
#include "paged_attention/paged_attention_checks.h"
#include "paged_attention/paged_attention_plan.h"
#include "paged_attention/paged_attention_requests.h"

namespace liteboost {
namespace {

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

// Runs the requests; those that are planned as if each were alone, in groups whose partial results fit the memory of one.
void run_all(std::vector<AttentionArgs>& requests) {
  if (!is_length_invariant()) return run_requests(requests);
  std::vector<AttentionArgs> some;
  int64_t floats = 0;
  for (const AttentionArgs& args : requests) {
    const bool is_split = args.kv_len > kSplitKeys || args.window > 0;
    const int64_t of_query = query_partial_floats(1, args.num_heads, args.kv_len, args.value_dim);
    const int64_t own = is_split ? args.q_len * of_query : 0;
    if (!some.empty() && floats + own > kMostPartialFloats) {
      run_requests(some);
      some.clear();
      floats = 0;
    }
    some.push_back(args);
    floats += own;
  }
  if (!some.empty()) run_requests(some);
}

at::Tensor paged_attention_cpu(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                               const std::optional<at::Tensor>& block_table, double scaling, bool is_causal,
                               int64_t sliding_window, double softcap,
                               const std::optional<at::Tensor>& sinks) {
  check_paged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, scaling, is_causal,
                        sliding_window, softcap, sinks);
  const Spans spans = spans_of(query, key, cu_seqlens_q, cu_seqlens_k, block_table);
  at::Tensor output = empty_cpu({query.size(0), query.size(1), value.size(3)}, query.scalar_type());
  if (output.numel() == 0) return output;
  const bool no_channels = query.size(2) == 0;
  const at::Tensor q = no_channels ? one_zero_column(query) : channels_adjacent(query);
  const PagedCache cache{no_channels ? one_zero_column(key) : channels_adjacent(key),
                         channels_adjacent(value), pages_of(key, block_table, spans),
                         block_table.has_value() ? block_table->size(1) : 0};

  AttentionArgs common = common_args(q, cache, scaling, is_causal, softcap);
  at::Tensor sink_logits;
  if (sinks.has_value()) {
    sink_logits = sinks->to(at::kFloat);
    common.sinks = sink_logits.const_data_ptr<float>();
    common.sink_strides[1] = sink_logits.stride(0);
  }
  const int64_t window = hiding_window(spans, sliding_window);
  if (leaves_rows(spans, output.size(0))) output.zero_();
  const auto run = [&](const AttentionArgs& of_all, const PagedCache& of, const Spans& some) {
    std::vector<AttentionArgs> requests = requests_of(of_all, q, output, of, some, window);
    if (!requests.empty()) run_all(requests);
  };
  if (is_length_invariant() && cache.cuts_blocks(window)) {
    each_copied(cache, spans, window, [&](const PagedCache& copied, const Spans& some) {
      AttentionArgs of_copied = common;
      set_cache(of_copied, copied);
      run(of_copied, copied, some);
    });
  } else {
    run(common, cache, spans);
  }
  return output;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("paged_attention", &liteboost::paged_attention_cpu); }
