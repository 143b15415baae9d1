// Products of bytes and of pairs of 16 bits with AVX2 alone, where no instruction sums four products of bytes: for limbs
// (quantized_limbs_madd.h) and for rows of integers (quantized_int8.h).
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)

LB_INLINE VI add_words(VI a, VI b) { return (VI)_mm256_add_epi16((__m256i)a, (__m256i)b); }
// Pairs of products of unsigned and signed bytes.
LB_INLINE VI byte_products(VI weights, int32_t bytes) {
  return (VI)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(bytes));
}
// Sums of two products of 16 bits.
LB_INLINE VI word_products(VI words, int32_t pair) {
  return (VI)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi32(pair));
}

// Sums are finished one after the other: reordered, their terms do not fit the registers.
LB_INLINE void in_turn(VI& sum) { __asm__("" : "+x"(sum)); }

// The sums of pairs, each `times` as much.
LB_INLINE VI join_words(VI pairs, int32_t times) { return word_products(pairs, times << 16 | times); }

#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
