// Register tiles of the two matrix products of attention, over blocks packed into words. Part of
// attention_cpu_isa.cpp; compiled once an instruction set.
//
// A word is 32 bits: one fp32 value, or a pair of bf16 values that are neighbours along the summed dimension.
// The left operand is row-major words; the right one lies in panels of kPanel columns, word k of column c at
// [k * kPanel + c], so that one vector load serves kLanes columns and one broadcast serves a row.
#pragma once

#include "common/vec.h"
#include "common/vec_bf16.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// A tile is up to kVectorRows rows by kTileVectors vectors of accumulators: as many as the registers hold
// beside the vectors of the right operand and one broadcast.
constexpr int kVectorRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kPanel = kTileVectors * kLanes;

struct Words32 {
  typedef Words32 Packed;  // what blocks are packed to
  static constexpr int kPerWord = 1;
  static LB_INLINE VF multiply_add(VF a, VF b, VF sum) { return fma(a, b, sum); }
  static LB_INLINE VF number(VF sum) { return sum; }
};

// Whether tiles of pairs of bf16 are made of squares (attention_tile_neon.h).
#if defined(LB_BF16_PAIRS) && defined(__aarch64__)
#define LB_SQUARES 1
constexpr bool kHasSquares = true;
#else
constexpr bool kHasSquares = false;
#endif

#if defined(LB_BF16_PAIRS)
struct WordsBf16 {
  typedef WordsBf16 Packed;
  static constexpr int kPerWord = 2;
  static LB_INLINE VF multiply_add(VF a, VF b, VF sum) { return dot_pairs(sum, a, b); }
  static LB_INLINE VF number(VF sum) { return sum; }
};
#endif

// One word in every lane, whatever it holds.
LB_INLINE VF splat_word(const float* p) {
  float word;
  memcpy(&word, p, sizeof(word));
  return splat(word);
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost

#if defined(__aarch64__)
#include "attention/attention_tile_neon.h"
#endif

namespace liteboost {
namespace LB_ISA {
namespace {

// c[rows][vectors * kLanes] = a[rows][words] b[words][panel] + (decay ? decay[row] * c : 0). The product is
// summed by itself before it joins c: rounding errors then grow with the blocks and not with the keys.
template <typename Words, int rows, int vectors>
void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t words, float* c,
                   int64_t c_stride, const float* decay) {
  VF sums[rows][vectors] = {};
  int64_t k = 0;
#if defined(LB_SQUARES)
  if constexpr (Words::kPerWord == 2) {
    multiply_squares<rows, vectors>(a, a_stride, b, words, sums);
    k = words;
  }
#endif
#if defined(__aarch64__)
  if constexpr (!kHasSquares || Words::kPerWord == 1) {
    for (; k + kLanes <= words; k += kLanes) {
      VF some[rows];
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) some[r] = load(a + r * a_stride + k);
      multiply_words<Words>(some, b + k * kPanel, sums);
    }
  }
#endif
  for (; k < words; ++k) {
    VF columns[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) columns[v] = load(b + k * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const VF row = splat_word(a + r * a_stride + k);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sums[r][v] = Words::multiply_add(row, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      float* out = c + r * c_stride + v * kLanes;
      store(out, decay != nullptr ? fma(load(out), splat(decay[r]), sums[r][v]) : sums[r][v]);
    }
  }
}

using TileFunction = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, const float*);

#if defined(__AVX512F__) || defined(__aarch64__)
#define LB_TILE_ROW(W, r) \
  {multiply_tile<W, r, 1>, multiply_tile<W, r, 2>, multiply_tile<W, r, 3>, multiply_tile<W, r, 4>}
#else
#define LB_TILE_ROW(W, r) {multiply_tile<W, r, 1>, multiply_tile<W, r, 2>}
#endif

// By number of rows - 1 and number of vectors - 1.
template <typename Words>
constexpr TileFunction kTiles[kVectorRows][kTileVectors] = {LB_TILE_ROW(Words, 1), LB_TILE_ROW(Words, 2),
                                                            LB_TILE_ROW(Words, 3), LB_TILE_ROW(Words, 4),
                                                            LB_TILE_ROW(Words, 5), LB_TILE_ROW(Words, 6)};
#undef LB_TILE_ROW

// multiply_tile of up to kRows rows and whole vectors of columns (AmxProducts does the same by tiles).
struct VectorProducts {
  static constexpr int64_t kRows = kVectorRows;

  template <typename Words>
  LB_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t words, float* c,
                          int64_t c_stride, const float* decay, int64_t rows, int64_t columns) {
    kTiles<Words>[rows - 1][columns / kLanes - 1](a, a_stride, b, words, c, c_stride, decay);
  }
};

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
