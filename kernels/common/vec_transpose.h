// A square of 32-bit words transposed in registers, for loops that pack operands of matrix products.
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Rows and columns of a kLanes by kLanes block of words exchanged, in place.
#if defined(__AVX512F__)
LB_INLINE void transpose(VF (&r)[kLanes]) {
  __m512 t[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = (VF)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 1] = (VF)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
    r[i + 2] = (VF)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    r[i + 3] = (VF)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#elif defined(__AVX2__)
LB_INLINE void transpose(VF (&r)[kLanes]) {
  __m256 t[kLanes];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
#elif defined(__aarch64__)
LB_INLINE void transpose(VF (&r)[kLanes]) {
  const auto trn1 = [](VF a, VF b) { return (float64x2_t)vtrn1q_f32((float32x4_t)a, (float32x4_t)b); };
  const auto trn2 = [](VF a, VF b) { return (float64x2_t)vtrn2q_f32((float32x4_t)a, (float32x4_t)b); };
  const float64x2_t even = trn1(r[0], r[1]), odd = trn2(r[0], r[1]);
  const float64x2_t even_below = trn1(r[2], r[3]), odd_below = trn2(r[2], r[3]);
  r[0] = (VF)vtrn1q_f64(even, even_below);
  r[1] = (VF)vtrn1q_f64(odd, odd_below);
  r[2] = (VF)vtrn2q_f64(even, even_below);
  r[3] = (VF)vtrn2q_f64(odd, odd_below);
}
#else
LB_INLINE void transpose(VF (&r)[kLanes]) {
  float words[kLanes][kLanes];
  memcpy(words, r, sizeof(words));
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) r[i][j] = words[j][i];
  }
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
