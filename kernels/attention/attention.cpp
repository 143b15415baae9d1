#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention/attention_checks.h"

namespace liteboost {
namespace {

at::Tensor attention_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                          int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_attention("attention", query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  return at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1), value.sym_size(3)},
                          query.options());
}

std::tuple<at::Tensor, at::Tensor> attention_part_meta(const at::Tensor& query, const at::Tensor& key,
                                                       const at::Tensor& value,
                                                       const std::optional<at::Tensor>& mask, double scaling,
                                                       bool is_causal, double softcap) {
  check_attention("attention_part", query, key, value, mask, scaling, is_causal, 0, softcap, std::nullopt);
  const auto options = query.options().dtype(at::kFloat);
  return {
      at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1), value.sym_size(3)}, options),
      at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1)}, options)};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, bool is_causal=False, "
      "int sliding_window=0, float softcap=0.0, Tensor? sinks=None) -> Tensor");
  m.def(
      "attention_part(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
      "bool is_causal=False, float softcap=0.0) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("attention", &liteboost::attention_meta);
  m.impl("attention_part", &liteboost::attention_part_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("attention", torch::CppFunction::makeFallthrough());
  m.impl("attention_part", torch::CppFunction::makeFallthrough());
}
