// Limbs (quantized_limbs.h) with AVX2 alone, where no instruction sums four products of bytes.
//
// Weights of 4 bits are multiplied as bytes: pairs of a whole pack stay below 2^15, so that those of its words are added up in
// 16 bits, and joined once a pack. Those of 8 bits are widened to 16 and multiplied by the two upper limbs at once, as one
// number of 16 bits: nothing saturates, and a pack takes two instructions a word.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_limbs.h"
#include "quantized_linear/quantized_madd.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(LB_LIMBS_BY_MADD)

LB_INLINE VI odd_bytes(VU w) { return (VI)_mm256_srai_epi16((__m256i)w, 8); }
LB_INLINE VI even_bytes(VU w) { return odd_bytes((VU)_mm256_slli_epi16((__m256i)w, 8)); }

// Vectors of a tile: a word of x is read once for all of them.
constexpr int kTileVectors = static_cast<int>(kTile) / kLanes;

LB_INLINE VU tile_line(const char* data, int line, int v) {
  return load_uint(data + line * kTileLine + v * kVecBytes);
}

// The sum of the two upper limbs of a pack of a row, with that of its lowest where it has some.
template <typename Low>
LB_INLINE VF with_low(VI upper, const PackLimbs& x, const Low& low) {
  VF sum = __builtin_convertvector(upper, VF);
  if (x.has_low) sum = fma(__builtin_convertvector(low(), VF), splat(1.0f / 256), sum);
  return sum * splat(x.unit);
}

// Sums over the pack at `data`, of the weights of a tile as integers times R rows of x.
LB_INLINE void limb_products(W8Limbs, const char* data, const PackLimbs* x, VF (&out)[kTileVectors][1]) {
  const auto products = [&](const int32_t (&words)[16],
                            VI(&sums)[kTileVectors]) __attribute__((always_inline)) {
    LB_UNROLL for (int i = 0; i < 8; ++i) {
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
        const VU w = tile_line(data, i, v);
        sums[v] += word_products(even_bytes(w), words[2 * i]) + word_products(odd_bytes(w), words[2 * i + 1]);
        in_turn(sums[v]);
      }
    }
  };
  VI upper[kTileVectors] = {}, low[kTileVectors] = {};
  products(x->upper, upper);
  if (x->has_low) products(x->low, low);
  LB_UNROLL for (int v = 0; v < kTileVectors; ++v) out[v][0] = with_low(upper[v], *x, [&] { return low[v]; });
}

template <int R>
LB_INLINE void limb_products(W4Limbs, const char* data, const PackLimbs* x, VF (&out)[kTileVectors][R]) {
  VI high[kTileVectors][R] = {}, middle[kTileVectors][R] = {};
  const auto add = [](VI& sum, VI weights, int32_t limbs) __attribute__((always_inline)) {
    sum = add_words(sum, byte_products(weights, limbs));
    in_turn(sum);
  };
  LB_UNROLL for (int line = 0; line < 4; ++line) {
    VI first[kTileVectors], second[kTileVectors];
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      const VU w = tile_line(data, line, v);
      first[v] = (VI)(w & 0x0f0f0f0fu);
      second[v] = (VI)((w >> 4) & 0x0f0f0f0fu);
    }
    LB_UNROLL for (int r = 0; r < R; ++r) {
      const int32_t* limbs = x[r].upper + line;
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) add(high[v][r], first[v], limbs[0]);
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) add(high[v][r], second[v], limbs[4]);
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) add(middle[v][r], first[v], limbs[8]);
      LB_UNROLL for (int v = 0; v < kTileVectors; ++v) add(middle[v][r], second[v], limbs[12]);
    }
  }
  LB_UNROLL for (int r = 0; r < R; ++r) {
    VI low[kTileVectors] = {};
    if (x[r].has_low) {
      LB_UNROLL for (int line = 0; line < 4; ++line) {
        LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
          const VU w = tile_line(data, line, v);
          add(low[v], (VI)(w & 0x0f0f0f0fu), x[r].low[line]);
          add(low[v], (VI)((w >> 4) & 0x0f0f0f0fu), x[r].low[4 + line]);
        }
      }
    }
    LB_UNROLL for (int v = 0; v < kTileVectors; ++v) {
      const VI upper = join_words(high[v][r], 256) + join_words(middle[v][r], 1) + splat_i(x[r].start);
      out[v][r] = with_low(upper, x[r], [&] { return join_words(low[v], 1) + splat_i(x[r].low_start); });
    }
  }
}

// A tile of weight, and rows of x.
struct LimbTile {
  const char* data;
  const void* scales;          // [groups, kTile]
  const uint8_t* zero_points;  // [groups, kTile], or null for 8
  const PackLimbs* x;
  const float* x_sums;            // [groups, x_rows], where there are zero points
  int64_t x_rows, groups, packs;  // packs of a group
};

// out[r * kTile + i]: output i of the tile for row r of the first R.
template <typename S, typename T, int R>
__attribute__((noinline)) void limb_pass(const LimbTile& t, float* out) {
  constexpr int V = kTileVectors;
  const PackLimbs* x = t.x;
  const T* scales = static_cast<const T*>(t.scales);
  const char* data = t.data;
  VF sums[V][R] = {};
  for (int64_t group = 0; group < t.groups; ++group, scales += kTile) {
    VF scale[V];
    fetch_ahead(reinterpret_cast<const char*>(scales) + kFar / 8);
    LB_UNROLL for (int v = 0; v < V; ++v) {
      scale[v] = load(scales + v * kLanes);
      if (!t.zero_points) continue;
      const VF zeros = from_uint8(t.zero_points + group * kTile + v * kLanes);
      const VF offset = (splat(8.0f) - zeros) * scale[v];
      LB_UNROLL for (int r = 0; r < R; ++r) sums[v][r] =
          fma(offset, splat(t.x_sums[group * t.x_rows + r]), sums[v][r]);
    }
    for (int64_t pack = 0; pack < t.packs; ++pack, data += S::kPackBytes, x += t.x_rows) {
      fetch_weights<S::kPackBytes>(data);
      VF products[V][R];
      limb_products(S{}, data, x, products);
      LB_UNROLL for (int v = 0; v < V; ++v) {
        LB_UNROLL for (int r = 0; r < R; ++r) sums[v][r] = fma(products[v][r], scale[v], sums[v][r]);
      }
    }
  }
  LB_UNROLL for (int v = 0; v < V; ++v) {
    LB_UNROLL for (int r = 0; r < R; ++r) store(out + r * kTile + v * kLanes, sums[v][r]);
  }
}

// out[row * kTile + i]: output i of a tile for each of X rows of x: of bytes two at a time, of words one.
template <typename S, typename T, int X>
void limb_tile(LimbTile t, float* out) {
  constexpr int kMost = S::kIsOfWords ? 1 : 2;
  int row = 0;
  const auto next = [&](auto pass, int rows) {
    pass(t, out);
    row += rows;
    t.x += rows;
    if (t.x_sums) t.x_sums += rows;
    out += rows * kTile;
  };
  while (row + kMost <= X) next(limb_pass<S, T, kMost>, kMost);
  if constexpr (X % kMost != 0) next(limb_pass<S, T, 1>, 1);
}

#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
