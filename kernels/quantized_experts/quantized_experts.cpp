#include "quantized_experts/quantized_experts.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "quantized_experts/quantized_experts_checks.h"

namespace liteboost {
namespace {

at::Tensor experts_packed_meta(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                               const std::optional<at::Tensor>& zero_points,
                               const std::optional<at::Tensor>& bias, const at::Tensor& index,
                               c10::SymInt out_features) {
  check_experts_packed(x, tiles, scales, zero_points, bias, index, out_features);
  return at::empty_symint({index.sym_size(0), index.sym_size(1), out_features}, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "experts_packed(Tensor x, Tensor tiles, Tensor scales, Tensor? zero_points, Tensor? bias, "
      "Tensor index, SymInt out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("experts_packed", &liteboost::experts_packed_meta); }

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("experts_packed", torch::CppFunction::makeFallthrough());
}
