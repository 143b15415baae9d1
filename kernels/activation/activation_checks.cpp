#include "activation/activation_checks.h"

namespace liteboost {

const char* activation_name(Activation activation) {
  switch (activation) {
    case Activation::silu:
      return "silu";
    case Activation::gelu:
      return "gelu";
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::relu:
      return "relu";
    case Activation::relu2:
      return "relu2";
    case Activation::sigmoid:
      return "sigmoid";
  }
  __builtin_unreachable();
}

Activation parse_activation(const char* op, c10::string_view activation, double alpha) {
  for (const Activation each : kActivations) {
    if (activation != activation_name(each)) continue;
    LB_CHECK_VALUE(each == Activation::silu || alpha == 1.0, op,
                   "alpha must be 1 unless activation is 'silu', got alpha = ", alpha, " with activation '",
                   activation, "'; leave alpha out");
    return each;
  }
  std::string names;
  for (const Activation each : kActivations)
    names += (names.empty() ? "" : ", ") + std::string(activation_name(each));
  LB_CHECK_VALUE(false, op, "activation must be one of ", names, ", got '", activation,
                 "'; pass one of these");
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
