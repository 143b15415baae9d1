#include "int8_attention/int8_attention.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "int8_attention/int8_attention_checks.h"

namespace liteboost {
namespace {

at::Tensor quantize_kv_meta(const at::Tensor& x) {
  check_quantize_kv(x);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = sizes.back() + kInt8ScaleBytes;
  return at::empty_symint(sizes, x.options().dtype(at::kChar));
}

at::Tensor int8_attention_meta(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                               int64_t sliding_window, double softcap,
                               const std::optional<at::Tensor>& sinks) {
  check_int8_attention(query, key, value, mask, scaling, is_causal, sliding_window, softcap, sinks);
  return at::empty_symint({query.sym_size(0), query.sym_size(2), query.sym_size(1),
                           value.sym_size(3) - c10::SymInt(kInt8ScaleBytes)},
                          query.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("quantize_kv(Tensor x) -> Tensor");
  m.def(
      "int8_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scaling, "
      "bool is_causal=False, int sliding_window=0, float softcap=0.0, Tensor? sinks=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("quantize_kv", &liteboost::quantize_kv_meta);
  m.impl("int8_attention", &liteboost::int8_attention_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("quantize_kv", torch::CppFunction::makeFallthrough());
  m.impl("int8_attention", torch::CppFunction::makeFallthrough());
}
