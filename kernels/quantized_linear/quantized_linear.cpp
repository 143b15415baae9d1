#include "quantized_linear/quantized_linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "quantized_linear/quantized_linear_checks.h"

namespace liteboost {
namespace {

at::Tensor like_product(const at::Tensor& x, const at::Tensor& weight) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

at::Tensor linear_w8_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                          const std::optional<at::Tensor>& bias) {
  check_linear_w8(x, weight, scales, bias);
  return like_product(x, weight);
}

at::Tensor linear_w4_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                          const std::optional<at::Tensor>& zero_points,
                          const std::optional<at::Tensor>& bias) {
  check_linear_w4(x, weight, scales, zero_points, bias);
  return like_product(x, weight);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("linear_w8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_w4(Tensor x, Tensor weight, Tensor scales, Tensor? zero_points=None, Tensor? bias=None) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("linear_w8", &liteboost::linear_w8_meta);
  m.impl("linear_w4", &liteboost::linear_w4_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("linear_w8", torch::CppFunction::makeFallthrough());
  m.impl("linear_w4", torch::CppFunction::makeFallthrough());
}
