// The sums of several vectors at once, for the torch-free loops; see vec.h.
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Lane i of the result: the sum of the lanes of v[i].
#if defined(__AVX512F__)
LB_INLINE VF sum_each(const VF (&v)[kLanes]) {
  __m512 a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d even = (__m512d)a[2 * i];
    const __m512d odd = (__m512d)a[2 * i + 1];
    a[i] = (__m512)_mm512_unpacklo_pd(even, odd) + (__m512)_mm512_unpackhi_pd(even, odd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    a[i] = _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88) +
           _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd);
  }
  return _mm512_shuffle_f32x4(a[0], a[1], 0x88) + _mm512_shuffle_f32x4(a[0], a[1], 0xdd);
}

LB_INLINE VI sum_each(const VI (&v)[kLanes]) {
  VI a[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i even = (__m512i)v[2 * i], odd = (__m512i)v[2 * i + 1];
    a[i] = (VI)_mm512_unpacklo_epi32(even, odd) + (VI)_mm512_unpackhi_epi32(even, odd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even = (__m512i)a[2 * i], odd = (__m512i)a[2 * i + 1];
    a[i] = (VI)_mm512_unpacklo_epi64(even, odd) + (VI)_mm512_unpackhi_epi64(even, odd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i even = (__m512i)a[2 * i], odd = (__m512i)a[2 * i + 1];
    a[i] = (VI)_mm512_shuffle_i32x4(even, odd, 0x88) + (VI)_mm512_shuffle_i32x4(even, odd, 0xdd);
  }
  const __m512i even = (__m512i)a[0], odd = (__m512i)a[1];
  return (VI)_mm512_shuffle_i32x4(even, odd, 0x88) + (VI)_mm512_shuffle_i32x4(even, odd, 0xdd);
}
#elif defined(__AVX2__)
LB_INLINE VF sum_each(const VF (&v)[kLanes]) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
#elif defined(__aarch64__)
LB_INLINE VF sum_each(const VF (&v)[kLanes]) {
  const float32x4_t a = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
  return (VF)vpaddq_f32(a, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
}
#else
LB_INLINE VF sum_each(const VF (&v)[kLanes]) {
  VF result = {};
  for (int i = 0; i < kLanes; ++i) result[i] = sum(v[i]);
  return result;
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
