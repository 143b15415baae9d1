// The lanes of a VF as doubles, in two halves, for sums that must lose nothing; see vec.h.
//
//   VD                      kLanes / 2 lanes of double
//   low_half(v) high_half(v) the first and the last lanes of a VF
//   fma(a, b, c)            a * b + c of doubles
//   sum(v)                  across lanes
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

typedef double VD __attribute__((vector_size(kVecBytes)));

#if defined(__AVX512F__)
LB_INLINE VD low_half(VF v) { return (VD)_mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
LB_INLINE VD high_half(VF v) { return (VD)_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
#elif defined(__AVX2__)
LB_INLINE VD low_half(VF v) { return (VD)_mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
LB_INLINE VD high_half(VF v) { return (VD)_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
#elif defined(__SSE2__)
LB_INLINE VD low_half(VF v) { return (VD)_mm_cvtps_pd(v); }
LB_INLINE VD high_half(VF v) { return (VD)_mm_cvtps_pd(_mm_movehl_ps(v, v)); }
#elif defined(__aarch64__)
LB_INLINE VD low_half(VF v) { return (VD)vcvt_f64_f32(vget_low_f32((float32x4_t)v)); }
LB_INLINE VD high_half(VF v) { return (VD)vcvt_high_f64_f32((float32x4_t)v); }
#else
LB_INLINE VD low_half(VF v) {
  VD result;
  for (int i = 0; i < kLanes / 2; ++i) result[i] = v[i];
  return result;
}
LB_INLINE VD high_half(VF v) {
  VD result;
  for (int i = 0; i < kLanes / 2; ++i) result[i] = v[kLanes / 2 + i];
  return result;
}
#endif

// a * b + c. Where the product is exact, as that of two floats is, no instruction set gives other bits.
#if defined(__AVX512F__)
LB_INLINE VD fma(VD a, VD b, VD c) { return (VD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#elif defined(__AVX2__)
LB_INLINE VD fma(VD a, VD b, VD c) { return (VD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#elif defined(__aarch64__)
LB_INLINE VD fma(VD a, VD b, VD c) { return (VD)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
#else
LB_INLINE VD fma(VD a, VD b, VD c) { return a * b + c; }
#endif

// Across lanes, pairwise.
LB_INLINE double sum(VD v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_pd((__m512d)v);
#elif defined(__AVX2__)
  const __m128d half = _mm256_castpd256_pd128((__m256d)v) + _mm256_extractf128_pd((__m256d)v, 1);
  return half[0] + half[1];
#else
  return v[0] + v[1];
#endif
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
