// Several rows of bf16 by the tiles of AMX, for quantized_linear_cpu_isa.cpp; compiled where there are tiles.
//
// One instruction multiplies a block of a tile of weight by one of a chunk of x (quantized_amx_pack.h) and adds to 16 x 16
// sums in fp32, [row][output]. A *part* is blocks whose products are summed there, because they have one scale; then they
// go by memory to the totals of the chunk, which are in registers while all parts of kMostBlocks blocks come by: for these
// the weight is unpacked once for all rows.
//
// Of rows that are rounded to 8 bits (linear_w4a8) each block is a part: its sums are integers, exact in fp32, and what
// follows is computed in the order of quantized_int8.h, to the same bits.
#pragma once

#include "quantized_linear/quantized_amx_pack.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Registers of sums, one part after the other, and how many parts later they are read from memory: a tile that is stored
// hands nothing to a load before all of it is.
constexpr int kSumTiles = 4, kPartsLater = 2;
constexpr int64_t kTileSums = kTileRows * kTile;
// Blocks of a part: each product waits for the one before, and parts are added up in turn.
constexpr int64_t kPartBlocks = 8;

// How a sum, of row r of a chunk, becomes part of the total.
struct OfW4 {
  static LB_INLINE VF add(VF total, VF sum, VF scale, const float*, int) { return fma(sum, scale, total); }
};
struct OfW8 {
  // In this order: a scale may be among the least floats there are.
  static LB_INLINE VF add(VF total, VF sum, VF scale, const float*, int) {
    return fma(sum * splat(StagedW8::kUnit), scale, total);
  }
};
struct OfRounded {
  static LB_INLINE VF add(VF total, VF sum, VF scale, const float* units, int r) {
    return fma(sum, scale * splat(units[r]), total);
  }
};

// Blocks of a tile of weight as pairs of bf16, in parts.
struct Staged {
  alignas(64) char weight[kMostBlocks * kTileBytes];
  alignas(64) float scales[kMostBlocks * kTile];  // [part][output]
  int64_t parts, begins[kMostBlocks + 1];         // blocks of part p: [begins[p], begins[p + 1])
};

// Blocks [block, block + count).
void stage_parts(const QuantizedTiles& weight, int64_t tile, int64_t block, int64_t count, Staged& to) {
  const int64_t of_group = blocks_of(weight.k) / weight.groups;
  const int64_t most = weight.rounds_x ? 1 : kPartBlocks;
  to.parts = 0;
  for (int64_t at = 0, size; at < count; at += size) {
    const int64_t left = of_group - (block + at) % of_group;
    size = left < most ? left : most;
    if (size > count - at) size = count - at;
    stage(weight, tile, block + at, size, to.weight + at * kTileBytes);
    const int64_t from = (tile * weight.groups + (block + at) / of_group) * kTile;
    LB_DISPATCH_DTYPE(
        weight.scale_dtype, Scale,
        store(to.scales + to.parts * kTile, load(static_cast<const Scale*>(weight.scales) + from)));
    to.begins[to.parts++] = at;
  }
  to.begins[to.parts] = count;
}

// sums [row][output] of a part, in register `tile`.
template <int tile>
LB_INLINE void multiply_part(const char* weight, const char* x, int64_t block_bytes, int64_t blocks,
                             float* sums) {
  constexpr int one = tile % 2, other = 1 - one;
  zero_tile<tile>();
  for (; blocks > 1; blocks -= 2, weight += 2 * kTileBytes, x += 2 * block_bytes) {
    load_tile<6 + one>(weight);
    load_tile<4 + one>(x);
    MultiplyBf16::add<tile, 4 + one, 6 + one>();
    load_tile<6 + other>(weight + kTileBytes);
    load_tile<4 + other>(x + block_bytes);
    MultiplyBf16::add<tile, 4 + other, 6 + other>();
  }
  if (blocks > 0) {
    load_tile<6 + one>(weight);
    load_tile<4 + one>(x);
    MultiplyBf16::add<tile, 4 + one, 6 + one>();
  }
  store_tile<tile>(sums);
}

// A chunk of x from the first staged block on, its units there if it is rounded, and its rows.
struct Chunk {
  const char* x;
  const float* units;
  int64_t rows;
};

// totals [row][output] of a chunk, from zero on where it `is_first`, += its products with the parts, in their order.
// `sums` has room for kSumTiles tiles. Of 16 rows; those behind the chunk's are of nothing.
template <typename S>
void add_chunk(const Staged& staged, const Chunk& chunk, bool is_first, float* sums, float* totals) {
  const int64_t block_bytes = chunk.rows * kPack * 2;
  VF found[kTileRows];
  LB_UNROLL for (int r = 0; r < kTileRows; ++r) found[r] = is_first ? VF{} : load(totals + r * kTile);
  for (int64_t part = 0; part < staged.parts + kPartsLater; ++part) {
    if (part < staged.parts) {
      const int64_t block = staged.begins[part], blocks = staged.begins[part + 1] - block;
      const char* weight = staged.weight + block * kTileBytes;
      const char* x = chunk.x + block * block_bytes;
      float* to = sums + part % kSumTiles * kTileSums;
      switch (part % kSumTiles) {
        case 0:
          multiply_part<0>(weight, x, block_bytes, blocks, to);
          break;
        case 1:
          multiply_part<1>(weight, x, block_bytes, blocks, to);
          break;
        case 2:
          multiply_part<2>(weight, x, block_bytes, blocks, to);
          break;
        default:
          multiply_part<3>(weight, x, block_bytes, blocks, to);
      }
    }
    const int64_t done = part - kPartsLater;
    if (done < 0) continue;
    const float* of = sums + done % kSumTiles * kTileSums;
    // A part is a block where there are any.
    const float* units = chunk.units == nullptr ? nullptr : chunk.units + done * chunk.rows;
    const VF scale = load(staged.scales + done * kTile);
    LB_UNROLL for (int r = 0; r < kTileRows; ++r) found[r] =
        S::add(found[r], load(of + r * kTile), scale, units, r);
  }
  LB_UNROLL for (int r = 0; r < kTileRows; ++r) {
    if (r < chunk.rows) store(totals + r * kTile, found[r]);  // behind them lie those of the next chunk
  }
}

// Rows of x, packed, of which `from` is the first chunk and all chunks are as large.
struct TiledRows {
  const char* from;
  int64_t rows, in_chunk, chunk_bytes;
  const float* units;  // of the first chunk, where x is rounded, else null
};

// totals[row][output] = the products of a tile with the rows.
void sum_tile(const QuantizedTiles& weight, int64_t tile, const TiledRows& x, float* sums, float* totals) {
  Staged staged;
  const int64_t blocks = blocks_of(weight.k), block_bytes = x.in_chunk * kPack * 2;
  const int64_t chunks = (x.rows + x.in_chunk - 1) / x.in_chunk;
  const auto add = weight.rounds_x    ? add_chunk<OfRounded>
                   : weight.bits == 8 ? add_chunk<OfW8>
                                      : add_chunk<OfW4>;
  for (int64_t block = 0, count; block < blocks; block += count) {
    count = blocks - block < kMostBlocks ? blocks - block : kMostBlocks;
    stage_parts(weight, tile, block, count, staged);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const char* from = x.from + chunk * x.chunk_bytes + block * block_bytes;
      const float* units = x.units ? x.units + (chunk * blocks + block) * x.in_chunk : nullptr;
      add(staged, {from, units, x.in_chunk}, block == 0, sums, totals + chunk * x.in_chunk * kTile);
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
  alignas(64) float totals[kMostSummedRows * kTile], sums[kSumTiles * kTileSums] = {};
  load_tile_config({in_chunk, in_chunk, in_chunk, in_chunk, in_chunk, in_chunk, kTileRows, kTileRows});
  for (int64_t row = 0; row < args.rows; row += most) {
    const int64_t rows = args.rows - row < most ? args.rows - row : most;
    const int64_t chunk = row / in_chunk;
    const char* from = packed + chunk * chunk_bytes;
    const float* units = all_units ? all_units + chunk * chunk_units(args.rows, weight.k) : nullptr;
    for (int64_t tile = begin; tile < end; ++tile) {
      sum_tile(weight, tile, {from, rows, in_chunk, chunk_bytes, units}, sums, totals);
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
