// Limbs (quantized_limbs.h) with AVX2 alone, where no instruction sums four products of bytes.
//
// Weights of 4 bits are multiplied as bytes: pairs of a whole pack stay below 2^15, so that those of its words are added up in
// 16 bits, and joined once a pack. Those of 8 bits are widened to 16 and multiplied by the two upper limbs at once, as one
// number of 16 bits: nothing saturates, and a pack takes two instructions a word.
#pragma once

#include "common/vec.h"
#include "quantized_linear/quantized_limbs.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(LB_LIMBS_BY_MADD)

LB_INLINE VI add_words(VI a, VI b) { return (VI)_mm256_add_epi16((__m256i)a, (__m256i)b); }
// Pairs of products of unsigned and signed bytes.
LB_INLINE VI byte_products(VI weights, int32_t limbs) {
  return (VI)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(limbs));
}
// Sums of two products of 16 bits.
LB_INLINE VI word_products(VI words, int32_t pair) {
  return (VI)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi32(pair));
}
LB_INLINE VI odd_bytes(VU w) { return (VI)_mm256_srai_epi16((__m256i)w, 8); }
LB_INLINE VI even_bytes(VU w) { return odd_bytes((VU)_mm256_slli_epi16((__m256i)w, 8)); }

// Sums are finished one after the other: reordered, their terms do not fit the registers.
LB_INLINE void in_turn(VI& sum) { __asm__("" : "+x"(sum)); }

// The sums of pairs, each `times` as much.
LB_INLINE VI join_words(VI pairs, int32_t times) { return word_products(pairs, times << 16 | times); }

// Sums over the pack at `data` of kLanes outputs, of the weights as integers times R rows of x.
LB_INLINE void limb_products(W8Limbs, const char* data, const PackLimbs* x, VF (&out)[1]) {
  VI upper{}, low{};
  if (x->has_low) {
    LB_UNROLL for (int i = 0; i < 8; ++i) {
      const VU w = load_uint(data + i * kTileLine);
      const VI even = even_bytes(w), odd = odd_bytes(w);
      upper += word_products(even, x->upper[2 * i]) + word_products(odd, x->upper[2 * i + 1]);
      low += word_products(even, x->low[2 * i]) + word_products(odd, x->low[2 * i + 1]);
      in_turn(upper);
      in_turn(low);
    }
  } else {
    LB_UNROLL for (int i = 0; i < 8; ++i) {
      const VU w = load_uint(data + i * kTileLine);
      upper +=
          word_products(even_bytes(w), x->upper[2 * i]) + word_products(odd_bytes(w), x->upper[2 * i + 1]);
      in_turn(upper);
    }
  }
  out[0] = __builtin_convertvector(upper, VF);
  if (x->has_low) out[0] = fma(__builtin_convertvector(low, VF), splat(1.0f / 256), out[0]);
  out[0] = out[0] * splat(x->unit);
}

template <int R>
LB_INLINE void limb_products(W4Limbs, const char* data, const PackLimbs* x, VF (&out)[R]) {
  VI weights[8];
  LB_UNROLL for (int step = 0; step < 4; ++step) {
    const VU v = load_uint(data + step * kTileLine);
    weights[step] = (VI)(v & 0x0f0f0f0fu);
    weights[4 + step] = (VI)((v >> 4) & 0x0f0f0f0fu);
  }
  LB_UNROLL for (int r = 0; r < R; ++r) {
    VI high{}, middle{};
    LB_UNROLL for (int i = 0; i < 8; ++i) {
      high = add_words(high, byte_products(weights[i], x[r].upper[i]));
      middle = add_words(middle, byte_products(weights[i], x[r].upper[8 + i]));
      in_turn(high);
      in_turn(middle);
    }
    const VI upper = join_words(high, 256) + join_words(middle, 1) + splat_i(x[r].start);
    out[r] = __builtin_convertvector(upper, VF);
    if (x[r].has_low) {
      VI low{};
      LB_UNROLL for (int i = 0; i < 8; ++i) low = add_words(low, byte_products(weights[i], x[r].low[i]));
      const VI joined = join_words(low, 1) + splat_i(x[r].low_start);
      out[r] = fma(__builtin_convertvector(joined, VF), splat(1.0f / 256), out[r]);
    }
    out[r] = out[r] * splat(x[r].unit);
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
  constexpr int V = static_cast<int>(kTile) / kLanes;
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
#pragma GCC unroll 1
      for (int v = 0; v < V; ++v) {  // unrolled, it would keep all of x in registers that there are not
        VF products[R];
        limb_products(S{}, data + v * kVecBytes, x, products);
        LB_UNROLL for (int r = 0; r < R; ++r) sums[v][r] = fma(products[r], scale[v], sums[v][r]);
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
