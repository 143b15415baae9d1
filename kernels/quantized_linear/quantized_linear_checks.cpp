#include "quantized_linear/quantized_linear_checks.h"

#include "quantized_linear/quantized_linear.h"

namespace liteboost {
namespace {

// What w8 and w4 have in common; `width` is how many columns the weight has.
void check_layer(const char* op, const at::Tensor& x, const at::Tensor& weight, const c10::SymInt& width,
                 const at::Tensor& scales, const std::optional<at::Tensor>& bias) {
  check_dtype(op, "x", x);
  check_dtype(op, "scales", scales);
  check_same_device(op, "weight", weight, "x", x);
  check_same_device(op, "scales", scales, "x", x);
  LB_CHECK_VALUE(x.sym_size(-1) == width, op,
                 "x must have shape [..., in_features] with in_features = ", width, " as weight ",
                 weight.sym_sizes(), " has, got ", x.sym_sizes(),
                 "; pass the weight of this layer, packed for this op");
  LB_CHECK_NO_GRAD(op, "x", x);
  LB_CHECK_NO_GRAD(op, "scales", scales);
  if (!bias.has_value()) return;
  check_same_dtype(op, "bias", *bias, "x", x);
  check_same_device(op, "bias", *bias, "x", x);
  check_vector(op, "bias", *bias, weight.sym_size(0), "out_features");
  LB_CHECK_NO_GRAD(op, "bias", *bias);
}

void check_matrix(const char* op, const at::Tensor& x, const at::Tensor& weight, at::ScalarType dtype,
                  const char* dtype_name, const char* shape) {
  LB_CHECK_VALUE(x.dim() >= 1, op, "x must have shape [..., in_features], got a scalar; add a dimension");
  LB_CHECK_TYPE(weight.scalar_type() == dtype, op, "weight must be ", dtype_name, ", got ",
                weight.scalar_type(), "; quantise it with liteboost_adaptor.quantization");
  LB_CHECK_VALUE(weight.dim() == 2, op, "weight must have shape ", shape, ", got ", weight.sym_sizes(),
                 "; quantise it with liteboost_adaptor.quantization");
}

}  // namespace

void check_linear_w8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                     const std::optional<at::Tensor>& bias) {
  constexpr const char* op = "linear_w8";
  check_matrix(op, x, weight, at::kChar, "int8", "[out_features, in_features]");
  check_layer(op, x, weight, weight.sym_size(1), scales, bias);
  check_vector(op, "scales", scales, weight.sym_size(0), "out_features");
}

void check_linear_w4(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                     const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias) {
  constexpr const char* op = "linear_w4";
  check_matrix(op, x, weight, at::kByte, "uint8", "[out_features, in_features / 2]");
  const c10::SymInt width = weight.sym_size(1) * 2;
  LB_CHECK_VALUE(width % kPack == 0, op,
                 "weight must have shape [out_features, in_features / 2] with in_features a "
                 "multiple of ",
                 kPack, ", got ", weight.sym_sizes(), "; keep this layer in another format");
  check_layer(op, x, weight, width, scales, bias);
  const bool is_grouped = scales.dim() == 2 && scales.sym_size(0) == weight.sym_size(0) &&
                          scales.sym_size(1) > 0 && width % (scales.sym_size(1) * kPack) == 0;
  LB_CHECK_VALUE(is_grouped, op, "scales must have shape [out_features, groups], groups of ", kPack,
                 " columns or a multiple of it, for weight ", weight.sym_sizes(), ", got ",
                 scales.sym_sizes(), "; pass the scales of this layer");
  if (!zero_points.has_value()) return;
  LB_CHECK_TYPE(zero_points->scalar_type() == at::kByte, op, "zero_points must be uint8, got ",
                zero_points->scalar_type(), "; convert them");
  check_same_device(op, "zero_points", *zero_points, "x", x);
  check_same_shape(op, "zero_points", *zero_points, "scales", scales);
}

}  // namespace liteboost
