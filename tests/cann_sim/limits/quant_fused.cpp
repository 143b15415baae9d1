// What the norms and gated activations that quantize reject. Sources: ops-nn, norm/*_quant/docs/*.md,
// quant/{swi_glu,dequant_swiglu}_quant/docs.
#include "quantized.h"

using namespace sim;

static void sixteen_bits(const TensorHandle& x, const char* name) {
  if (is_310p()) require_dtype(x, name, {at::kHalf});
  require_dtype(x, name, kSixteenBits);
}
static void residual_norm(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& gamma,
                          const TensorHandle& x_out) {
  require_given(x1, "x1");
  require_given(x2, "x2");
  require_given(gamma, "gamma");
  require_given(x_out, "xOut");
  sixteen_bits(x1, is_310p() ? "x1 (310P)" : "x1");
  require_same_dtype(x2, "x2", x1, "x1");
  require_same_dtype(gamma, "gamma", x1, "x1");
  require_same_dtype(x_out, "xOut", x1, "x1");
  require_shape(x2, "x2", x1->sizes());
  require_shape(x_out, "xOut", x1->sizes());
  require_shape(gamma, "gamma", {x1->size(-1)});
  require(!is_310p() || x1->size(-1) * 2 >= 32, "on 310P the last axis must have at least 32 bytes, it has ",
          x1->size(-1) * 2);
}
static void static_scales(const TensorHandle& x1, const TensorHandle& scales, const TensorHandle& zero,
                          const char* name) {
  if (!scales) return;
  const bool half =
      x1->scalar_type() == at::kHalf;  // each type of x has one of scales and one of zero points
  require(scales->scalar_type() == (half ? kFloat32 : at::kBFloat16), name, " is ", scales->scalar_type(),
          " with ", x1->scalar_type(), " x1: Float with Half, BFloat16 with BFloat16");
  if (zero)
    require(zero->scalar_type() == (half ? kInt32 : at::kBFloat16), "zero points of ", name, " are ",
            zero->scalar_type(), " with ", x1->scalar_type(), " x1: Int with Half, BFloat16 with BFloat16");
  require(scales->numel() == x1->size(-1) || scales->numel() == 1, name, " has ", scales->numel(),
          " values, needed: ", x1->size(-1));
}
static void add_norm_quant(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& gamma,
                           const TensorHandle& scales1, const TensorHandle& scales2,
                           const TensorHandle& zero1, const TensorHandle& zero2, int64_t axis, bool divide,
                           const TensorHandle& y1, const TensorHandle& y2, const TensorHandle& x_out) {
  residual_norm(x1, x2, gamma, x_out);
  require_given(scales1, "scales1");
  require_given(y1, "y1Out");
  static_scales(x1, scales1, zero1, "scales1");
  static_scales(x1, scales2, zero2, "scales2");
  require(divide, "divMode must be true");
  require(axis == -1, "axis ", axis, ": only -1 is supported");
  require_dtype(y1, "y1Out", {kInt8});
  require_shape(y1, "y1Out", x1->sizes());
  if (scales2) require_shape(y2, "y2Out", x1->sizes());
}
LIMITS(aclnnAddRmsNormQuant, T, x1, T, x2, T, gamma, T, scales1, T, scales2, T, zero1, T, zero2, int64_t,
       axis, double, eps, bool, divide, O, y1, O, y2, O, x_out) {
  add_norm_quant(x1, x2, gamma, scales1, scales2, zero1, zero2, axis, divide, y1, y2, x_out);
}
LIMITS(aclnnAddRmsNormQuantV2, T, x1, T, x2, T, gamma, T, scales1, T, scales2, T, zero1, T, zero2, T, beta,
       int64_t, axis, double, eps, bool, divide, O, y1, O, y2, O, x_out, O, normed_out) {
  add_norm_quant(x1, x2, gamma, scales1, scales2, zero1, zero2, axis, divide, y1, y2, x_out);
  require_same_dtype(beta, "beta", x1, "x1");
  require_shape(beta, "beta", gamma->sizes());
}

static void row_quantized(const TensorHandle& x, const TensorHandle& gamma, const TensorHandle& smooth,
                          const TensorHandle& y, const TensorHandle& scale, bool valid, const char* name) {
  if (!valid) return;
  require_given(y, name);
  require_given(scale, "scaleOut");
  require_same_dtype(smooth, "smoothScale", x, "x");
  require_shape(smooth, "smoothScale", gamma->sizes());
  require_quantized_shape(y, name, x->sizes());
  require_dtype(scale, "scaleOut", {kFloat32});
  require(scale->numel() == row_count(x), "scaleOut has ", scale->numel(), " values for ", row_count(x),
          " rows");
}
LIMITS(aclnnAddRmsNormDynamicQuant, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, double, eps, O, y1, O, y2,
       O, x_out, O, scale1, O, scale2) {
  residual_norm(x1, x2, gamma, x_out);
  require_axes(x1, "x1", 2, 8);
  require(!smooth2 || smooth1, "smoothScale2 needs smoothScale1");
  require_dtype(y1, "y1Out", {kInt8});
  row_quantized(x1, gamma, smooth1, y1, scale1, true, "y1Out");
  row_quantized(x1, gamma, smooth2, y2, scale2, given(smooth2), "y2Out");
}
LIMITS(aclnnAddRmsNormDynamicQuantV2, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, T, beta, double, eps,
       BA, mask, O, y1, O, y2, O, x_out, O, scale1, O, scale2) {
  residual_norm(x1, x2, gamma, x_out);
  require_axes(x1, "x1", 2, 8);
  require_same_dtype(beta, "beta", x1, "x1");
  require_shape(beta, "beta", gamma->sizes());
  if (mask) {
    require(mask.size() == 2, "outputMask has ", mask.size(), " values, needed: 2");
    require(mask[0] || mask[1], "outputMask has both values false");
    require(!(smooth1 && !mask[0]) && !(smooth2 && !mask[1]),
            "a smoothScale is given whose outputMask is false");
  } else {
    require(!smooth2 || smooth1, "smoothScale2 needs smoothScale1");
  }
  const bool first = mask ? mask[0] : true, second = mask ? mask[1] : smooth1 && smooth2;
  if (first) require_dtype(y1, "y1Out", {kInt8, kInt32});
  if (second) require_dtype(y2, "y2Out", {kInt8, kInt32});
  if (first && second) require_same_dtype(y2, "y2Out", y1, "y1Out");
  row_quantized(x1, gamma, smooth1, y1, scale1, first, "y1Out");
  row_quantized(x1, gamma, smooth2, y2, scale2, second, "y2Out");
}

LIMITS(aclnnRmsNormQuant, T, x, T, gamma, T, beta, T, scale, T, offset, double, eps, O, y) {
  for (auto& [t, name] : Tensors{{x, "x"}, {gamma, "gamma"}, {beta, "beta"}, {scale, "scale"}}) {
    require_given(t, name);
    sixteen_bits(t, name);
    require_same_dtype(t, name, x, "x");
  }
  require_given(offset, "offset");
  require_given(y, "y");
  require_dtype(offset, "offset", {kInt8});
  require_dtype(y, "y", {kInt8, kInt32});
  require_quantized_shape(y, "y", x->sizes());
  for (auto& [t, name] : Tensors{{gamma, "gamma"}, {beta, "beta"}}) {
    require(t->numel() == x->size(-1) && (t->dim() == 1 || (t->dim() == 2 && t->size(0) == 1)), name,
            " has shape ", t->sizes(), ", needed: (n) or (1, n), n = ", x->size(-1));
  }
  require_shape(scale, "scale", {1});
  require_shape(offset, "offset", {1});
}
LIMITS(aclnnRmsNormDynamicQuant, T, x, T, gamma, T, smooth, T, beta, double, eps, int64_t, dst_type, O, y, O,
       scale) {
  require_given(x, "x");
  require_given(gamma, "gamma");
  require_dtype(x, "x", kSixteenBits);
  require_axes(x, "x", 2, 8);
  require_same_dtype(gamma, "gamma", x, "x");
  require_shape(gamma, "gamma", {x->size(-1)});
  require_same_dtype(beta, "beta", x, "x");
  require_shape(beta, "beta", gamma->sizes());
  require(x->size(-1) <= 8192, "the last axis of x is ", x->size(-1), ", at most 8192");
  require(dst_type == 2, "dstType ", dst_type, ": 2 (int8) is supported");
  require_dtype(y, "yOut", {kInt8});
  row_quantized(x, gamma, smooth, y, scale, true, "yOut");
}

// ---- gated activation ----------------------------------------------------------------------------------------
static void swiglu_quant(const TensorHandle& x, const TensorHandle& smooth, const TensorHandle& offsets,
                         const TensorHandle& groups, CP mode, const TensorHandle& y,
                         const TensorHandle& scale) {
  require_given(x, "x");
  require_given(y, "yOut");
  require_given(smooth, "smoothScales");
  require_dtype(x, "x", kFloats);
  require_axes(x, "x", 2, 8);
  require_contiguous(x, "x");
  require(x->size(-1) % 2 == 0, "the last axis of x is ", x->size(-1), ", it must be even");
  require(x->size(-1) <= 8192, "the last axis of x is ", x->size(-1), ", at most 8192");
  require_dtype(smooth, "smoothScales", {kFloat32});
  require_dtype(offsets, "offsets", {kFloat32});
  require_dtype(groups, "groupIndex", {kInt32});
  if (groups)
    require(groups->numel() <= row_count(x), groups->numel(), " groups for ", row_count(x), " rows");
  const std::string m = mode ? mode : "dynamic";
  require(m == "dynamic" || m == "static", "quantMode '", m, "': dynamic or static");
  if (m == "static") {
    require(given(offsets), "static quantization needs offsets");
    require_shape(offsets, "offsets", smooth->sizes());
  } else {
    require_given(scale, "scaleOut");
    require_dtype(scale, "scaleOut", {kFloat32});
    require_shape(scale, "scaleOut", rows_of(x));
  }
  auto shape = x->sizes().vec();
  shape.back() /= 2;
  require_dtype(y, "yOut", {kInt8});
  require_shape(y, "yOut", shape);
}
LIMITS(aclnnSwiGluQuant, T, x, T, smooth, T, offsets, T, groups, bool, activate_left, CP, mode, O, y, O,
       scale) {
  swiglu_quant(x, smooth, offsets, groups, mode, y, scale);
}
LIMITS(aclnnSwiGluQuantV2, T, x, T, smooth, T, offsets, T, groups, bool, activate_left, CP, mode, int64_t,
       group_list_type, int64_t, dst_type, O, y, O, scale) {
  swiglu_quant(x, smooth, offsets, groups, mode, y, scale);
  require(group_list_type == 0 || group_list_type == 1, "groupListType ", group_list_type, ": 0 or 1");
  require(dst_type == 2, "dstType ", dst_type, ": 2 (int8) is simulated");
}

LIMITS(aclnnDequantSwigluQuant, T, x, T, weight_scale, T, activation_scale, T, bias, T, quant_scale, T,
       quant_offset, T, groups, bool, activate_left, CP, mode, O, y, O, scale) {
  require_given(x, "x");
  require_given(y, "yOut");
  require_given(scale, "scaleOut");
  require_dtype(x, "x", {at::kHalf, at::kBFloat16, kInt32});
  require_axes(x, "x", 2, 8);
  require(x->size(-1) % 2 == 0, "the last axis of x is ", x->size(-1), ", it must be even");
  const std::string m = mode ? mode : "";
  require(m == "dynamic" || m == "static", "quantMode '", m, "': dynamic or static");
  require(m == "dynamic" || !groups, "groupIndex needs dynamic quantization");
  const bool integers = x->scalar_type() == kInt32;
  require(integers == given(weight_scale), "weightScale must be given with int32 x and only then");
  require(integers || (!activation_scale && !bias), "activationScale and bias need int32 x");
  require_dtype(weight_scale, "weightScale", {kFloat32});
  require_dtype(activation_scale, "activationScale", {kFloat32});
  if (activation_scale)
    require(activation_scale->numel() == row_count(x), "activationScale has ", activation_scale->numel(),
            " values for ", row_count(x), " rows");
  require_dtype(quant_scale, "quantScale", {kFloat32});
  require_dtype(groups, "groupIndex", {kInt32, at::kLong});
  const int64_t n = x->size(-1), g = groups ? groups->numel() : 1;
  auto table = [&](const TensorHandle& t, const char* name, int64_t columns) {
    if (t)
      require(t->numel() == g * columns && t->size(-1) == columns, name, " has shape ", t->sizes(),
              ", needed: (", groups ? text_of(g, ", ") : "", columns, ")");
  };
  table(weight_scale, "weightScale", n);
  table(bias, "bias", n);
  if (m == "static") {
    if (quant_scale)
      require(quant_scale->numel() == 1, "static quantScale has ", quant_scale->numel(),
              " values, needed: 1");
    if (quant_offset)
      require(quant_offset->numel() == 1, "static quantOffset has ", quant_offset->numel(),
              " values, needed: 1");
  } else {
    table(quant_scale, "quantScale", n / 2);
  }
  require_dtype(quant_offset, "quantOffset", {kFloat32});
  require_dtype(y, "yOut", {kInt8});
  require(scale->numel() == row_count(x), "scaleOut has ", scale->numel(), " values for ", row_count(x),
          " rows");
}
