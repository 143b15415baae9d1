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

at::Tensor linear_w8_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                          const std::optional<at::Tensor>& bias) {
  check_linear_w8(x, weight, scales, bias);
  return like_product(x, weight.sym_size(0));
}

at::Tensor linear_w4_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                          const std::optional<at::Tensor>& zero_points,
                          const std::optional<at::Tensor>& bias) {
  check_linear_w4(x, weight, scales, zero_points, bias);
  return like_product(x, weight.sym_size(0));
}

at::Tensor linear_tiles_meta(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                             const std::optional<at::Tensor>& zero_points,
                             const std::optional<at::Tensor>& bias, c10::SymInt out_features) {
  check_linear_tiles(x, tiles, scales, zero_points, bias, out_features);
  return like_product(x, out_features);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("linear_w8(Tensor x, Tensor weight, Tensor scales, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_w4(Tensor x, Tensor weight, Tensor scales, Tensor? zero_points=None, Tensor? bias=None) -> "
      "Tensor");
  m.def(
      "linear_tiles(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
      "SymInt out_features) -> Tensor");
  // What programs run for layers with one input: linear_tiles of each, the same bits.
  m.def(
      "_tiles_at_once(Tensor x, Tensor[] tiles, Tensor[] scales, Tensor?[] zero_points, Tensor?[] biases, "
      "int[] out_features) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("linear_w8", &liteboost::linear_w8_meta);
  m.impl("linear_w4", &liteboost::linear_w4_meta);
  m.impl("linear_tiles", &liteboost::linear_tiles_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("linear_w8", torch::CppFunction::makeFallthrough());
  m.impl("linear_w4", torch::CppFunction::makeFallthrough());
  m.impl("linear_tiles", torch::CppFunction::makeFallthrough());
}
