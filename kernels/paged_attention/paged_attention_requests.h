// The requests of a call of paged_attention, each as a call of attention of its own, for the CPU kernels.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_invariant_plan.h"
#include "common/batch_invariant.h"
#include "common/resources.h"
#include "common/tensors.h"
#include "paged_attention/paged_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor channels_adjacent(const at::Tensor& states) {
  return states.size(-1) <= 1 || states.stride(-1) == 1 ? states : states.contiguous();
}

// Where the requests' keys and values lie, with adjacent channels.
struct PagedCache {
  at::Tensor key, value;
  std::vector<int64_t> pages;  // empty: the keys of the requests lie one behind the other
  int64_t columns;             // pages of a request

  int64_t page_rows() const { return key.size(1); }
  // Whether blocks of keys, whose sums are added up one after the other, may end where a page does.
  bool cuts_blocks(int64_t window) const {
    return !pages.empty() && (window > 0 || page_rows() % kDirectKeys != 0);
  }
};

void set_cache(AttentionArgs& args, const PagedCache& cache) {
  args.key = cache.key.const_data_ptr();
  args.value = cache.value.const_data_ptr();
  args.key_page_stride = cache.key.stride(0);
  args.value_page_stride = cache.value.stride(0);
  args.page_rows = cache.page_rows();
  for (int dim : {1, 2}) {
    args.key_strides[dim] = cache.key.stride(3 - dim);
    args.value_strides[dim] = cache.value.stride(3 - dim);
  }
}

// What the requests have in common.
AttentionArgs common_args(const at::Tensor& q, const PagedCache& cache, double scaling, bool is_causal,
                          double softcap) {
  AttentionArgs args = {};
  set_cache(args, cache);
  args.query_strides[1] = q.stride(1);
  args.query_strides[2] = q.stride(0);
  args.batch = 1;
  args.num_heads = q.size(1);
  args.num_kv_heads = cache.key.size(2);
  args.head_dim = q.size(2);
  args.value_dim = cache.value.size(3);
  args.scaling = static_cast<float>(scaling);
  args.softcap = static_cast<float>(softcap);
  args.is_causal = is_causal;
  args.dtype = dtype_of(q);
  args.mask_type = AttentionMask::none;
  return args;
}

// Queries [begin, end) of a request.
struct Part {
  int64_t request, begin, end;
};

// Requests, or where each query is to have the bits it has alone, as many of one's queries as a plan may have.
std::vector<Part> parts_of(const AttentionArgs& common, const Spans& spans) {
  std::vector<Part> parts;
  for (int64_t r = 0; r < spans.count(); ++r) {
    const int64_t count = spans.q_len(r);
    const int64_t step = is_length_invariant()
                             ? most_queries(1, common.num_heads, spans.kv_len(r), common.value_dim)
                             : std::max<int64_t>(count, 1);
    for (int64_t begin = 0; begin < count; begin += step)
      parts.push_back({r, begin, std::min(begin + step, count)});
  }
  return parts;
}

// The parts that have queries and keys, each with its own of everything.
std::vector<AttentionArgs> requests_of(const AttentionArgs& common, const at::Tensor& q, at::Tensor& output,
                                       const PagedCache& cache, const Spans& spans, int64_t window) {
  const auto at = [](const void* data, int64_t elements, int64_t size) {
    return static_cast<const char*>(data) + elements * size;
  };
  std::vector<AttentionArgs> requests;
  for (const Part& part : parts_of(common, spans)) {
    const int64_t r = part.request;
    const int64_t hidden = common.is_causal ? spans.q_len(r) - part.end : 0;
    if (spans.kv_len(r) <= hidden) continue;
    const int64_t first = spans.queries[static_cast<size_t>(r)] + part.begin, size = q.itemsize();
    AttentionArgs args = common;
    args.query = at(q.const_data_ptr(), first * q.stride(0), size);
    args.output = static_cast<char*>(output.mutable_data_ptr()) + first * output.stride(0) * size;
    args.q_len = part.end - part.begin;
    args.kv_len = spans.kv_len(r) - hidden;
    // A window as long as the keys hides none.
    args.window = window < args.kv_len ? window : 0;
    if (cache.pages.empty()) {
      const int64_t row = spans.keys[static_cast<size_t>(r)];
      args.key = at(common.key, row * common.key_strides[2], size);
      args.value = at(common.value, row * common.value_strides[2], size);
    } else {
      args.pages = cache.pages.data() + r * cache.columns;
    }
    requests.push_back(args);
  }
  return requests;
}

// Whether there are queries of no request, or such that see no key.
bool leaves_rows(const Spans& spans, int64_t queries) {
  bool leaves = spans.queries.back() < queries;
  for (int64_t r = 0; r < spans.count(); ++r) leaves = leaves || spans.q_len(r) > spans.kv_len(r);
  return leaves;
}

// The window, or 0 where it is as long as the keys of each request: then it hides none.
int64_t hiding_window(const Spans& spans, int64_t window) {
  for (int64_t r = 0; r < spans.count(); ++r) {
    if (spans.kv_len(r) > window) return window;
  }
  return 0;
}

// The keys of request r that its queries see: the last ones.
int64_t seen_keys(const Spans& spans, int64_t r, int64_t window) {
  if (spans.q_len(r) == 0) return 0;
  const int64_t keys = spans.kv_len(r);
  return window > 0 && window < keys ? std::min(keys, window + spans.q_len(r) - 1) : keys;
}

// Keys or values of requests [first, first + some.count()), as many of the last of each as `some` says, one behind the
// other.
at::Tensor copied_rows(const at::Tensor& states, const PagedCache& cache, const Spans& spans,
                       const Spans& some, int64_t first) {
  const int64_t heads = states.size(2), row_bytes = states.size(3) * states.itemsize();
  at::Tensor copy = empty_cpu({1, some.keys.back(), heads, states.size(3)}, states.scalar_type());
  char* const to = static_cast<char*>(copy.mutable_data_ptr());
  const char* const from = static_cast<const char*>(states.const_data_ptr());
  const auto copy_key = [&](int64_t r, int64_t key) {
    const int64_t position = spans.kv_len(first + r) - some.kv_len(r) + key;
    const int64_t page =
        cache.pages[static_cast<size_t>((first + r) * cache.columns + position / cache.page_rows())];
    const int64_t begin = page * states.stride(0) + position % cache.page_rows() * states.stride(1);
    char* const out = to + (some.keys[static_cast<size_t>(r)] + key) * heads * row_bytes;
    for (int64_t head = 0; head < heads; ++head)
      memcpy(out + head * row_bytes, from + (begin + head * states.stride(2)) * states.itemsize(),
             static_cast<size_t>(row_bytes));
  };
  constexpr int64_t kKeysPerThread = 64;
  parallel_for(0, some.keys.back(), kKeysPerThread, [&](int64_t begin, int64_t end) {
    const auto behind = std::upper_bound(some.keys.begin(), some.keys.end() - 1, begin);
    int64_t r = behind - some.keys.begin() - 1;
    for (int64_t key = begin; key < end; ++key) {
      while (key >= some.keys[static_cast<size_t>(r + 1)]) ++r;
      copy_key(r, key - some.keys[static_cast<size_t>(r)]);
    }
  });
  return copy;
}

// f(cache, spans) of some requests at a time, whose keys and values are copied one behind the other, into so many bytes but
// of a single request.
template <typename F>
void each_copied(const PagedCache& cache, const Spans& spans, int64_t window, const F& f) {
  constexpr int64_t kMostBytes = 32 << 20;
  const int64_t key_bytes =
      cache.key.size(2) * (cache.key.size(3) + cache.value.size(3)) * cache.key.itemsize();
  for (int64_t first = 0, last; first < spans.count(); first = last) {
    Spans some{{spans.queries[static_cast<size_t>(first)]}, {0}};
    for (last = first; last < spans.count(); ++last) {
      const int64_t keys = some.keys.back() + seen_keys(spans, last, window);
      if (last > first && keys * key_bytes > kMostBytes) break;
      some.queries.push_back(spans.queries[static_cast<size_t>(last + 1)]);
      some.keys.push_back(keys);
    }
    f(PagedCache{copied_rows(cache.key, cache, spans, some, first),
                 copied_rows(cache.value, cache, spans, some, first),
                 {},
                 0},
      some);
  }
}

}  // namespace
}  // namespace liteboost
