#include "paged_attention/paged_attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "paged_attention/paged_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor paged_attention_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                const std::optional<at::Tensor>& block_table, double scaling, bool is_causal,
                                int64_t sliding_window, double softcap,
                                const std::optional<at::Tensor>& sinks) {
  check_paged_attention(query, key, value, cu_seqlens_q, cu_seqlens_k, block_table, scaling, is_causal,
                        sliding_window, softcap, sinks);
  return at::empty_symint({query.sym_size(0), query.sym_size(1), value.sym_size(3)}, query.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "Tensor? block_table, float scaling, bool is_causal=True, int sliding_window=0, float softcap=0.0, "
      "Tensor? sinks=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("paged_attention", &liteboost::paged_attention_meta); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("paged_attention", torch::CppFunction::makeFallthrough());
}
