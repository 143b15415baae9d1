// Splits rows over torch's threads by the work in them.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "common/resources.h"

namespace liteboost {

// Below about this many elements, waking a second thread (some microseconds) costs more than it saves, and below so many
// times as many where it sleeps.
constexpr int64_t kGrainElements = 16384, kGrainAsleep = 4;

// Calls f(begin, end) over [0, rows), in parallel when rows * work_per_row is worth it.
template <typename F>
void parallel_rows(int64_t rows, int64_t work_per_row, const F& f) {
  const int64_t elements = (threads_sleep() ? kGrainAsleep : 1) * kGrainElements;
  const int64_t grain = std::max<int64_t>(1, elements / std::max<int64_t>(1, work_per_row));
  parallel_for(0, rows, grain, f);
}

// Calls f(begin, end) for parts of [0, count), up to `step` long: each of `threads` threads walks a share of its own from
// the front, and then takes from the shares of those that are behind. Memory does not serve all cores at the same speed
// for as short a time as an op takes.
template <typename F>
void parallel_shares(int64_t count, int64_t step, int64_t threads, const F& f) {
  threads = std::min<int64_t>(threads, (count + step - 1) / step);
  if (threads <= 1) {
    if (count > 0) f(0, count);
    return;
  }
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  constexpr int64_t kOnStack = 64;
  Share on_stack[kOnStack];
  std::unique_ptr<Share[]> on_heap;
  if (threads > kOnStack) on_heap.reset(new Share[threads]);
  Share* const shares = on_heap ? on_heap.get() : on_stack;
  for (int64_t i = 0; i < threads; ++i) {
    shares[i].next = count * i / threads;
    shares[i].end = count * (i + 1) / threads;
  }
  parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    for (int64_t i = 0; i < threads; ++i) {
      Share& share = shares[(own + i) % threads];
      for (int64_t at; (at = share.next.fetch_add(step, std::memory_order_relaxed)) < share.end;)
        f(at, std::min(at + step, share.end));
    }
  });
}

}  // namespace liteboost
