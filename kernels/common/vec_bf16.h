// Words of two bf16 that one instruction multiplies with two others and sums in fp32, where the CPU has it; see vec.h.
//
// LB_BF16_PAIRS is defined where it has: with AVX-512 BF16, and with the BF16 of Arm. A vector of words is a VF, whatever
// its bits say as floats. Denormals count as zero in the product; Arm rounds its sums to odd.
//
//   dot_pairs(sum, a, b)    sum + a.first * b.first + a.second * b.second in each lane
//   round_pairs(low, high)  the numbers of two vectors, one behind the other, rounded to bf16
//   sum_pairs(words)        of each lane
//   zip_pairs_low, _high    words of the bf16 i of one vector and i of the other: of their lower, and of their upper halves
#pragma once

#include "common/vec.h"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define LB_BF16_PAIRS 1
namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512BF16__)
LB_INLINE VF dot_pairs(VF sum, VF a, VF b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
LB_INLINE VF round_pairs(VF low, VF high) { return (VF)_mm512_cvtne2ps_pbh(high, low); }
LB_INLINE VF sum_pairs(VF words) { return dot_pairs(VF{}, words, as_float(splat_u(0x3f803f80u))); }
// Numbers that bf16 holds, such as integers of 8 bits.
LB_INLINE VF exact_pairs(VF low, VF high) { return round_pairs(low, high); }
// For vpermi2w: element i of one row, then element i of the other (numbered from 32), for i < 16. The others
// are 0x00100010 further.
LB_INLINE VU pair_order() {
  return VU{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x00010001u + 0x00200000u;
}
LB_INLINE VF zip_pairs_low(VF first, VF second) {
  return (VF)_mm512_permutex2var_epi16((__m512i)first, (__m512i)pair_order(), (__m512i)second);
}
LB_INLINE VF zip_pairs_high(VF first, VF second) {
  return (VF)_mm512_permutex2var_epi16((__m512i)first, (__m512i)(pair_order() + 0x00100010u),
                                       (__m512i)second);
}
#else
LB_INLINE VF dot_pairs(VF sum, VF a, VF b) {
  return (VF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
LB_INLINE VF round_pairs(VF low, VF high) {
  return (VF)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
}
// Not by a product with ones, for which GCC 12 writes an instruction of f16.
LB_INLINE VF sum_pairs(VF words) {
  return as_float(as_uint(words) << 16) + as_float(as_uint(words) & 0xffff0000u);
}
LB_INLINE VF exact_pairs(VF low, VF high) { return (VF)vuzp2q_u16((uint16x8_t)low, (uint16x8_t)high); }
LB_INLINE VF zip_pairs_low(VF first, VF second) {
  return (VF)vzip1q_u16((uint16x8_t)first, (uint16x8_t)second);
}
LB_INLINE VF zip_pairs_high(VF first, VF second) {
  return (VF)vzip2q_u16((uint16x8_t)first, (uint16x8_t)second);
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
#endif
