// The products of attention by the tiles of AMX, where words are pairs of bf16. Part of attention_cpu_isa.cpp; compiled
// where there are tiles.
//
// Rows of words and panels lie as attention_tile.h says, which is how an instruction wants its operands: 16 words of 16
// rows, and as many of 16 columns of a panel. Sums as tdpbf16ps makes them: those of vectors but for their order.
#pragma once

#include "attention/attention_tile.h"
#include "common/tiles.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Words are multiplied so many at a time, and the last of them half as many.
constexpr int64_t kStepWords = 16, kHalfStepWords = kStepWords / 2;

// Registers: 0 to 3 sums; 4 rows and 5 columns of a step; 6 rows and 7 columns of half a step.
inline void configure_products(int64_t rows) {
  load_tile_config({rows, rows, rows, rows, rows, kStepWords, rows, kHalfStepWords},
                   {64, 64, 64, 64, 64, 64, kHalfStepWords * 4, 64});
}

// To the sums of `vectors` tiles: the rows at `a` times a panel's columns at `b`, in these registers.
template <int vectors, int rows, int columns>
LB_INLINE void multiply_step(const float* a, int64_t a_bytes, const float* b) {
  constexpr int64_t kRowBytes = kPanel * 4;
  load_tile<rows>(a, a_bytes);
  load_tile<columns>(b, kRowBytes);
  MultiplyBf16::add<0, rows, columns>();
  if constexpr (vectors > 1) load_tile<columns>(b + kLanes, kRowBytes);
  if constexpr (vectors > 1) MultiplyBf16::add<1, rows, columns>();
  if constexpr (vectors > 2) load_tile<columns>(b + 2 * kLanes, kRowBytes);
  if constexpr (vectors > 2) MultiplyBf16::add<2, rows, columns>();
  if constexpr (vectors > 3) load_tile<columns>(b + 3 * kLanes, kRowBytes);
  if constexpr (vectors > 3) MultiplyBf16::add<3, rows, columns>();
}

// As multiply_tile, of as many rows as are configured; `words` is a multiple of half a step.
template <int vectors>
void multiply_amx(const float* a, int64_t a_stride, const float* b, int64_t words, float* c, int64_t c_stride,
                  const float* decay, int64_t rows) {
  // What was written by vectors is read by tiles, and the other way round, which the compiler does not see.
  __asm__ volatile("" ::: "memory");
  _tile_zero(0);
  if constexpr (vectors > 1) _tile_zero(1);
  if constexpr (vectors > 2) _tile_zero(2);
  if constexpr (vectors > 3) _tile_zero(3);
  int64_t k = 0;
  for (; k + kStepWords <= words; k += kStepWords)
    multiply_step<vectors, 4, 5>(a + k, a_stride * 4, b + k * kPanel);
  if (k < words) multiply_step<vectors, 6, 7>(a + k, a_stride * 4, b + k * kPanel);
  alignas(64) float apart[kTileRows * kPanel];
  float* sums = decay == nullptr ? c : apart;
  const int64_t sum_bytes = (decay == nullptr ? c_stride : kPanel) * 4;
  _tile_stored(0, sums, sum_bytes);
  if constexpr (vectors > 1) _tile_stored(1, sums + kLanes, sum_bytes);
  if constexpr (vectors > 2) _tile_stored(2, sums + 2 * kLanes, sum_bytes);
  if constexpr (vectors > 3) _tile_stored(3, sums + 3 * kLanes, sum_bytes);
  __asm__ volatile("" ::: "memory");
  if (decay == nullptr) return;
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      float* out = c + r * c_stride + v * kLanes;
      store(out, fma(load(out), splat(decay[r]), load(apart + r * kPanel + v * kLanes)));
    }
  }
}

// As VectorProducts, for words that are pairs, a multiple of kHalfStepWords at a time.
struct AmxProducts {
  static constexpr int64_t kRows = kTileRows;
  int64_t configured = 0;

  AmxProducts() = default;
  AmxProducts(const AmxProducts&) = delete;
  AmxProducts& operator=(const AmxProducts&) = delete;
  ~AmxProducts() { _tile_release(); }

  template <typename Words>
  void multiply(const float* a, int64_t a_stride, const float* b, int64_t words, float* c, int64_t c_stride,
                const float* decay, int64_t rows, int64_t columns) {
    static_assert(kTileVectors == 4, "four registers of sums");
    constexpr decltype(&multiply_amx<1>) kByVectors[kTileVectors] = {multiply_amx<1>, multiply_amx<2>,
                                                                     multiply_amx<3>, multiply_amx<4>};
    if (rows != configured) configure_products(rows);
    configured = rows;
    kByVectors[columns / kLanes - 1](a, a_stride, b, words, c, c_stride, decay, rows);
  }
};

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
