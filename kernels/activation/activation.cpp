#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activation/activation_checks.h"

namespace liteboost {

namespace {

Activation parse(const char* op, c10::string_view activation, double alpha) {
  if (activation == "silu") return Activation::silu;
  const bool known = activation == "gelu" || activation == "gelu_tanh" || activation == "relu" ||
                     activation == "relu2" || activation == "sigmoid";
  LB_CHECK_VALUE(known, op, "activation must be one of silu, gelu, gelu_tanh, relu, relu2, sigmoid, got '",
                 activation, "'; pass one of these");
  LB_CHECK_VALUE(alpha == 1.0, op, "alpha must be 1 unless activation is 'silu', got alpha = ", alpha,
                 " with activation '", activation, "'; leave alpha out");
  if (activation == "gelu_tanh") return Activation::gelu_tanh;
  if (activation == "gelu") return Activation::gelu;
  if (activation == "relu2") return Activation::relu2;
  return activation == "relu" ? Activation::relu : Activation::sigmoid;
}

}  // namespace

Activation check_gated_activation(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                  double alpha, std::optional<double> limit) {
  constexpr const char* op = "gated_activation";
  LB_CHECK_VALUE(gate.dim() >= 1, op,
                 "gate must have at least one dimension, got a scalar; pass gate.unsqueeze(0)");
  check_dtype(op, "gate", gate);
  check_same_dtype(op, "up", up, "gate", gate);
  check_same_device(op, "up", up, "gate", gate);
  check_same_shape(op, "up", up, "gate", gate);
  LB_CHECK_NO_GRAD(op, "gate", gate);
  LB_CHECK_NO_GRAD(op, "up", up);
  LB_CHECK_VALUE(!limit.has_value() || *limit >= 0.0, op, "limit must not be negative, got ", *limit,
                 "; pass None for no limit");
  return parse(op, activation, alpha);
}

Activation check_activation(const at::Tensor& x, c10::string_view activation, double alpha) {
  constexpr const char* op = "activation";
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  return parse(op, activation, alpha);
}

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
