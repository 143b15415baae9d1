#include "quantize_weight/quantize_weight_checks.h"

namespace liteboost {
namespace {

void check_weight(const char* op, const at::Tensor& weight, at::ScalarType scale_dtype) {
  check_dtype(op, "weight", weight);
  LB_CHECK_VALUE(weight.dim() == 2, op, "weight must have shape [out_features, in_features], got ",
                 weight.sym_sizes(), "; pass the matrix of a linear layer");
  LB_CHECK_TYPE(scale_dtype == at::kFloat || scale_dtype == at::kBFloat16 || scale_dtype == at::kHalf, op,
                "scale_dtype must be float32, bfloat16 or float16, got ", scale_dtype,
                "; choose one of them");
  LB_CHECK_NO_GRAD(op, "weight", weight);
}

}  // namespace

void check_quantize_w8(const at::Tensor& weight, at::ScalarType scale_dtype) {
  check_weight("quantize_w8", weight, scale_dtype);
}

void check_quantize_w4(const at::Tensor& weight, int64_t group_size, at::ScalarType scale_dtype) {
  constexpr const char* op = "quantize_w4";
  check_weight(op, weight, scale_dtype);
  LB_CHECK_VALUE(group_size > 0 && group_size % kPackedColumns == 0, op, "group_size must be a multiple of ",
                 kPackedColumns, ", got ", group_size, "; 32, 64 and 128 are usual");
  LB_CHECK_VALUE(weight.sym_size(1) % group_size == 0, op,
                 "weight must have a multiple of group_size columns, got ", weight.sym_sizes(),
                 " and groups of ", group_size,
                 "; choose smaller groups, or keep this layer in another format");
}

}  // namespace liteboost
