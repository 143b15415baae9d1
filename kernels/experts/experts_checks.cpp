#include "experts/experts_checks.h"

namespace liteboost {

void check_experts_linear(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const at::Tensor& index) {
  constexpr const char* op = "experts_linear";
  LB_CHECK_VALUE(weight.dim() == 3, op, "weight must have shape [experts, out_features, in_features], got ",
                 weight.sym_sizes(), "; stack the weights of the experts");
  LB_CHECK_VALUE(index.dim() == 2, op, "index must have shape [tokens, slots], got ", index.sym_sizes(),
                 "; flatten batch and length");
  LB_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op,
                 "x must have shape [tokens, in_features] or [tokens, slots, in_features], got ",
                 x.sym_sizes(), "; flatten batch and length");
  check_dtype(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  LB_CHECK_TYPE(index.scalar_type() == at::kLong, op, "index must be int64, got ", index.scalar_type(),
                "; convert it");
  check_same_device(op, "weight", weight, "x", x);
  check_same_device(op, "index", index, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == weight.sym_size(2), op, "x must have in_features = ", weight.sym_size(2),
                 " last, as weight ", weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass a weight stored as [experts, in_features, out_features] transposed");
  LB_CHECK_VALUE(x.sym_size(0) == index.sym_size(0), op, "x must have tokens = ", index.sym_size(0),
                 " first, as index ", index.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the index of these tokens");
  LB_CHECK_VALUE(x.dim() == 2 || x.sym_size(1) == index.sym_size(1), op,
                 "x must have slots = ", index.sym_size(1), " second, as index ", index.sym_sizes(),
                 " has, got ", x.sym_sizes(), "; pass the index of these tokens");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "weight", weight);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  LB_CHECK_VALUE(
      bias->dim() == 2 && bias->sym_size(0) == weight.sym_size(0) && bias->sym_size(1) == weight.sym_size(1),
      op, "bias must have shape [experts, out_features] = [", weight.sym_size(0), ", ", weight.sym_size(1),
      "], got ", bias->sym_sizes(), "; pass the biases of these experts");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

void check_experts_combine(const at::Tensor& y, const at::Tensor& scores) {
  constexpr const char* op = "experts_combine";
  LB_CHECK_VALUE(y.dim() == 3, op, "y must have shape [tokens, slots, features], got ", y.sym_sizes(),
                 "; pass the result of experts_linear");
  check_dtype(op, "y", y);
  check_same_dtype(op, "scores", scores, "y", y, /*or_float32=*/true);
  check_same_device(op, "scores", scores, "y", y);
  LB_CHECK_VALUE(
      scores.dim() == 2 && scores.sym_size(0) == y.sym_size(0) && scores.sym_size(1) == y.sym_size(1), op,
      "scores must have shape [tokens, slots] = [", y.sym_size(0), ", ", y.sym_size(1), "], got ",
      scores.sym_sizes(), "; pass one weight a slot");
  LB_CHECK_NO_GRAD(op, "y", y);
  LB_CHECK_NO_GRAD(op, "scores", scores);
}

}  // namespace liteboost
