// What the CPU code of ops on experts shares.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "common/resources.h"

namespace liteboost {

// The slots in the order of their experts: those of expert e are order[first[e]] to order[first[e + 1] - 1].
struct Groups {
  std::vector<int64_t> first, order;
};

// Of index [tokens, slots], in which `experts` stands for none: these slots come last. Raises for other numbers.
Groups group(const char* op, const at::Tensor& index, int64_t experts);

// The op on the CPU.
at::Tensor experts_linear_cpu(const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const at::Tensor& index);

// f(i) for each i of [0, count), each thread taking the next when it is done: the parts differ in cost.
template <typename F>
void parallel_queue(int64_t count, int64_t threads, const F& f) {
  threads = std::min(threads, count);
  std::atomic<int64_t> next{0};
  parallel_for(0, std::max<int64_t>(threads, 1), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
  });
}

}  // namespace liteboost
