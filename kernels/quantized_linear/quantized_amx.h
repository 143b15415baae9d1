// Several rows of bf16 by the tiles of AMX, for quantized_linear_cpu_isa.cpp; compiled where there are tiles.
//
// A *block* is 32 columns. Of a tile of weight (16 outputs) it becomes a register of pairs of bf16, [pair of columns]
// [output][2], in which the integers are exact, less the zero point; of x it lies as it is in memory, [row][32], zero
// beyond the columns there are. One instruction multiplies both and adds to 16 x 16 sums in fp32, [row][output].
//
// x is packed as [chunk][block][row][32]: chunks of up to 16 rows, all of as many, the last filled up with zeros.
// Blocks that have one scale are multiplied together, kMostBlocks of them at most: unpacked once for all rows.
//
// Rows that are rounded to 8 bits (linear_w4a8) lie there as integers, which bf16 has exactly, and behind all chunks their
// units, [chunk][block][row]. Each block is multiplied by itself: its sums are integers, exact in fp32, and what follows is
// computed in the order of quantized_int8.h, to the same bits.
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
// Chunks whose sums are in registers at once, and rows whose sums are in memory.
constexpr int kRegisterChunks = 4;
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
  return chunks_of(rows) * (tiled_chunk_bytes(rows, weight.k) + units);
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

// Of one scale: pairs of bf16 of `blocks` blocks of a tile from `block` on. Returns what these are multiplied by.
LB_INLINE float stage(const QuantizedTiles& weight, int64_t tile, int64_t block, int64_t blocks, char* to) {
  const char* data = static_cast<const char*>(weight.data) + tile * weight.tile_bytes() +
                     block * kPack * kTile * weight.bits / 8;
  if (weight.bits == 8) {
    stage_blocks(StagedW8{}, data, blocks, to);
    return StagedW8::kUnit;
  }
  const int64_t group = block / (blocks_of(weight.k) / weight.groups);
  const int64_t at = (tile * weight.groups + group) * kTile;
  stage_blocks(StagedW4(weight.zero_points ? weight.zero_points + at : nullptr), data, blocks, to);
  return StagedW4::kUnit;
}

// A part of x: chunks that are `chunk_bytes` apart, whose blocks are `block_bytes`.
struct TiledChunks {
  const char* from;
  int64_t chunk_bytes, block_bytes;
};

// Registers from `sums` on, one a chunk, += a block of weight times it.
template <int sums, int C>
LB_INLINE void multiply_block(const char* staged, const TiledChunks& x, int64_t block) {
  constexpr int weight = 6 + sums % 2;
  const char* from = x.from + block * x.block_bytes;
  load_tile<weight>(staged + block * kTileBytes);
  load_tile<4>(from);
  MultiplyBf16::add<sums, 4, weight>();
  if constexpr (C > 1) {
    load_tile<5>(from + x.chunk_bytes);
    MultiplyBf16::add<sums + 1, 5, weight>();
  }
  if constexpr (C > 2) {
    load_tile<4>(from + 2 * x.chunk_bytes);
    MultiplyBf16::add<sums + 2, 4, weight>();
  }
  if constexpr (C > 3) {
    load_tile<5>(from + 3 * x.chunk_bytes);
    MultiplyBf16::add<sums + 3, 5, weight>();
  }
}

// sums [part][chunk][row][output] of `blocks` blocks: one product waits for the last one of the same sums, so of few
// chunks every kParts-th block goes to sums of its own. Returns how many parts there are.
template <int C>
int multiply_staged(const char* staged, int64_t blocks, const TiledChunks& x, float* sums,
                    int64_t chunk_floats) {
  constexpr int kParts = C == 1 ? 4 : C == 2 ? 2 : 1;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t block = 0;
  for (; block + kParts <= blocks; block += kParts) {
    multiply_block<0, C>(staged, x, block);
    if constexpr (C == 2) multiply_block<2, C>(staged, x, block + 1);
    if constexpr (C == 1) {
      multiply_block<1, C>(staged, x, block + 1);
      multiply_block<2, C>(staged, x, block + 2);
      multiply_block<3, C>(staged, x, block + 3);
    }
  }
  for (; block < blocks; ++block) multiply_block<0, C>(staged, x, block);
  const int parts = blocks < kParts ? 1 : kParts;
  _tile_stored(0, sums, 64);
  if (parts * C > 1) _tile_stored(1, sums + chunk_floats, 64);
  if (parts * C > 2) _tile_stored(2, sums + 2 * chunk_floats, 64);
  if (parts * C > 3) _tile_stored(3, sums + 3 * chunk_floats, 64);
  __asm__ volatile("" ::: "memory");
  return parts;
}

// Rows of x, packed, of which `from` is the first chunk and all chunks are as large.
struct TiledRows {
  const char* from;
  int64_t rows, in_chunk, chunk_bytes;
  const float* units;  // of the first chunk, where x is rounded, else null
};

// totals += sums of a block, floats [row][output], each row times its unit.
LB_INLINE void add_units(const float* sums, int64_t rows, const float* units, VF scale, bool is_first,
                         float* totals) {
  for (int64_t r = 0; r < rows; ++r) {
    const VF before = is_first ? VF{} : load(totals + r * kTile);
    store(totals + r * kTile, fma(load(sums + r * kTile), scale * splat(units[r]), before));
  }
}

// totals[row][output] = the products of a tile with the rows, each part of one scale times it.
void sum_tile(const QuantizedTiles& weight, int64_t tile, const TiledRows& x, float* totals) {
  alignas(64) char staged[kMostBlocks * kTileBytes];
  alignas(64) float sums[kRegisterChunks * kTileRows * kTile];
  const int64_t blocks = blocks_of(weight.k), of_group = blocks / weight.groups;
  const int64_t chunks = (x.rows + x.in_chunk - 1) / x.in_chunk, chunk_floats = x.in_chunk * kTile,
                block_bytes = x.in_chunk * 64;
  for (int64_t block = 0, count; block < blocks; block += count) {
    const int64_t left = of_group - block % of_group;
    count = x.units ? 1 : left < kMostBlocks ? left : kMostBlocks;
    const float unit = stage(weight, tile, block, count, staged);
    VF scale{};
    const int64_t at = (tile * weight.groups + block / of_group) * kTile;
    LB_DISPATCH_DTYPE(weight.scale_dtype, Scale, scale = load(static_cast<const Scale*>(weight.scales) + at));
    for (int64_t chunk = 0, width; chunk < chunks; chunk += width) {
      width = chunks - chunk < kRegisterChunks ? chunks - chunk : kRegisterChunks;
      const TiledChunks part = {x.from + chunk * x.chunk_bytes + block * block_bytes, x.chunk_bytes,
                                block_bytes};
      const auto multiply = width == 1   ? multiply_staged<1>
                            : width == 2 ? multiply_staged<2>
                            : width == 3 ? multiply_staged<3>
                                         : multiply_staged<4>;
      const int parts = multiply(staged, count, part, sums, chunk_floats);
      float* to = totals + chunk * chunk_floats;
      if (x.units) {
        const float* units = x.units + (chunk * blocks + block) * x.in_chunk;
        for (int64_t c = 0; c < width; ++c, units += blocks * x.in_chunk)
          add_units(sums + c * chunk_floats, x.in_chunk, units, scale, block == 0, to + c * chunk_floats);
        continue;
      }
      for (int64_t i = 0, floats = width * chunk_floats; i < floats; i += kTile) {
        VF found = load(sums + i);
        if (parts > 1) found += load(sums + floats + i);
        if (parts > 2) found += load(sums + 2 * floats + i) + load(sums + 3 * floats + i);
        found = found * unit * scale;  // in this order: a scale may be among the least floats there are
        store(to + i, block == 0 ? found : load(to + i) + found);
      }
    }
  }
}

// The outputs of tiles [begin, end).
void run_tiled(const QuantizedLinearArgs& args, int64_t begin, int64_t end) {
  const QuantizedTiles& weight = args.weight;
  const int64_t in_chunk = rows_of_chunk(args.rows), chunk_bytes = tiled_chunk_bytes(args.rows, weight.k);
  const char* const packed = static_cast<const char*>(args.packed_x);
  const float* const all_units =
      weight.rounds_x ? reinterpret_cast<const float*>(packed + chunks_of(args.rows) * chunk_bytes) : nullptr;
  const int64_t most = kMostSummedRows / in_chunk * in_chunk;
  alignas(64) float totals[kMostSummedRows * kTile];
  load_tile_config({in_chunk, in_chunk, in_chunk, in_chunk, in_chunk, in_chunk, kTileRows, kTileRows});
  for (int64_t row = 0; row < args.rows; row += most) {
    const int64_t rows = args.rows - row < most ? args.rows - row : most;
    const int64_t chunk = row / in_chunk;
    const char* from = packed + chunk * chunk_bytes;
    const float* units = all_units ? all_units + chunk * chunk_units(args.rows, weight.k) : nullptr;
    for (int64_t tile = begin; tile < end; ++tile) {
      sum_tile(weight, tile, {from, rows, in_chunk, chunk_bytes, units}, totals);
      const int64_t first = tile * kTile;
      bf16* out = static_cast<bf16*>(args.out) + row * args.out_stride + first;
      VF spoiled[1]{};
      const auto write = [&](auto lanes) {
        const VF bias = args.bias ? load(static_cast<const bf16*>(args.bias) + first, lanes) : VF{};
        for (int64_t r = 0; r < rows; ++r) {
          const VF y = load(totals + r * kTile);
          spoiled[0] = fma(y, VF{}, spoiled[0]);
          store(out + r * args.out_stride, args.bias ? y + bias : y, lanes);
        }
      };
      weight.n - first >= kTile ? write(Full{}) : write(static_cast<int>(weight.n - first));
      note_not_finite(spoiled, args.not_finite);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
