#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "norm/norm_checks.h"

namespace liteboost {
namespace {

at::Tensor empty_like(const at::Tensor& x, at::ScalarType dtype) {
  return at::empty_symint(x.sym_sizes(), x.options().dtype(dtype));
}

at::Tensor rms_norm_meta(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                         double /*weight_offset*/, bool late) {
  check_rms_norm("rms_norm", x, weight, eps);
  return empty_like(x, late ? x.scalar_type() : promoted(x, weight));
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_meta(const at::Tensor& x, const at::Tensor& residual,
                                                     const std::optional<at::Tensor>& weight, double eps,
                                                     double /*weight_offset*/, bool late) {
  check_rms_norm("add_rms_norm", x, weight, eps);
  check_residual(x, residual);
  return {empty_like(x, late ? x.scalar_type() : promoted(x, weight)), empty_like(x, x.scalar_type())};
}

at::Tensor inverse_rms_meta(const at::Tensor& x, double eps) {
  check_inverse_rms(x, eps);
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes.back() = 1;
  return at::empty_symint(sizes, x.options());
}

at::Tensor gated_rms_norm_meta(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                               double eps, c10::string_view activation, bool gate_first, bool late,
                               int64_t group_size) {
  check_gated_rms_norm(x, gate, weight, eps, activation, gate_first, group_size);
  return empty_like(x, gate_first && !late ? weight.scalar_type() : x.scalar_type());
}

at::Tensor layer_norm_meta(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias, double eps) {
  check_layer_norm(x, weight, bias, eps);
  return empty_like(x, x.scalar_type());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, bool late=False) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, "
      "bool late=False) -> (Tensor normed, Tensor sum)");
  m.def(
      "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, str activation=\"silu\", "
      "bool gate_first=False, bool late=False, int group_size=0) -> Tensor");
  m.def("inverse_rms(Tensor x, float eps) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) {
  m.impl("rms_norm", &liteboost::rms_norm_meta);
  m.impl("add_rms_norm", &liteboost::add_rms_norm_meta);
  m.impl("gated_rms_norm", &liteboost::gated_rms_norm_meta);
  m.impl("inverse_rms", &liteboost::inverse_rms_meta);
  m.impl("layer_norm", &liteboost::layer_norm_meta);
}

// No backward: the checks raise where one would be needed, and torch's own fallback costs microseconds.
TORCH_LIBRARY_IMPL(liteboost, Autograd, m) {
  m.impl("rms_norm", torch::CppFunction::makeFallthrough());
  m.impl("add_rms_norm", torch::CppFunction::makeFallthrough());
  m.impl("gated_rms_norm", torch::CppFunction::makeFallthrough());
  m.impl("inverse_rms", torch::CppFunction::makeFallthrough());
  m.impl("layer_norm", torch::CppFunction::makeFallthrough());
}
