// Products of integers for the loops of linear_w8a8: words of one row of weight, and panels of many. Part of
// int8_linear_cpu_isa.cpp; compiled once an instruction set.
//
// A word is 32 bits: four integers of x where the CPU multiplies those (VNNI, dot products of Arm), else two, widened to
// 16 bits.
#pragma once

#include "common/vec.h"
#include "common/vec_transpose.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512VNNI__)
// The instruction takes unsigned integers by signed ones: weights are 128 larger, which makes a sum larger by 128
// times that of x.
typedef int8_t Integer;
constexpr int32_t kOffset = 128;
LB_INLINE VI multiply_add(VI sum, VI weights, VI x) {
  return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
}
LB_INLINE VI read(const int8_t* p) {
  return (VI)_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8_t Integer;
constexpr int32_t kOffset = 0;
LB_INLINE VI multiply_add(VI sum, VI weights, VI x) {
  return (VI)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)x);
}
LB_INLINE VI read(const int8_t* p) { return (VI)vld1q_s8(p); }
#else
typedef int16_t Integer;
constexpr int32_t kOffset = 0;
LB_INLINE VI multiply_add(VI sum, VI weights, VI x) {
#if defined(__AVX512F__)
  return sum + (VI)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
  return sum + (VI)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#elif defined(__SSE2__)
  return sum + (VI)_mm_madd_epi16((__m128i)weights, (__m128i)x);
#elif defined(__aarch64__)
  const int16x8_t w = (int16x8_t)weights, q = (int16x8_t)x;
  return sum + (VI)vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(q)), vmull_high_s16(w, q));
#else
  return sum + (weights << 16 >> 16) * (x << 16 >> 16) + (weights >> 16) * (x >> 16);
#endif
}
LB_INLINE VI read(const int8_t* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return (VI)vmovl_s8(vld1_s8(p));
#else
  typedef int8_t Bytes __attribute__((vector_size(2 * kLanes)));
  typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
  Bytes bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return (VI) __builtin_convertvector(bytes, Shorts);
#endif
}
#endif

constexpr int kPerWord = 4 / sizeof(Integer);
// Columns in a vector of words.
constexpr int kColumns = kLanes * kPerWord;

// The first n of kColumns columns, others zero.
LB_INLINE VI read(const int8_t* p, int64_t n) {
  if (n >= kColumns) return read(p);
#if defined(__aarch64__)
  int8_t bytes[16];
  vst1q_s8(bytes, vreinterpretq_s8_u8(load_bytes(p, static_cast<int>(n))));
#else
  int8_t bytes[kColumns] = {};
  for (int64_t i = 0; i < n && i < kColumns; ++i) bytes[i] = p[i];
#endif
  return read(bytes);
}

LB_INLINE VI load_words(const int32_t* p) {
  VI v;
  memcpy(&v, p, sizeof(v));
  return v;
}

// Words of a row of x.
int64_t words(int64_t k) { return (k + kColumns - 1) / kColumns * kLanes; }

// A block is kBlockRows rows of x by kBlockVectors vectors of outputs: as many accumulators as the registers hold.
#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockVectors = 4;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kBlockRows = 4, kBlockVectors = 4;
#else
constexpr int kBlockRows = 6, kBlockVectors = 2;
#endif
constexpr int kPanel = kBlockVectors * kLanes;

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Matrices of two rows by eight columns are multiplied at once: a panel has those of two outputs side by side, first all
// of eight columns, then all of the next eight.
LB_INLINE VI low_halves(VI a, VI b) { return (VI)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
LB_INLINE VI high_halves(VI a, VI b) { return (VI)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }

LB_INLINE void pack_block(VF (&block)[kLanes], int64_t w, int vector, int32_t* packed) {
  int32_t* to = packed + w * kPanel + vector * 2 * kLanes;
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const VI a = (VI)block[2 * pair], b = (VI)block[2 * pair + 1];
    const VI halves[2] = {low_halves(a, b), high_halves(a, b)};
    memcpy(to + pair * kLanes, &halves[0], sizeof(VI));
    memcpy(to + 2 * kPanel + pair * kLanes, &halves[1], sizeof(VI));
  }
}

// Eight columns of all pairs of rows and of outputs.
LB_INLINE void multiply_half(const VI (&x)[kBlockRows / 2], const int32_t* packed,
                             VI (&sums)[kBlockRows / 2][2 * kBlockVectors]) {
#pragma GCC unroll 8
  for (int pair = 0; pair < 2 * kBlockVectors; ++pair) {
    const int8x16_t weights = (int8x16_t)load_words(packed + pair * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kBlockRows / 2; ++r)
      sums[r][pair] = (VI)vmmlaq_s32((int32x4_t)sums[r][pair], (int8x16_t)x[r], weights);
  }
}

LB_INLINE void multiply_panel(const int32_t* x, int64_t count, const int32_t* packed,
                              VI (&sums)[kBlockRows][kBlockVectors]) {
  VI squares[kBlockRows / 2][2 * kBlockVectors] = {};
  for (int64_t w = 0; w < count; w += kLanes, packed += kLanes * kPanel) {
    VI low[kBlockRows / 2], high[kBlockRows / 2];
#pragma GCC unroll 4
    for (int r = 0; r < kBlockRows / 2; ++r) {
      const VI a = load_words(x + 2 * r * count + w), b = load_words(x + (2 * r + 1) * count + w);
      low[r] = low_halves(a, b);
      high[r] = high_halves(a, b);
    }
    multiply_half(low, packed, squares);
    multiply_half(high, packed + 2 * kPanel, squares);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kBlockRows / 2; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) {
      sums[2 * r][v] = low_halves(squares[r][2 * v], squares[r][2 * v + 1]);
      sums[2 * r + 1][v] = high_halves(squares[r][2 * v], squares[r][2 * v + 1]);
    }
  }
}
#else
// The words of a block of kLanes rows of weight that `vector` of a panel holds, from word `w` on.
LB_INLINE void pack_block(VF (&block)[kLanes], int64_t w, int vector, int32_t* packed) {
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) memcpy(packed + (w + i) * kPanel + vector * kLanes, &block[i], sizeof(VF));
}

#if defined(__ARM_FEATURE_DOTPROD)
// x as elements of registers, which costs no instruction: four words at a time.
template <int lane>
LB_INLINE void multiply_word(const int8x16_t (&x)[kBlockRows], const int32_t* packed,
                             VI (&sums)[kBlockRows][kBlockVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kBlockVectors; ++v) {
    const int8x16_t weights = (int8x16_t)load_words(packed + lane * kPanel + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kBlockRows; ++r)
      sums[r][v] = (VI)vdotq_laneq_s32((int32x4_t)sums[r][v], weights, x[r], lane);
  }
}

LB_INLINE void multiply_panel(const int32_t* x, int64_t count, const int32_t* packed,
                              VI (&sums)[kBlockRows][kBlockVectors]) {
  for (int64_t w = 0; w < count; w += kLanes, packed += kLanes * kPanel) {
    int8x16_t words[kBlockRows];
#pragma GCC unroll 4
    for (int r = 0; r < kBlockRows; ++r) words[r] = (int8x16_t)load_words(x + r * count + w);
    multiply_word<0>(words, packed, sums);
    multiply_word<1>(words, packed, sums);
    multiply_word<2>(words, packed, sums);
    multiply_word<3>(words, packed, sums);
  }
}
#else
// sums[row][vector] = kBlockRows rows of x, `count` words each, times a panel.
LB_INLINE void multiply_panel(const int32_t* x, int64_t count, const int32_t* packed,
                              VI (&sums)[kBlockRows][kBlockVectors]) {
  for (int64_t w = 0; w < count; ++w) {
    VI weights[kBlockVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) weights[v] = load_words(packed + w * kPanel + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kBlockRows; ++r) {
      const VI word = splat_i(x[r * count + w]);
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) sums[r][v] = multiply_add(sums[r][v], weights[v], word);
    }
  }
}
#endif
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
