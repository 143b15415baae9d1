#include "linear/linear_checks.h"

namespace liteboost {

void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  constexpr const char* op = "linear";
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  LB_CHECK_VALUE(weight.dim() == 2, op, "weight must have shape [out_features, in_features], got ",
                 weight.sym_sizes(), "; pass it as nn.Linear stores it");
  check_dtype(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_same_device(op, "weight", weight, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == weight.sym_size(1), op,
                 "x must have shape [..., in_features] with in_features = ", weight.sym_size(1),
                 " as weight ", weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the weight of this layer, not transposed");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "weight", weight);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  LB_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op,
                 "bias must have shape [out_features] = [", weight.sym_size(0), "], got ", bias->sym_sizes(),
                 "; pass the bias of this layer");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

}  // namespace liteboost
