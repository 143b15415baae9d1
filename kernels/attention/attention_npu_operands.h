// How query, keys and values are handed to an operator that reads contiguous tensors only.
//
// It reads [B, N, S, D] (BNSD) or [B, S, N, D] (BSND), all three the same. Of the two, that order is taken in which
// fewer bytes are copied first. Keys and values that are a part of a preallocated cache are not copied: the operator
// is given the cache and how many of its positions count. Its causal modes put the diagonal by those lengths.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "npu/aclnn.h"
#include "npu/graph_tasks.h"

namespace liteboost {

enum class Order { heads_first, positions_first };

inline at::Tensor ordered(const at::Tensor& x, Order order) {
  return order == Order::heads_first ? x : x.transpose(1, 2);
}

inline int64_t position_axis(Order order) { return order == Order::heads_first ? 2 : 1; }

// The contiguous tensor that begins as `x` does and is longer along `axis`, within the storage of `x`; undefined
// where `x` does not lie so. Of a contiguous tensor, itself.
inline at::Tensor contiguous_from(const at::Tensor& x, int64_t axis) {
  constexpr size_t kAlignment = 32;  // of what the operators load, in bytes
  if (x.is_contiguous()) return x;
  int64_t step = 1;
  const auto lies_at = [&](int64_t d) { return x.size(d) == 1 || x.stride(d) == step; };
  int64_t d = x.dim() - 1;
  for (; d >= axis; --d) {
    if (!lies_at(d)) return at::Tensor();
    if (d > axis) step *= x.size(d);
  }
  while (d >= 0 && x.size(d) == 1) --d;
  const int64_t capacity = d < 0 ? x.size(axis) : x.stride(d) / step;
  step *= capacity;
  if (capacity < x.size(axis)) return at::Tensor();
  for (; d >= 0; --d) {
    if (!lies_at(d)) return at::Tensor();
    step *= x.size(d);
  }
  const size_t first = static_cast<size_t>(x.storage_offset()) * x.itemsize();
  if (first % kAlignment != 0) return at::Tensor();
  if (first + static_cast<size_t>(step) * x.itemsize() > x.storage().nbytes()) return at::Tensor();
  std::vector<int64_t> sizes = x.sizes().vec(), strides(sizes.size());
  sizes[static_cast<size_t>(axis)] = capacity;
  step = 1;
  for (size_t k = sizes.size(); k-- > 0; step *= sizes[k]) strides[k] = step;
  return x.as_strided(sizes, strides, x.storage_offset());
}

// Keys and values from position `first` on: [B, K, S, D], as the op was given them.
struct Keys {
  at::Tensor key, value;
  int64_t first = 0;

  int64_t length() const { return key.size(2) - first; }
  at::Tensor counting(const at::Tensor& x) const { return first == 0 ? x : x.narrow(2, first, length()); }
};

// Memory that has the keys and values in it, in one order.
struct Cache {
  at::Tensor key, value;
  int64_t after = 0;    // positions behind the last one that counts
  bool at_end = false;  // whether others count as little that are before the first
};

// Where keys and values can be read without copying them; nothing where they cannot. `from_end`: whether the
// operator may be told how many positions do not count at the end, instead of beginning with the first that does.
inline std::optional<Cache> cache_of(const Keys& keys, Order order, bool from_end) {
  const int64_t axis = position_axis(order), whole = keys.key.size(2);
  const auto found = [&](int64_t first) -> std::optional<Cache> {
    const auto from = [&](const at::Tensor& x) {
      return contiguous_from(ordered(first == 0 ? x : x.narrow(2, first, whole - first), order), axis);
    };
    const at::Tensor key = from(keys.key), value = from(keys.value);
    if (!key.defined() || !value.defined() || key.size(axis) != value.size(axis)) return std::nullopt;
    return Cache{key, value, key.size(axis) - (whole - first), first != keys.first};
  };
  std::optional<Cache> cache = found(keys.first);
  return cache || keys.first == 0 || !from_end ? cache : found(0);
}

// In which order the operator reads, and of what: decided before anything is copied.
struct Plan {
  Order order = Order::heads_first;
  std::optional<Cache> cache;
  int64_t copied = 0;  // elements

  // Whether the operator is told which positions count. The next replay of a captured step may read fewer than all.
  bool has_lengths() const { return cache && (cache->after > 0 || cache->at_end || npu::tells_lengths()); }
};

// `within_cache`: whether the operator may be given more positions than count.
inline Plan plan(const at::Tensor& query, const Keys& keys, bool within_cache, bool from_end) {
  // BSND is for rows of all heads below this.
  constexpr int64_t kLongestRow = 65535;
  std::optional<Plan> best;
  for (const Order order : {Order::heads_first, Order::positions_first}) {
    if (order == Order::positions_first && query.size(1) * query.size(3) >= kLongestRow) continue;
    Plan one{order, cache_of(keys, order, from_end), 0};
    if (one.has_lengths() && !within_cache) one.cache.reset();
    const auto cost = [&](const at::Tensor& x) { return ordered(x, order).is_contiguous() ? 0 : x.numel(); };
    one.copied = cost(query);
    if (!one.cache) one.copied += cost(keys.counting(keys.key)) + cost(keys.counting(keys.value));
    if (!best || one.copied < best->copied) best = one;
  }
  return *best;
}

// What the operator is given, and where it writes.
struct Operands {
  at::Tensor query, key, value, out;
  at::Tensor result;  // out as [B, S, N, D]
  npu::Text layout = nullptr;
  std::optional<int64_t> length;  // of keys and values; the same for all sequences
  // Of keys and values that are integers: their scales, and which of them have one together (antiquantMode).
  at::Tensor key_scales, value_scales;
  int64_t scaled_by = 0;
};

inline Operands operands(const Plan& plan, const at::Tensor& query, const Keys& keys,
                         const at::Tensor& result) {
  const auto dense = [&](const at::Tensor& x) { return ordered(x, plan.order).contiguous(); };
  npu::check_reads_in_place(plan.cache && ordered(query, plan.order).is_contiguous(),
                            "keys and values of attention");
  Operands on;
  on.query = dense(query);
  on.key = plan.cache ? plan.cache->key : dense(keys.counting(keys.key));
  on.value = plan.cache ? plan.cache->value : dense(keys.counting(keys.value));
  on.result = result;
  const bool heads_first = plan.order == Order::heads_first;
  // Of one query [B, N, 1, D] and [B, 1, N, D] are the same memory, and the operator knows no mixed layout there.
  const bool is_one = query.size(2) == 1;
  on.out = heads_first && is_one ? result.transpose(1, 2) : result;
  on.layout = !heads_first ? "BSND" : is_one ? "BNSD" : "BNSD_BSND";
  if (plan.has_lengths()) on.length = keys.length();
  return on;
}

}  // namespace liteboost
