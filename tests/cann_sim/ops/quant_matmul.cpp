// Matrix products with quantized operands.
// Formulas: CANN operator documentation (ops-nn, matmul/{weight_quant_batch_matmul_v2,quant_batch_matmul_v3,
// quant_batch_matmul_v4}/docs/*.md).
#include "quantize.h"

using namespace sim;
using at::Tensor;

// ---- 16-bit activations, 8- or 4-bit weights ---------------------------------------------------------------
// (weight + offset) * scale; scale (1), (n) or (1, n), or (ceil(k / group), n) with a group size. The vector unit writes
// it in the activations' 16-bit type, which is what the cube unit multiplies.
static Tensor dequantized_weight(const Tensor& weight, const Tensor& scale, const Tensor& offset,
                                 int64_t group, at::ScalarType dtype) {
  auto rows = [&](const Tensor& t) {
    auto f = fp32(t);
    return group > 0 ? f.repeat_interleave(group, 0).slice(0, 0, weight.size(0)) : f;
  };
  auto w = weight.to(at::kFloat);
  if (offset.defined()) w = w + rows(offset);
  return (w * rows(scale)).to(dtype);
}

static void weight_quant_matmul(const TensorHandle& x, const TensorHandle& weight, const TensorHandle& scale,
                                const TensorHandle& offset, const TensorHandle& quant_scale,
                                const TensorHandle& bias, int64_t group, const TensorHandle& y) {
  auto w = integers(values_of(weight));
  Tensor s = *scale, o = offset.orundef(), product;
  if (soc() == Soc::ascend310p) {
    // 310P: an NZ weight has the shape (n, k) and group scales (n, groups); scales of channels may be (n, 1).
    auto turned = [&](const Tensor& t) {
      return t.dim() == 2 && (is_nz(weight) || t.size(1) == 1) ? t.t() : t;
    };
    if (is_nz(weight)) w = w.transpose(-1, -2);
    s = turned(s);
    if (o.defined()) o = turned(o);
  }
  if (hardware_scale(*scale)) {  // scale applied by the store, after the product
    auto integer = o.defined() ? w.to(at::kFloat) + fp32(o) : w.to(at::kFloat);
    product = at::matmul(fp32(*x), integer) * decode_scale(s).first;
  } else {
    auto w16 = dequantized_weight(w, s, o, group, x->scalar_type());
    product = at::matmul(fp32(*x), fp32(w16));
  }
  if (bias) product = product + fp32(*bias);
  if (!quant_scale) return put(y, product);
  auto [factor, shift] = decode_scale(*quant_scale);
  put(y, quantize(product * factor + shift));
}

OP(aclnnWeightQuantBatchMatmulV2, T, x, T, weight, T, scale, T, offset, T, quant_scale, T, quant_offset, T,
   bias, int, group, O, y) {
  weight_quant_matmul(x, weight, scale, offset, quant_scale, bias, group, y);
}
OP(aclnnWeightQuantBatchMatmulV3, T, x, T, weight, T, scale, T, offset, T, quant_scale, T, quant_offset, T,
   bias, int, group, int, inner_precise, O, y) {
  weight_quant_matmul(x, weight, scale, offset, quant_scale, bias, group, y);
}

// ---- both operands quantized ---------------------------------------------------------------------------------
struct QuantMatmul {
  Tensor x1, x2, x1_scale, x2_scale, x2_offset, y_offset, bias;
  int64_t group;
};

// An empty tensor counts as absent.
static bool given(const Tensor& t) { return t.defined() && t.numel() > 0; }
static Tensor column(const Tensor& t) { return t.dim() == 1 ? fp32(t).unsqueeze(-1) : fp32(t); }
static int64_t group_k(int64_t packed) { return packed & 0xFFFF; }
static int64_t group_n(int64_t packed) { return packed >> 16 & 0xFFFF; }

// 8-bit activations, 4-bit weights: the cube unit multiplies (x1 - 8) and the caller passes
// yOffset = sum over k of 8 * x2 * x2Scale, which makes up for it.
static Tensor a8w4(const QuantMatmul& m) {
  auto scale = decode_scale(m.x2_scale).first;
  auto rows = scale.dim() == 2 ? scale.repeat_interleave(m.x2.size(-2) / scale.size(0), 0) : scale;
  auto product = at::matmul(m.x1.to(at::kFloat) - 8, m.x2.to(at::kFloat) * rows);
  return (product + fp32(m.y_offset)) * column(m.x1_scale);
}

// Scales by blocks of k (and n): each block's integer product is scaled before the sum over blocks.
static Tensor by_blocks(const QuantMatmul& m) {
  const int64_t gk = group_k(m.group), gn = std::max<int64_t>(group_n(m.group), 1), k = m.x1.size(-1);
  auto s1 = column(m.x1_scale), s2 = fp32(m.x2_scale);
  Tensor sum;
  for (int64_t j = 0; j * gk < k; j++) {
    auto a = m.x1.slice(-1, j * gk, (j + 1) * gk), b = m.x2.slice(-2, j * gk, (j + 1) * gk);
    auto product = integer_product(a, b);
    if (given(m.x2_offset)) {  // asymmetric weights: x1 @ (x2 - offset)
      product = product - a.to(at::kDouble).sum(-1, true) * m.x2_offset[j].to(at::kDouble);
    }
    auto n_scale = s2[j].repeat_interleave(gn).slice(0, 0, m.x2.size(-1));
    auto part = product.to(at::kFloat) * n_scale * (s1.size(-1) == 1 ? s1 : s1.select(-1, j).unsqueeze(-1));
    sum = sum.defined() ? sum + part : part;
  }
  return given(m.bias) ? sum + fp32(m.bias) : sum;
}

static void quant_matmul(QuantMatmul m, bool transpose1, bool transpose2, const TensorHandle& out) {
  const bool a8w4_case = m.x1.scalar_type() == at::kChar && m.x2.scalar_type() == at::kInt;
  m.x1 = integers(m.x1);
  m.x2 = integers(m.x2);
  if (transpose1) m.x1 = m.x1.transpose(-1, -2);
  if (transpose2) m.x2 = m.x2.transpose(-1, -2);
  if (a8w4_case) return put(out, a8w4(m));
  if (group_k(m.group) > 0) {
    if (transpose2 && group_n(m.group) > 1) m.x2_scale = m.x2_scale.transpose(-1, -2);
    return put(out, by_blocks(m));
  }
  auto accumulator = integer_product(m.x1, m.x2);
  const bool integer_bias = given(m.bias) && m.bias.scalar_type() == at::kInt;
  if (integer_bias) accumulator = accumulator + m.bias.to(at::kDouble);
  if (out->scalar_type() == at::kInt) return put(out, accumulator);  // no scale takes part
  auto value = accumulator.to(at::kFloat);
  Tensor offset;
  if (hardware_scale(m.x2_scale)) {
    // The store reads its offset from the 64 bits, where aclnnTransQuantParamV2 put it: the offset tensor is
    // checked, not read (the kernel has no address for it).
    auto [scale, embedded] = decode_scale(m.x2_scale);
    value = value * scale;
    offset = embedded;
  } else {
    value = value * fp32(m.x2_scale);
    if (given(m.x1_scale)) value = value * column(m.x1_scale);
    if (given(m.bias) && !integer_bias) value = value + fp32(m.bias);
    if (given(m.x2_offset)) offset = fp32(m.x2_offset);
  }
  if (out->scalar_type() == at::kChar) return put(out, quantize(offset.defined() ? value + offset : value));
  put(out, value);
}

OP(aclnnQuantMatmulV4, T, x1, T, x2, T, scale, T, offset, T, token_scale, T, bias, bool, transpose1, bool,
   transpose2, O, out) {
  quant_matmul({*x1, values_of(x2), token_scale.orundef(), *scale, offset.orundef(), {}, bias.orundef(), 0},
               transpose1, transpose2, out);
}
OP(aclnnQuantMatmulV5, T, x1, T, x2, T, x1_scale, T, x2_scale, T, y_scale, T, x1_offset, T, x2_offset, T,
   y_offset, T, bias, bool, transpose1, bool, transpose2, int64_t, group, O, out) {
  quant_matmul({*x1, values_of(x2), x1_scale.orundef(), *x2_scale, x2_offset.orundef(), y_offset.orundef(),
                bias.orundef(), group},
               transpose1, transpose2, out);
}
