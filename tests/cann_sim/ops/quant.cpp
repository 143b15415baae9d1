// Quantization of tensors, also after a norm, and the packing of int4 weights.
// Formulas: CANN operator documentation (ops-nn, quant/*/docs/*.md, norm/*_quant/docs/*.md); rounding is half to even
// (CAST_RINT).
#include "quantize.h"

using namespace sim;
using at::Tensor;

/// Per row: scale = max|v| / max of the type, y = round(v / scale).
static void row_quant(const Tensor& x, const TensorHandle& smooth, const TensorHandle& y,
                      const TensorHandle& scale) {
  auto v = smooth ? x * fp32(*smooth) : x;
  auto s = v.abs().amax(-1, true) / (output_bits(*y) == 4 ? 7 : 127);
  put_quantized(y, v / s);
  put(scale, s);
}

OP(aclnnDynamicQuant, T, x, T, smooth, O, y, O, scale) { row_quant(fp32(*x), smooth, y, scale); }

/// The sum is rounded to the inputs' type before it is normalised: xOut holds what the norm saw. The second output is
/// valid when both smoothing scales are given.
OP(aclnnAddRmsNormDynamicQuant, T, x1, T, x2, T, gamma, T, smooth1, T, smooth2, double, eps, O, y1, O, y2, O,
   x_out, O, scale1, O, scale2) {
  auto x = rounded(fp32(*x1) + fp32(*x2), x1->scalar_type());
  auto normed = x * at::rsqrt((x * x).mean(-1, true) + eps) * fp32(*gamma);
  row_quant(normed, smooth1, y1, scale1);
  if (smooth1 && smooth2) row_quant(normed, smooth2, y2, scale2);
  put(x_out, x);
}

// int32 values -8..7 -> 8 int4 in an int32, in ND or in the blocks of FRACTAL_NZ (64 int4 wide).
OP(aclnnConvertWeightToINT4Pack, T, weight, O, packed) {
  auto values = pack_int4(*weight);
  if (is_nz(packed)) {
    nz_storage(packed).copy_(to_nz(values, block_width(at::kInt)));
  } else {
    put(packed, values);
  }
}
