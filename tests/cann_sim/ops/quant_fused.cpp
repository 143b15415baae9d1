// Norms and gated activations that end in a quantization.
// Formulas: CANN operator documentation (ops-nn, norm/*_quant/docs/*.md, quant/{swi_glu,dequant_swiglu}_quant/docs).
#include "quantize.h"

using namespace sim;
using at::Tensor;

// ---- norm --------------------------------------------------------------------------------------------------
static Tensor rms_norm(const Tensor& x, const TensorHandle& gamma, const TensorHandle& beta, double eps) {
  auto xf = fp32(x);
  auto y = xf * at::rsqrt((xf * xf).mean(-1, true) + eps) * fp32(*gamma);
  return beta ? y + fp32(*beta) : y;
}
// The sum is rounded to the inputs' type before it is normalised: xOut holds what the norm saw.
static Tensor residual_sum(const TensorHandle& a, const TensorHandle& b) {
  return (fp32(*a) + fp32(*b)).to(a->scalar_type());
}

// Static: y = round(normed / scale + zero point), or with divMode false normed * scale.
static void static_quant(const Tensor& normed, const TensorHandle& scale, const TensorHandle& zero,
                         bool divide, const TensorHandle& y) {
  auto v = divide ? normed / fp32(*scale) : normed * fp32(*scale);
  put_quantized(y, zero ? v + fp32(*zero) : v);
}
// Dynamic, per row: scale = max|v| / max of the type, y = round(v / scale).
static void row_quant(const Tensor& normed, const TensorHandle& smooth, const TensorHandle& y,
                      const TensorHandle& scale) {
  auto v = smooth ? normed * fp32(*smooth) : normed;
  auto s = v.abs().amax(-1, true) / (output_bits(*y) == 4 ? 7 : 127);
  put_quantized(y, v / s);
  put(scale, s);
}

static void add_norm_quant(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& gamma,
                           const TensorHandle& beta, const TensorHandle& scales1, const TensorHandle& scales2,
                           const TensorHandle& zero1, const TensorHandle& zero2, double eps, bool divide,
                           const TensorHandle& y1, const TensorHandle& y2, const TensorHandle& x_out,
                           const TensorHandle& normed_out) {
  auto x = residual_sum(x1, x2);
  auto normed = rms_norm(x, gamma, beta, eps);
  static_quant(normed, scales1, zero1, divide, y1);
  if (scales2) static_quant(normed, scales2, zero2, divide, y2);
  put(x_out, x);
  put(normed_out, normed);
}
OP(aclnnAddRmsNormQuant, T, x1, T, x2, T, gamma, T, scales1, T, scales2, T, zero1, T, zero2, int64_t, axis,
   double, eps, bool, divide, O, y1, O, y2, O, x_out) {
  add_norm_quant(x1, x2, gamma, T{}, scales1, scales2, zero1, zero2, eps, divide, y1, y2, x_out, O{});
}
OP(aclnnAddRmsNormQuantV2, T, x1, T, x2, T, gamma, T, scales1, T, scales2, T, zero1, T, zero2, T, beta,
   int64_t, axis, double, eps, bool, divide, O, y1, O, y2, O, x_out, O, normed_out) {
  add_norm_quant(x1, x2, gamma, beta, scales1, scales2, zero1, zero2, eps, divide, y1, y2, x_out, normed_out);
}

static void add_norm_row_quant(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& gamma,
                               const TensorHandle& smooth1, const TensorHandle& smooth2,
                               const TensorHandle& beta, double eps, bool first, bool second,
                               const TensorHandle& y1, const TensorHandle& y2, const TensorHandle& x_out,
                               const TensorHandle& scale1, const TensorHandle& scale2) {
  auto x = residual_sum(x1, x2);
  auto normed = rms_norm(x, gamma, beta, eps);
  if (first) row_quant(normed, smooth1, y1, scale1);
  if (second) row_quant(normed, smooth2, y2, scale2);
  put(x_out, x);
}
OP(aclnnAddRmsNormDynamicQuant, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, double, eps, O, y1, O, y2, O,
   x_out, O, scale1, O, scale2) {
  add_norm_row_quant(x1, x2, gamma, smooth1, smooth2, T{}, eps, true, smooth1 && smooth2, y1, y2, x_out,
                     scale1, scale2);
}
// Without a mask the second output is valid when both smoothing scales are given.
OP(aclnnAddRmsNormDynamicQuantV2, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, T, beta, double, eps, BA,
   mask, O, y1, O, y2, O, x_out, O, scale1, O, scale2) {
  const bool first = mask ? mask[0] : true, second = mask ? mask[1] : smooth1 && smooth2;
  add_norm_row_quant(x1, x2, gamma, smooth1, smooth2, beta, eps, first, second, y1, y2, x_out, scale1,
                     scale2);
}

OP(aclnnRmsNormQuant, T, x, T, gamma, T, beta, T, scale, T, offset, double, eps, O, y) {
  static_quant(rms_norm(*x, gamma, beta, eps), scale, offset, true, y);  // NaN becomes 0, as documented
}
OP(aclnnRmsNormDynamicQuant, T, x, T, gamma, T, smooth, T, beta, double, eps, int64_t, dst_type, O, y, O,
   scale) {
  row_quant(rms_norm(*x, gamma, beta, eps), smooth, y, scale);
}

// ---- gated activation ----------------------------------------------------------------------------------------
static Tensor gated(const Tensor& x, bool activate_left) {
  auto halves = x.chunk(2, -1);
  return at::silu(halves[activate_left ? 0 : 1]) * halves[activate_left ? 1 : 0];
}
static int64_t row_count(const Tensor& x) { return x.numel() / x.size(-1); }
static Tensor group_ends(const Tensor& groups, bool counts) {
  auto g = groups.to(at::kLong);
  return counts ? g.cumsum(0) : g;
}

// Dynamic: the scale written is 127 / max|v|, the factor v was multiplied by (the other operators write its
// inverse). Static: y = round(v * smooth + offset), scale is not written.
static void swiglu_quant(const TensorHandle& x, const TensorHandle& smooth, const TensorHandle& offsets,
                         const TensorHandle& groups, bool counts, bool activate_left, CP mode,
                         const TensorHandle& y, const TensorHandle& scale) {
  auto v = gated(fp32(*x), activate_left).reshape({row_count(*x), -1});
  auto rows = [&](const TensorHandle& table, double filler) {
    auto t = fp32(*table);
    if (t.dim() == 1) t = t.unsqueeze(-1);
    if (!groups) return t[0].expand({v.size(0), t.size(-1)});
    return rows_by_group(t, group_ends(*groups, counts), v.size(0), filler);
  };
  if (smooth) v = v * rows(smooth, 1);
  if (mode && std::string(mode) == "static") {
    put_quantized(y, offsets ? v + rows(offsets, 0) : v);
    return;
  }
  auto s = 127.0 / v.abs().amax(-1, true);
  put_quantized(y, v * s);
  put(scale, s);
}
OP(aclnnSwiGluQuant, T, x, T, smooth, T, offsets, T, groups, bool, activate_left, CP, mode, O, y, O, scale) {
  swiglu_quant(x, smooth, offsets, groups, false, activate_left, mode, y, scale);
}
OP(aclnnSwiGluQuantV2, T, x, T, smooth, T, offsets, T, groups, bool, activate_left, CP, mode, int64_t,
   group_list_type, int64_t, dst_type, O, y, O, scale) {
  swiglu_quant(x, smooth, offsets, groups, group_list_type == 1, activate_left, mode, y, scale);
}

// An int32 bias is added before the scales, another one after them. Groups are counts of rows.
OP(aclnnDequantSwigluQuant, T, x, T, weight_scale, T, activation_scale, T, bias, T, quant_scale, T,
   quant_offset, T, groups, bool, activate_left, CP, mode, O, y, O, scale) {
  auto v = fp32(*x).reshape({row_count(*x), -1});
  const int64_t rows = v.size(0);
  auto by_row = [&](const TensorHandle& table) {
    if (!groups) return fp32(*table);
    return rows_by_group(fp32(*table), group_ends(*groups, true), rows, 1);
  };
  const bool integer_bias = bias && bias->scalar_type() == at::kInt;
  if (integer_bias) v = v + by_row(bias);
  if (weight_scale) v = v * by_row(weight_scale);
  if (activation_scale) v = v * fp32(*activation_scale).reshape({rows, 1});
  if (bias && !integer_bias) v = v + by_row(bias);
  v = gated(v, activate_left);
  if (std::string(mode) == "static") {  // divides by its scale, the dynamic mode multiplies
    if (quant_scale) v = v / fp32(*quant_scale);
    put_quantized(y, quant_offset ? v + fp32(*quant_offset) : v);
    return;
  }
  if (quant_scale) v = v * by_row(quant_scale);
  auto s = v.abs().amax(-1, true) / 127;
  put_quantized(y, v / s);
  put(scale, s);
}
