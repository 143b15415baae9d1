// x and weights as the tiles of AMX take them, for quantized_amx.h.
//
// A *block* is 32 columns. Of a tile of weight (16 outputs) it becomes a register of pairs of bf16, [pair of columns]
// [output][2], in which the integers are exact, less the zero point; of x it lies as it is in memory, [row][32], zero
// beyond the columns there are.
//
// x is packed as [chunk][block][row][32]: chunks of up to 16 rows, all of as many, the last filled up with zeros. Rows that
// are rounded to 8 bits (linear_w4a8) lie there as integers, which bf16 has exactly, and behind all chunks their units,
// [chunk][block][row].
#pragma once

#include "common/prefetch.h"
#include "common/tiles.h"
#include "quantized_linear/quantized_int8.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Fewer rows are faster by vectors: taking integers out of their bytes is most of the work then.
constexpr int64_t kLeastTiledRowsOfW8 = 4, kLeastTiledRowsOfW4 = 3, kLeastTiledRowsOfW4A8 = 17;
// 16 KB of pairs, in the first cache beside as many of x.
constexpr int64_t kMostBlocks = 16;
// Rows whose sums are in memory.
constexpr int64_t kMostSummedRows = 256;

LB_INLINE int64_t blocks_of(int64_t k) { return (k + kPack - 1) / kPack; }
LB_INLINE int64_t chunks_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
LB_INLINE int64_t rows_of_chunk(int64_t rows) { return (rows + chunks_of(rows) - 1) / chunks_of(rows); }

// Whether rows of x are multiplied by tiles.
LB_INLINE bool is_tiled(DType dtype, const QuantizedTiles& weight, int64_t rows) {
  // Of integers any order of sums has the same bits.
  if (weight.order == Order::of_one_row && !weight.rounds_x) return false;
  return dtype == DType::bf16 && rows >= (weight.rounds_x    ? kLeastTiledRowsOfW4A8
                                          : weight.bits == 8 ? kLeastTiledRowsOfW8
                                                             : kLeastTiledRowsOfW4);
}

// Of a chunk, and of its units.
int64_t tiled_chunk_bytes(int64_t rows, int64_t k) { return blocks_of(k) * rows_of_chunk(rows) * kPack * 2; }
int64_t chunk_units(int64_t rows, int64_t k) { return blocks_of(k) * rows_of_chunk(rows); }

int64_t tiled_bytes(const QuantizedTiles& weight, int64_t rows) {
  const int64_t units =
      weight.rounds_x ? chunk_units(rows, weight.k) * static_cast<int64_t>(sizeof(float)) : 0;
  // The units of 16 rows are read together.
  return chunks_of(rows) * (tiled_chunk_bytes(rows, weight.k) + units) + 64;
}

// Chunks [begin, end) of x.
void pack_tiled(const bf16* x, int64_t rows, int64_t k, int64_t begin, int64_t end, bf16* to) {
  const int64_t in_chunk = rows_of_chunk(rows);
  to += begin * tiled_chunk_bytes(rows, k) / 2;
  for (int64_t row = begin * in_chunk; row < end * in_chunk; row += in_chunk) {
    for (int64_t at = 0; at < k; at += kPack) {
      const auto left = static_cast<unsigned>(k - at < kPack ? k - at : kPack);
      for (int64_t r = row; r < row + in_chunk; ++r, to += kPack) {
        const __mmask32 there = r < rows ? 0xffffffffu >> (32 - left) : 0u;
        const bf16* from = r < rows ? x + r * k + at : x;
        if (r < rows) watch(from, static_cast<int64_t>(left * sizeof(bf16)));
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(there, from));
      }
    }
  }
}

// The same of x rounded to integers.
void pack_tiled_int8(const bf16* x, int64_t rows, int64_t k, int64_t begin, int64_t end, bf16* to) {
  const int64_t in_chunk = rows_of_chunk(rows), chunk_bytes = tiled_chunk_bytes(rows, k);
  float* units = reinterpret_cast<float*>(reinterpret_cast<char*>(to) + chunks_of(rows) * chunk_bytes) +
                 begin * chunk_units(rows, k);
  to += begin * chunk_bytes / 2;
  for (int64_t row = begin * in_chunk; row < end * in_chunk; row += in_chunk) {
    for (int64_t at = 0; at < k; at += kPack) {
      for (int64_t r = row; r < row + in_chunk; ++r, to += kPack, ++units) {
        VI integers[kPack / kLanes] = {};
        *units = r < rows ? round_pack(x + r * k + at, integers) : 0.0f;
        LB_UNROLL for (int i = 0; i < kPack / kLanes; ++i)
            store(to + i * kLanes, __builtin_convertvector(integers[i], VF));
      }
    }
  }
}

// How lines of weight become lines of pairs of bf16, in their order.
//
// Integers of 8 bits are multiplied by 2^24, which `kUnit` takes back: as the highest byte of a word they are converted
// without a shift. Both are exact.
struct StagedW8 {
  static constexpr int64_t kBytes = W8::kBytes;
  static constexpr float kUnit = 0x1p-24f;

  LB_INLINE void step(const char* data, int64_t step, char* to) const {
    to += step * 4 * kTileLine;
    line(_mm512_loadu_si512(data), to);
    line(_mm512_loadu_si512(data + kTileLine), to + 2 * kTileLine);
  }

 private:
  // Byte `byte` of each word as a float in the higher or the lower half of it: the other half is zero.
  template <int byte>
  static LB_INLINE __m512i highest(__m512i words) {
    const __m512i order = _mm512_set4_epi32(0x0c808080 | byte << 24, 0x08808080 | byte << 24,
                                            0x04808080 | byte << 24, 0x00808080 | byte << 24);
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_shuffle_epi8(words, order)));
  }
  template <int byte>
  static LB_INLINE __m512i pair(__m512i words) {
    return _mm512_or_si512(highest<byte + 1>(words), _mm512_srli_epi32(highest<byte>(words), 16));
  }
  static LB_INLINE void line(__m512i words, char* to) {
    _mm512_store_si512(to, pair<0>(words));
    _mm512_store_si512(to + kTileLine, pair<2>(words));
  }
};

struct StagedW4 {
  static constexpr int64_t kBytes = W4::kBytes;
  static constexpr float kUnit = 1.0f;
  __m512i zero_points;  // in both halves of each word

  explicit StagedW4(const uint8_t* zeros) {
    const __m128i bytes =
        zeros == nullptr ? _mm_set1_epi8(8) : _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
    const __m512i words = _mm512_cvtepu8_epi32(bytes);
    zero_points = _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
  }

  LB_INLINE void step(const char* data, int64_t step, char* to) const {
    to += step * kTileLine;
    const __m512i words = _mm512_loadu_si512(data);
    store<0>(words, to);
    store<1>(words, to);
    store<2>(words, to);
    store<3>(words, to);
  }

 private:
  template <int j>
  LB_INLINE void store(__m512i words, char* to) const {
    // -16 to 15 as bf16, by the lowest five bits, which are all that the permutation looks at.
    const VPairs table = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                          0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                          0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                          0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    const __m512i nibbles = _mm512_and_si512(_mm512_srli_epi16(words, 4 * j), _mm512_set1_epi16(15));
    const __m512i pairs = _mm512_permutexvar_epi16(_mm512_sub_epi16(nibbles, zero_points), (__m512i)table);
    _mm512_store_si512(to + j * 4 * kTileLine, pairs);
  }
};

template <typename S>
LB_INLINE void stage_blocks(const S& staged, const char* data, int64_t blocks, char* to) {
  for (int64_t block = 0; block < blocks; ++block, to += kTileBytes) {
    LB_UNROLL for (int64_t step = 0; step < kPack / kStep; ++step, data += S::kBytes) {
      fetch_weights<S::kBytes>(data);
      staged.step(data, step, to);
    }
  }
  // Loads of tiles are no reads to the compiler.
  __asm__ volatile("" ::: "memory");
}

// Pairs of bf16 of `blocks` blocks of a tile from `block` on, which have one zero point each output.
LB_INLINE void stage(const QuantizedTiles& weight, int64_t tile, int64_t block, int64_t blocks, char* to) {
  const char* data = static_cast<const char*>(weight.data) + tile * weight.tile_bytes() +
                     block * kPack * kTile * weight.bits / 8;
  if (weight.bits == 8) return stage_blocks(StagedW8{}, data, blocks, to);
  const int64_t group = block / (blocks_of(weight.k) / weight.groups);
  const int64_t at = (tile * weight.groups + group) * kTile;
  stage_blocks(StagedW4(weight.zero_points ? weight.zero_points + at : nullptr), data, blocks, to);
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
