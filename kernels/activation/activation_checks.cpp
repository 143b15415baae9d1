#include "activation/activation_checks.h"

namespace liteboost {

Activation parse_activation(const char* op, c10::string_view activation, double alpha) {
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
  return parse_activation(op, activation, alpha);
}

Activation check_activation(const at::Tensor& x, c10::string_view activation, double alpha) {
  constexpr const char* op = "activation";
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  return parse_activation(op, activation, alpha);
}

}  // namespace liteboost
