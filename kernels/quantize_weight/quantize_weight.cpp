#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "quantize_weight/quantize_weight_checks.h"

namespace liteboost {
namespace {

std::tuple<at::Tensor, at::Tensor> quantize_w8_meta(const at::Tensor& weight, at::ScalarType scale_dtype) {
  check_quantize_w8(weight, scale_dtype);
  return {at::empty_symint(weight.sym_sizes(), weight.options().dtype(at::kChar)),
          at::empty_symint({weight.sym_size(0)}, weight.options().dtype(scale_dtype))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_w4_meta(const at::Tensor& weight, int64_t group_size,
                                                                bool /*symmetric*/,
                                                                at::ScalarType scale_dtype) {
  check_quantize_w4(weight, group_size, scale_dtype);
  const c10::SymInt rows = weight.sym_size(0), cols = weight.sym_size(1), groups = cols / group_size;
  const at::TensorOptions bytes = weight.options().dtype(at::kByte);
  return {at::empty_symint({rows, cols / 2}, bytes),
          at::empty_symint({rows, groups}, weight.options().dtype(scale_dtype)),
          at::empty_symint({rows, groups}, bytes)};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  // The same text as in liteboost_adaptor/ops/quantize_weight.py.
  m.def("quantize_w8(Tensor weight, ScalarType scale_dtype) -> (Tensor, Tensor)");
  m.def(
      "quantize_w4(Tensor weight, int group_size, bool symmetric, ScalarType scale_dtype) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("quantize_w8", &liteboost::quantize_w8_meta);
  m.impl("quantize_w4", &liteboost::quantize_w4_meta);
}

TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  // No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
  m.impl("quantize_w8", torch::CppFunction::makeFallthrough());
  m.impl("quantize_w4", torch::CppFunction::makeFallthrough());
}
