#include "int8_linear/int8_linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "int8_linear/int8_linear_checks.h"

namespace liteboost {
namespace {

at::Tensor linear_w8a8_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                            const std::optional<at::Tensor>& bias) {
  check_linear_w8a8(x, weight, scales, bias);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("linear_w8a8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor");
  // What programs run for layers with one input: linear_w8a8 of each, the same bits.
  m.def("_linears_w8a8(Tensor x, Tensor[] weights, Tensor[] scales, Tensor?[] biases) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("linear_w8a8", &liteboost::linear_w8a8_meta); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) { m.impl("linear_w8a8", torch::CppFunction::makeFallthrough()); }
