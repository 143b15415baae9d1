// exp, tanh, sigmoid and the normal distribution on VF, for the torch-free loops; see vec.h.
//
// Branch-free: both sides of a range split are computed and selected, since lanes differ. NaN in, NaN out.
// Measured against double in tests/csrc/vec_test.cpp.
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Adding it to |x| < 2^22 rounds to an integer n, which then stands in the low bits: kToInteger + n.
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23

// p * 2^n for shifted = kToInteger + n, -250 < n < 250.
LB_INLINE VF times_power_of_2(VF p, VF shifted) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, shifted - kToInteger);
#else
  // In two factors, since n goes beyond the exponents of normal floats at both ends.
  const VI exponent = reinterpret_cast<VI>(shifted) - reinterpret_cast<VI>(splat(kToInteger));
  const VI half = exponent >> 1;
  return p * reinterpret_cast<VF>((half + 127) << 23) * reinterpret_cast<VF>((exponent - half + 127) << 23);
#endif
}

// exp(x + low) for |low| far below 1: the low part keeps the bits that a product of two floats loses.
// Overflows to infinity above 88.7 and falls through the denormals to zero below -104, as expf does.
// Polynomial and split of ln 2: SLEEF (Shibata & Petrogalli 2019, arXiv:2001.09258), expf, 1 ulp.
LB_INLINE VF exp(VF x, VF low) {
  // min and max return a NaN in their first argument.
  x = min(max(x, splat(-106.0f)), splat(89.0f));
  const VF shifted = x * splat(1.44269504088896f) + kToInteger;
  const VF n = shifted - kToInteger;
  VF r = fma(n, splat(-0.693145751953125f), x);
  r = fma(n, splat(-1.428606765330187045e-06f), r) + low;
  VF p = splat(0.000198527617612853646278381f);
  p = fma(p, r, splat(0.00139304355252534151077271f));
  p = fma(p, r, splat(0.00833336077630519866943359f));
  p = fma(p, r, splat(0.0416664853692054748535156f));
  p = fma(p, r, splat(0.166666671633720397949219f));
  p = fma(p, r, splat(0.5f));
  p = fma(r * r, p, r) + 1.0f;
  return times_power_of_2(p, shifted);
}

LB_INLINE VF exp(VF x) { return exp(x, VF{}); }

// 1 / (1 + exp(-x)); 0 below -88.7, where exp(-x) overflows.
LB_INLINE VF sigmoid(VF x) { return 1.0f / (1.0f + exp(-x)); }

// Near zero an odd polynomial (Cephes, S. Moshier, tanhf), since 1 - 2 / (exp(2x) + 1) cancels there.
LB_INLINE VF tanh(VF x) {
  const VF magnitude = abs(x);
  const VF square = x * x;
  VF p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const VF near = fma(p * square, x, x);
  const VF far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return magnitude < splat(0.625f) ? near : copysign(far, x);
}

// The distribution function of the standard normal, (1 + erf(x / sqrt(2))) / 2, with full relative accuracy
// also far below zero, where 1 + erf cancels: exp(-x^2 / 2) * erfcx(|x| / sqrt(2)) / 2, of which the second
// factor is P(u) / (1 + |x|), u = (|x| - 4) / (|x| + 4). P is the interpolant in Chebyshev nodes for
// |x| < 14.5 (relative error 2.4e-9); beyond, the result underflows.
LB_INLINE VF normal_cdf(VF x) {
  const VF magnitude = min(abs(x), splat(14.5f));
  const VF plus_1 = magnitude + 1.0f, plus_4 = magnitude + 4.0f;
  const VF inverse = 1.0f / (plus_1 * plus_4);
  const VF u = (magnitude - 4.0f) * (plus_1 * inverse);
  VF p = splat(-7.393246335e-5f);
  p = fma(p, u, splat(-6.572075472e-5f));
  p = fma(p, u, splat(0.0006912335241f));
  p = fma(p, u, splat(-0.0003004970012f));
  p = fma(p, u, splat(-0.005002521082f));
  p = fma(p, u, splat(0.01793954811f));
  p = fma(p, u, splat(-0.03219772809f));
  p = fma(p, u, splat(0.02860002752f));
  p = fma(p, u, splat(0.01399963041f));
  p = fma(p, u, splat(-0.09670346791f));
  p = fma(p, u, splat(0.4720532065f));
  // x^2 exactly: the square of the upper 12 bits has no rounding, the rest is a correction.
  const VF upper = as_float(as_uint(magnitude) & 0xfffff000u);
  const VF rest = (magnitude - upper) * (magnitude + upper);
  const VF tail = exp(upper * upper * -0.5f, rest * -0.5f) * (p * (plus_4 * inverse));
  return x > VF{} ? 1.0f - tail : tail;
}

// As normal_cdf, to a relative error of 5e-5: for results that are rounded to 16 bits. Half the instructions:
// the second factor is t * P(t), t = 1 / (1 + 0.33 |x|), a form that loses some bits near zero.
LB_INLINE VF normal_cdf_16bit(VF x) {
  const VF magnitude = min(abs(x), splat(14.5f));
  const VF t = 1.0f / fma(splat(0.33f), magnitude, splat(1.0f));
  VF p = splat(-0.055069105f);
  p = fma(p, t, splat(0.090469769f));
  p = fma(p, t, splat(0.089444452f));
  p = fma(p, t, splat(0.1098279f));
  p = fma(p, t, splat(0.13386147f));
  p = fma(p, t, splat(0.13145942f));
  // 2^y, y = -x^2 / (2 ln 2).
  const VF y = magnitude * magnitude * -0.72134752f;
  const VF shifted = y + kToInteger;
  const VF f = y - (shifted - kToInteger);
  VF e = splat(0.00966636852f);
  e = fma(e, f, splat(0.0559219758f));
  e = fma(e, f, splat(0.24022349f));
  e = fma(e, f, splat(0.693121045f));
  e = fma(e, f, splat(1.0f));
  const VF tail = times_power_of_2(e * (p * t), shifted);
  return x > VF{} ? 1.0f - tail : tail;
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
