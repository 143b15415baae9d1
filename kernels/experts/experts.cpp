#include "experts/experts.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "experts/experts_checks.h"

namespace liteboost {
namespace {

at::Tensor experts_linear_meta(const at::Tensor& x, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, const at::Tensor& index) {
  check_experts_linear(x, weight, bias, index);
  return at::empty_symint({index.sym_size(0), index.sym_size(1), weight.sym_size(1)}, x.options());
}

at::Tensor experts_combine_meta(const at::Tensor& y, const at::Tensor& scores) {
  check_experts_combine(y, scores);
  return at::empty_symint({y.sym_size(0), y.sym_size(2)}, y.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("experts_linear(Tensor x, Tensor weight, Tensor? bias, Tensor index) -> Tensor");
  m.def("experts_combine(Tensor y, Tensor scores) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("experts_linear", &liteboost::experts_linear_meta);
  m.impl("experts_combine", &liteboost::experts_combine_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("experts_linear", torch::CppFunction::makeFallthrough());
  m.impl("experts_combine", torch::CppFunction::makeFallthrough());
}
