#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activation/activation_checks.h"

namespace liteboost {
namespace {

at::Tensor gated_activation_meta(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                 double alpha, std::optional<double> limit, double /*up_offset*/) {
  check_gated_activation(gate, up, activation, alpha, limit);
  return at::empty_symint(gate.sym_sizes(), gate.options());
}

at::Tensor activation_meta(const at::Tensor& x, c10::string_view activation, double alpha) {
  check_activation(x, activation, alpha);
  return at::empty_symint(x.sym_sizes(), x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("activation(Tensor x, str activation, float alpha=1.0) -> Tensor");
  m.def(
      "gated_activation(Tensor gate, Tensor up, str activation=\"silu\", float alpha=1.0, float? limit=None, "
      "float up_offset=0.0) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("activation", &liteboost::activation_meta);
  m.impl("gated_activation", &liteboost::gated_activation_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("activation", torch::CppFunction::makeFallthrough());
  m.impl("gated_activation", torch::CppFunction::makeFallthrough());
}
