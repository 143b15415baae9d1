#include "quantized_linear/quantized_linear.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "quantized_linear/quantized_linear_checks.h"

namespace liteboost {
namespace {

at::Tensor like_product(const at::Tensor& x, const c10::SymInt& outputs) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = outputs;
  return at::empty_symint(sizes, x.options());
}

at::Tensor linear_packed_meta(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                              const std::optional<at::Tensor>& zero_points,
                              const std::optional<at::Tensor>& bias, c10::SymInt out_features) {
  check_linear_packed("linear_packed", x, tiles, scales, zero_points, bias, out_features);
  return like_product(x, out_features);
}

at::Tensor linear_w4a8_meta(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                            const std::optional<at::Tensor>& zero_points,
                            const std::optional<at::Tensor>& bias, c10::SymInt out_features) {
  check_linear_w4a8(x, tiles, scales, zero_points, bias, out_features);
  return like_product(x, out_features);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "linear_packed(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
      "SymInt out_features) -> Tensor");
  m.def(
      "linear_w4a8(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
      "SymInt out_features) -> Tensor");
  // What programs run for layers with one input: linear_packed, or linear_w4a8, of each, the same bits.
  m.def(
      "_linears_packed(Tensor x, Tensor[] tiles, Tensor[] scales, Tensor?[] zero_points, Tensor?[] biases, "
      "int[] out_features, bool rounds_x=False) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("linear_packed", &liteboost::linear_packed_meta);
  m.impl("linear_w4a8", &liteboost::linear_w4a8_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("linear_packed", torch::CppFunction::makeFallthrough());
  m.impl("linear_w4a8", torch::CppFunction::makeFallthrough());
}
