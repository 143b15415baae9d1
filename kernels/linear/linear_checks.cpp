#include "linear/linear_checks.h"

#include "activation/activation_checks.h"

namespace liteboost {
namespace {

// A weight and its bias, under the names they have as arguments, against x.
void check_layer(const char* op, const at::Tensor& x, const char* weight_name, const at::Tensor& weight,
                 const char* bias_name, const std::optional<at::Tensor>& bias) {
  LB_CHECK_VALUE(weight.dim() == 2, op, weight_name, " must have shape [out_features, in_features], got ",
                 weight.sym_sizes(), "; pass it as nn.Linear stores it");
  check_same_dtype(op, weight_name, weight, "x", x);
  check_same_device(op, weight_name, weight, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == weight.sym_size(1), op,
                 "x must have shape [..., in_features] with in_features = ", weight.sym_size(1), " as ",
                 weight_name, " ", weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the weight of this layer, not transposed");
  LB_CHECK_NO_GRAD(op, weight_name, weight);
  if (!bias.has_value()) return;
  check_same_dtype(op, bias_name, *bias, "x", x);
  check_same_device(op, bias_name, *bias, "x", x);
  LB_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, bias_name,
                 " must have shape [out_features] = [", weight.sym_size(0), "], got ", bias->sym_sizes(),
                 "; pass the bias of this layer");
  LB_CHECK_NO_GRAD(op, bias_name, *bias);
}

void check_x(const char* op, const at::Tensor& x) {
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  check_dtype(op, "x", x);
  LB_CHECK_NO_GRAD(op, "x", x);
}

}  // namespace

void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_x("linear", x);
  check_layer("linear", x, "weight", weight, "bias", bias);
}

void check_linears(const at::Tensor& x, at::TensorList weights, const OptionalTensors& biases) {
  LB_CHECK_VALUE(!weights.empty() && biases.size() == weights.size(), "_linears",
                 "all lists must have one element for each layer, at least one, got ", weights.size(),
                 " weights, ", biases.size(), " biases; pass None for what a layer lacks");
  for (size_t i = 0; i < weights.size(); ++i) check_linear(x, weights[i], biases.get(i));
}

Activation check_gated_linear(const at::Tensor& x, const at::Tensor& gate_weight,
                              const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                              const std::optional<at::Tensor>& up_bias, c10::string_view activation,
                              double alpha) {
  constexpr const char* op = "gated_linear";
  check_x(op, x);
  check_layer(op, x, "gate_weight", gate_weight, "gate_bias", gate_bias);
  check_layer(op, x, "up_weight", up_weight, "up_bias", up_bias);
  LB_CHECK_VALUE(gate_weight.sym_size(0) == up_weight.sym_size(0), op,
                 "up_weight must have out_features = ", gate_weight.sym_size(0), " as gate_weight ",
                 gate_weight.sym_sizes(), " has, got ", up_weight.sym_sizes(),
                 "; pass the two layers of one gated MLP");
  return parse_activation(op, activation, alpha);
}

}  // namespace liteboost
