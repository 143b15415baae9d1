// Norms: root mean square and layer norms, alone and fused with the addition before them.
//
// Rounding follows the kernels of ops-nn (norm/*/op_kernel, read at e5c3fa93): everything is computed in float32 and
// rounded once to the output dtype, except where said.
#include "fused.h"

using namespace sim;

using at::Tensor;

OP(aclnnRmsNorm, T, x, T, gamma, double, eps, O, y, O, rstd) {
  auto x32 = fp32(*x);
  auto inverse = inverse_rms(x32, gamma->dim(), eps);
  put(y, x32 * inverse * fp32(*gamma));
  put(rstd, inverse);
}

/// As RmsNorm with 1 + gamma, the sum in float32.
OP(aclnnGemmaRmsNorm, T, x, T, gamma, double, eps, O, y, O, rstd) {
  auto x32 = fp32(*x);
  auto inverse = inverse_rms(x32, gamma->dim(), eps);
  put(y, x32 * inverse * (fp32(*gamma) + 1.0));
  put(rstd, inverse);
}

namespace {

struct Added {
  Tensor sum, y, inverse;
};

/// Sum rounded to its dtype and normed from there; x * rstd rounded to that dtype before gamma. These two roundings
/// are in the kernels of add_rms_norm, not in its document.
Added add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, int64_t axes, double eps) {
  auto dtype = x1.scalar_type();
  Added r;
  r.sum = rounded(fp32(x1) + fp32(x2), dtype);
  r.inverse = inverse_rms(r.sum, axes, eps);
  r.y = rounded(r.sum * r.inverse, dtype) * fp32(gamma);
  return r;
}

/// The document: rstd is "invalid" on Atlas inference products (310P); whoever reads it there sees NaN.
void put_rstd(O rstd, const Tensor& inverse) {
  put(rstd, soc() == Soc::ascend310p ? at::full_like(inverse, NAN) : inverse);
}

}  // namespace

OP(aclnnAddRmsNorm, T, x1, T, x2, T, gamma, double, eps, O, y, O, rstd, O, x) {
  // gamma [1, H] without rstd is the form that norms the last axis of any x.
  auto r = add_rms_norm(*x1, *x2, *gamma, rstd ? gamma->dim() : 1, eps);
  put(y, r.y);
  put_rstd(rstd, r.inverse);
  put(x, r.sum);
}

// ---- layer norm ---------------------------------------------------------------------------------------------
namespace {

struct Normed {
  Tensor y, mean, inverse;  // y without weight and bias
};

Normed layer_norm(const Tensor& x, int64_t count, double eps) {
  auto axes = last_axes(x, count);
  auto mean = at::mean(x, axes, true);
  auto centred = x - mean;
  auto inverse = at::rsqrt(at::mean(centred * centred, axes, true) + static_cast<float>(eps));
  return {centred * inverse, mean, inverse};
}

}  // namespace

OP(aclnnLayerNorm, T, x, IA, shape, T, weight, T, bias, double, eps, O, out, O, mean, O, rstd) {
  auto r = layer_norm(fp32(*x), static_cast<int64_t>((*shape).size()), eps);
  if (weight) r.y = r.y * fp32(*weight);
  if (bias) r.y = r.y + fp32(*bias);
  put(out, r.y);
  put(mean, r.mean);
  put(rstd, r.inverse);
}

/// x = x1 + x2 + bias in float32, normed unrounded; xOut only with `additional`.
OP(aclnnAddLayerNorm, T, x1, T, x2, T, gamma, T, beta, T, bias, double, eps, bool, additional, O, y, O, mean,
   O, rstd, O, x) {
  auto sum = fp32(*x1) + fp32(*x2);
  if (bias) sum = sum + fp32(*bias);
  auto r = layer_norm(sum, gamma->dim(), eps);
  put(y, r.y * fp32(*gamma) + fp32(*beta));
  auto unused = soc() == Soc::ascend310p;  // mean and rstd are "invalid" there, as the rstd of AddRmsNorm
  put(mean, unused ? at::full_like(r.mean, NAN) : r.mean);
  put(rstd, unused ? at::full_like(r.inverse, NAN) : r.inverse);
  if (additional) put(x, sum);
}

OP(aclnnLayerNormBackward, T, dy, T, x, IA, shape, T, mean, T, rstd, T, weight, T, bias, BA, mask, O, dx, O,
   dweight, O, dbias) {
  auto r = at::native_layer_norm_backward(*dy, *x, *shape, *mean, *rstd, weight.opt(), bias.opt(),
                                          {mask[0], mask[1], mask[2]});
  if (mask[0]) put(dx, std::get<0>(r));
  if (mask[1]) put(dweight, std::get<1>(r));
  if (mask[2]) put(dbias, std::get<2>(r));
}
