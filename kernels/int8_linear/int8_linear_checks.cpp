#include "int8_linear/int8_linear_checks.h"

#include "int8_linear/int8_linear.h"

namespace liteboost {

void check_linear_w8a8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias) {
  constexpr const char* op = "linear_w8a8";
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  LB_CHECK_TYPE(weight.scalar_type() == at::kChar, op, "weight must be int8, got ", weight.scalar_type(),
                "; quantize it with liteboost_adaptor.quantization");
  LB_CHECK_VALUE(weight.dim() == 2, op, "weight must have shape [out_features, in_features], got ",
                 weight.sym_sizes(), "; quantize it with liteboost_adaptor.quantization");
  check_dtype(op, "x", x);
  check_dtype(op, "scales", scales);
  check_same_device(op, "weight", weight, "x", x);
  check_same_device(op, "scales", scales, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == weight.sym_size(1), op,
                 "x must have shape [..., in_features] with in_features = ", weight.sym_size(1),
                 " as weight ", weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the weight of this layer");
  LB_CHECK_VALUE(weight.sym_size(1) <= kInt8Columns, op, "weight must have at most ", kInt8Columns,
                 " columns, whose products fit 32 bits, got ", weight.sym_sizes(),
                 "; keep this layer in another format");
  check_vector(op, "scales", scales, weight.sym_size(0), "out_features");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "scales", scales);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  check_vector(op, "bias", *bias, weight.sym_size(0), "out_features");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

void check_linears_w8a8(const at::Tensor& x, at::TensorList weights, at::TensorList scales,
                        const OptionalTensors& biases) {
  const size_t count = weights.size();
  LB_CHECK_VALUE(count > 0 && scales.size() == count && biases.size() == count, "_linears_w8a8",
                 "all lists must have one element for each layer, at least one, got ", count, " weights, ",
                 scales.size(), " scales, ", biases.size(), " biases; pass None for what a layer lacks");
  for (size_t i = 0; i < count; ++i) check_linear_w8a8(x, weights[i], scales[i], biases.get(i));
}

}  // namespace liteboost
