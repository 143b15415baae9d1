#include "norm/norm_checks.h"

namespace liteboost {
namespace {

void check_input(const char* op, const at::Tensor& x, double eps) {
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have at least one dimension, got a scalar; pass x.unsqueeze(0)");
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_VALUE(eps >= 0.0, op, "eps must not be negative, got ", eps, "; pass the norm's own eps");
}

// in_groups: also a parameter for each group of channels, where x is [..., groups, hidden_size].
void check_parameter(const char* op, const char* argument, const at::Tensor& x, const at::Tensor& parameter,
                     bool in_groups = false) {
  if (in_groups && parameter.dim() == 2) {
    LB_CHECK_VALUE(x.dim() >= 2 && parameter.sym_sizes() == x.sym_sizes().slice(x.dim() - 2), op, argument,
                   " must have shape [groups, hidden_size] = the last two of x = ", x.sym_sizes(), ", got ",
                   parameter.sym_sizes(), "; pass [hidden_size] for one ", argument, " in all groups");
  } else {
    check_vector(op, argument, parameter, x.sym_size(-1), "hidden_size");
  }
  check_same_dtype(op, argument, parameter, "x", x, /*or_float32=*/true);
  check_same_device(op, argument, parameter, "x", x);
  LB_CHECK_NO_GRAD(op, argument, parameter);
}

void check_like_x(const char* op, const char* argument, const at::Tensor& x, const at::Tensor& other) {
  check_same_dtype(op, argument, other, "x", x);
  check_same_device(op, argument, other, "x", x);
  check_same_shape(op, argument, other, "x", x);
  LB_CHECK_NO_GRAD(op, argument, other);
}

bool given(const std::optional<at::Tensor>& tensor) { return tensor.has_value() && tensor->defined(); }

}  // namespace

void check_rms_norm(const char* op, const at::Tensor& x, const std::optional<at::Tensor>& weight,
                    double eps) {
  check_input(op, x, eps);
  if (given(weight)) check_parameter(op, "weight", x, *weight, /*in_groups=*/true);
}

void check_inverse_rms(const at::Tensor& x, double eps) { check_input("inverse_rms", x, eps); }

void check_residual(const at::Tensor& x, const at::Tensor& residual) {
  check_like_x("add_rms_norm", "residual", x, residual);
}

NormGate check_gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps, c10::string_view activation, bool gate_first, int64_t group_size) {
  constexpr const char* op = "gated_rms_norm";
  check_input(op, x, eps);
  check_like_x(op, "gate", x, gate);
  check_parameter(op, "weight", x, weight);
  LB_CHECK_VALUE(group_size == 0 || gate_first, op, "group_size must be 0 unless gate_first is True, got ",
                 group_size, "; pass 0, or x and gate as [..., groups, group_size]");
  LB_CHECK_VALUE(group_size == 0 || (group_size > 0 && x.sym_size(-1) % group_size == 0), op,
                 "group_size must divide hidden_size = ", x.sym_size(-1), ", got ", group_size,
                 "; pass 0 for one group");
  if (activation == "silu") return NormGate::silu;
  LB_CHECK_VALUE(activation == "sigmoid", op, "activation must be silu or sigmoid, got '", activation,
                 "'; use the plain PyTorch code for other gates");
  return NormGate::sigmoid;
}

void check_layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps) {
  constexpr const char* op = "layer_norm";
  check_input(op, x, eps);
  if (given(weight)) check_parameter(op, "weight", x, *weight);
  if (given(bias)) check_parameter(op, "bias", x, *bias);
  if (given(weight) && given(bias)) check_same_dtype(op, "bias", *bias, "weight", *weight);
}

}  // namespace liteboost
