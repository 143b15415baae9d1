// Several rows of integers by weights of 4 bits with AVX2 alone: quantized_int8.h keeps a pack of weights in registers, of
// which there are too few here for more than two rows beside it.
//
// A block of the nibbles of a tile is unpacked to bytes once for all rows, and stays in the first cache; up to four rows at a
// time are multiplied by them. Sums are those of quantized_int8.h, to the bit.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_int8.h"
#include "quantized_linear/quantized_madd.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
#define LB_UNPACKS_INT8 1

// Packs of a block: beside its bytes lies as much of a chunk of x.
constexpr int64_t kBlockPacks = 32;
// Bytes of a pack of a tile: of each of its 8 words kTile.
constexpr int64_t kPackWords = 8, kUnpackedBytes = kPackWords * kTileLine;

// The packs of a block, for rows of a chunk of x.
struct UnpackedBlock {
  const char* bytes;
  const void* scales;                 // [groups, kTile], from that of the first pack on
  const uint8_t* zero_points;         // the same, or null for 8
  const PackBytes* x;                 // the first pack of the first row
  int64_t x_rows;                     // of the chunk
  int64_t packs, of_group, of_first;  // of the block, of a group, and of the first group in the block
};

// Adds the sums of R rows, out[r * kTile + i] for output i.
template <typename T, int R, bool has_zeros>
__attribute__((noinline)) void add_rows(const UnpackedBlock& t, float* out) {
  constexpr int V = static_cast<int>(kTile) / kLanes;
  const char* bytes = t.bytes;
  const T* scales = static_cast<const T*>(t.scales);
  const uint8_t* zero_points = t.zero_points;
  const PackBytes* x = t.x;
  int64_t of_group = t.of_first;
  VF sums[R][V];
  LB_UNROLL for (int r = 0; r < R; ++r) {
    LB_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = load(out + r * kTile + v * kLanes);
  }
  for (int64_t pack = 0; pack < t.packs; ++pack, bytes += kUnpackedBytes, x += t.x_rows) {
    VI pairs[R][V] = {};
    LB_UNROLL for (int i = 0; i < kPackWords; ++i) {
      VI weights[V];
      LB_UNROLL for (int v = 0; v < V; ++v) weights[v] = (VI)load_uint(bytes + i * kTileLine + v * kVecBytes);
      LB_UNROLL for (int r = 0; r < R; ++r) {
        LB_UNROLL for (int v = 0; v < V; ++v) {
          pairs[r][v] = add_words(pairs[r][v], byte_products(weights[v], x[r].words[i]));
          in_turn(pairs[r][v]);
        }
      }
    }
    LB_UNROLL for (int v = 0; v < V; ++v) {
      const VF scale = load(scales + v * kLanes);
      VI zero{};
      if constexpr (has_zeros) zero = __builtin_convertvector(from_uint8(zero_points + v * kLanes), VI);
      LB_UNROLL for (int r = 0; r < R; ++r) {
        const VI start = has_zeros ? zero * x[r].minus_sum : splat_i(8 * x[r].minus_sum);
        const VI sum = start + join_words(pairs[r][v], 1);
        sums[r][v] = fma(__builtin_convertvector(sum, VF), scale * splat(x[r].unit), sums[r][v]);
      }
    }
    if (--of_group == 0) {
      of_group = t.of_group;
      scales += kTile;
      if constexpr (has_zeros) zero_points += kTile;
    }
  }
  LB_UNROLL for (int r = 0; r < R; ++r) {
    LB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kTile + v * kLanes, sums[r][v]);
  }
}

template <typename T, int R>
LB_INLINE void add_rows(const UnpackedBlock& t, float* out) {
  t.zero_points ? add_rows<T, R, true>(t, out) : add_rows<T, R, false>(t, out);
}

// The same of `rows` rows.
template <typename T>
void add_chunk(UnpackedBlock t, int64_t rows, float* out) {
  for (int64_t width; rows > 0; rows -= width, t.x += width, out += width * kTile) {
    width = rows < 4 ? rows : 4;
    if (width == 4) add_rows<T, 4>(t, out);
    if (width == 3) add_rows<T, 3>(t, out);
    if (width == 2) add_rows<T, 2>(t, out);
    if (width == 1) add_rows<T, 1>(t, out);
  }
}

// The nibbles of `packs` packs of a tile as bytes.
void unpack_block(const char* data, int64_t packs, char* to) {
  for (int64_t pack = 0; pack < packs; ++pack, data += W4Int8::kPackBytes, to += kUnpackedBytes) {
    fetch_weights<W4Int8::kPackBytes>(data);
    LB_UNROLL for (int v = 0; v < static_cast<int>(kTile) / kLanes; ++v) {
      VI words[kPackWords];
      load_nibbles(data + v * kVecBytes, words);
      LB_UNROLL for (int i = 0; i < kPackWords; ++i)
          memcpy(to + i * kTileLine + v * kVecBytes, &words[i], kVecBytes);
    }
  }
}

// A chunk of x, of which `lanes` rows lie beside each other and the first `rows` are wanted.
struct Int8Chunk {
  const PackBytes* x;
  int64_t lanes, rows;
};
constexpr int64_t kBlockChunks = 8, kChunkSums = 8 * kTile;

// sums[c * kChunkSums + r * kTile + i]: output i of the tile for row r of chunk c, of up to kBlockChunks. x of the tile is not
// read.
template <typename T>
void unpacked_tile(const Int8Tile& t, const Int8Chunk* chunks, int64_t count, float* sums) {
  alignas(64) char bytes[kBlockPacks * kUnpackedBytes];
  memset(sums, 0, sizeof(float) * static_cast<size_t>(count * kChunkSums));
  const int64_t packs = t.groups * t.packs;
  for (int64_t first = 0; first < packs; first += kBlockPacks) {
    const int64_t some = packs - first < kBlockPacks ? packs - first : kBlockPacks, group = first / t.packs;
    unpack_block(t.data + first * W4Int8::kPackBytes, some, bytes);
    for (int64_t c = 0; c < count; ++c) {
      const Int8Chunk& chunk = chunks[c];
      add_chunk<T>({bytes, static_cast<const T*>(t.scales) + group * kTile,
                    t.zero_points ? t.zero_points + group * kTile : nullptr, chunk.x + first * chunk.lanes,
                    chunk.lanes, some, t.packs, (group + 1) * t.packs - first},
                   chunk.rows, sums + c * kChunkSums);
    }
  }
}

#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
