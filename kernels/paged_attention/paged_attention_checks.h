// The argument checks of paged_attention, shared by every backend.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/checks.h"

namespace liteboost {

// Raises on anything that paged_attention.h does not allow and that shows without reading a value.
void check_paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                           const std::optional<at::Tensor>& block_table, double scaling, bool is_causal,
                           int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks);

// The values of cu_seqlens_q and cu_seqlens_k on the host, checked.
struct Spans {
  std::vector<int64_t> queries, keys;

  int64_t count() const { return static_cast<int64_t>(queries.size()) - 1; }
  int64_t q_len(int64_t r) const { return queries[size_t(r) + 1] - queries[size_t(r)]; }
  int64_t kv_len(int64_t r) const { return keys[size_t(r) + 1] - keys[size_t(r)]; }
};
Spans spans_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& cu_seqlens_q,
               const at::Tensor& cu_seqlens_k, const std::optional<at::Tensor>& block_table);

// The values of the table on the host, checked; empty without one.
std::vector<int64_t> pages_of(const at::Tensor& key, const std::optional<at::Tensor>& block_table,
                              const Spans& spans);

}  // namespace liteboost
