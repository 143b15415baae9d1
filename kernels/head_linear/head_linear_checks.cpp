#include "head_linear/head_linear_checks.h"

namespace liteboost {

void check_head_linear(const at::Tensor& x, const at::Tensor& weight) {
  constexpr const char* op = "head_linear";
  const auto given = x.sym_sizes(), of_weight = weight.sym_sizes();
  LB_CHECK_VALUE(given.size() == 4, op, "x must have shape [batch, num_heads, rows, in_features], got ",
                 given, "; reshape it");
  LB_CHECK_VALUE(of_weight.size() == 3, op,
                 "weight must have shape [num_heads, out_features, in_features], got ", of_weight,
                 "; give it a dimension for the heads");
  check_dtype(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_same_device(op, "weight", weight, "x", x);
  LB_CHECK_VALUE(of_weight[0] == given[1] && of_weight[2] == given[3], op,
                 "weight must have the num_heads and in_features of x = [", given[1], ", ", given[3],
                 "], got [", of_weight[0], ", ", of_weight[2], "]; pass a weight for each head of x");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "weight", weight);
}

}  // namespace liteboost
