#include "linear/linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "linear/linear_checks.h"

namespace liteboost {
namespace {

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_linear(x, weight, bias);
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

at::Tensor gated_linear_meta(const at::Tensor& x, const at::Tensor& gate_weight,
                             const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                             const std::optional<at::Tensor>& up_bias, c10::string_view activation,
                             double alpha) {
  check_gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, activation, alpha);
  return linear_meta(x, gate_weight, gate_bias);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def(
      "gated_linear(Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, Tensor? up_bias, "
      "str activation=\"silu\", float alpha=1.0) -> Tensor");
  // What programs run for layers with one input: linear of each, the same bits.
  m.def("_linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
  // The sum of a contiguous float32 tensor, read once by all threads: what linear's speed is measured by.
  m.def("_stream_sum(Tensor x) -> float");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("linear", &liteboost::linear_meta);
  m.impl("gated_linear", &liteboost::gated_linear_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("linear", torch::CppFunction::makeFallthrough());
  m.impl("gated_linear", torch::CppFunction::makeFallthrough());
}
