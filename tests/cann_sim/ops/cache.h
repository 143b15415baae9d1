// Key and value caches in blocks (paged).
#pragma once
#include "fused.h"

namespace sim {

/// Slots must lie in the cache and be different: hardware writes elsewhere, or in any order, without a word.
inline at::Tensor checked_slots(const at::Tensor& slots, int64_t places, bool may_skip) {
  auto all = slots.to(at::kLong).flatten();
  if (!all.numel()) return all;
  auto least = all.min().item<int64_t>();
  TORCH_CHECK(least >= (may_skip ? -1 : 0) && all.max().item<int64_t>() < places, "a slot is not in 0..",
              places - 1, may_skip ? " nor -1 (skipped)" : " (-1 is not documented as padding)");
  auto used = may_skip ? all.masked_select(all.ge(0)) : all;
  TORCH_CHECK(std::get<0>(at::_unique(used)).numel() == used.numel(),
              "a slot is written twice: which value stays is not defined");
  return all;
}

/// Writes rows [tokens, heads, dim] to slots of a cache [blocks, block size, heads, dim].
inline void scatter_rows(at::Tensor cache, const at::Tensor& rows, const at::Tensor& slots) {
  auto kept = slots.ge(0).nonzero().flatten();
  auto to = slots.index_select(0, kept);
  auto size = cache.size(1);
  cache.index_put_({at::floor_divide(to, size), at::remainder(to, size)},
                   rows.index_select(0, kept).to(cache.scalar_type()));
}

/// The same to a cache in FRACTAL_NZ order [blocks, heads * dim / width, block size, width].
inline void scatter_rows_nz(at::Tensor cache, const at::Tensor& rows, const at::Tensor& slots) {
  auto kept = slots.ge(0).nonzero().flatten();
  auto to = slots.index_select(0, kept);
  auto size = cache.size(2);
  auto parts = rows.reshape({rows.size(0), cache.size(1), cache.size(3)}).index_select(0, kept);
  cache.transpose(1, 2).index_put_({at::floor_divide(to, size), at::remainder(to, size)},
                                   parts.to(cache.scalar_type()));
}

}  // namespace sim
