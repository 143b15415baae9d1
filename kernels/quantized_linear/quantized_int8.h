// Rows of integers of 8 bits by weights of 4 bits, for linear_w4a8 in quantized_linear_cpu_isa.cpp.
//
// A pack of 32 columns of a row of x is rounded to int8 with one scale, its *unit*. Its product with a pack of weights
// is a sum of integers, which is exact, and is multiplied by the unit times the scale of the weights once per pack.
#pragma once

#include "common/largest.h"
#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_madd.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// A pack of one row, in words of four columns as those of weights that they are multiplied by.
struct PackBytes {
  float unit;
  int32_t minus_sum;  // of its integers
  int32_t words[8];
};

// The order of quantized_limbs.h: a word of weights has in its lower nibbles the columns c, c + 16, c + 1 and c + 17, with
// c = 2 * step, in its upper ones those 8 behind them.
struct W4Int8 : Nibbles {
  typedef PackBytes Element;
  static constexpr bool kIsLimbs = false;
  static constexpr int64_t kPackBytes = kPack * kTile / 2;
  static constexpr int64_t elements(int64_t k) { return (k + kPack - 1) / kPack; }  // of a row of x
};

// ---- x ----

LB_INLINE void interleave(const int8_t (&columns)[kPack], int32_t (&words)[8]) {
#if defined(__SSE2__)
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(columns + kPack / 2));
  const __m128i zipped[2] = {_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)};
  memcpy(words, zipped, sizeof(zipped));
#elif defined(__aarch64__)
  const int8x16_t first = vld1q_s8(columns), second = vld1q_s8(columns + kPack / 2);
  const int8x16_t zipped[2] = {vzip1q_s8(first, second), vzip2q_s8(first, second)};
  memcpy(words, zipped, sizeof(zipped));
#else
  int8_t zipped[kPack];
  for (int i = 0; i < kPack / 2; ++i) {
    zipped[2 * i] = columns[i];
    zipped[2 * i + 1] = columns[i + kPack / 2];
  }
  memcpy(words, zipped, sizeof(zipped));
#endif
}

LB_INLINE int32_t sum_of_lanes(VI v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__aarch64__)
  return vaddvq_s32((int32x4_t)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// v rounded to nearest, ties to even, of magnitudes up to 127.
LB_INLINE VI nearest(VF v) {
#if defined(__aarch64__)
  return (VI)vcvtnq_s32_f32((float32x4_t)v);
#else
  // 1.5 * 2^23 leaves a number of small magnitude rounded to an integer in the lowest bits.
  return (VI)as_uint(v + splat(12582912.0f)) << 24 >> 24;
#endif
}

// A pack as integers. Returns their unit: NaN where a value is not finite, for all that is multiplied by it.
template <typename T>
LB_INLINE float round_pack(const T* x, VI (&integers)[kPack / kLanes]) {
  const float largest = largest_of(x, kPack);
  const bool is_finite = largest == largest;
  const VF factor = splat(127.0f / largest);
  LB_UNROLL for (int i = 0; i < kPack / kLanes; ++i) integers[i] =
      is_finite ? nearest(load(x + i * kLanes) * factor) : VI{};
  return largest / 127.0f;
}

template <typename T>
LB_INLINE void pack_int8(const T* x, PackBytes& to) {
  VI integers[kPack / kLanes], total{};
  to.unit = round_pack(x, integers);
  int8_t columns[kPack];
  LB_UNROLL for (int i = 0; i < kPack / kLanes; ++i) {
    typedef int8_t Narrow __attribute__((vector_size(kLanes)));
    const Narrow narrow = __builtin_convertvector(integers[i], Narrow);
    memcpy(columns + i * kLanes, &narrow, sizeof(narrow));
    total += integers[i];
  }
  to.minus_sum = -sum_of_lanes(total);
  interleave(columns, to.words);
}

// One row of x of `rows`, whose k columns are whole packs.
template <typename T>
void pack_int8_row(const T* x, int64_t k, int64_t rows, PackBytes* to) {
  for (int64_t pack = 0; pack < k / kPack; ++pack) pack_int8(x + pack * kPack, to[pack * rows]);
}

// ---- products ----

// Four products of each lane, of an unsigned byte up to 15 and a signed one, added to `sum`.
#if defined(__AVX512VNNI__)
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  VI other{};  // halves the chain of additions, whose latency other rows have to hide
  LB_UNROLL for (int i = 0; i < 8; i += 2) {
    sum = (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights[i], _mm512_set1_epi32(words[i]));
    other = (VI)_mm512_dpbusd_epi32((__m512i)other, (__m512i)weights[i + 1], _mm512_set1_epi32(words[i + 1]));
  }
  return sum + other;
}
#elif defined(__AVX512F__)
// Pairs of products of a whole pack stay below 2^15.
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  __m512i pairs = _mm512_setzero_si512();
  LB_UNROLL for (int i = 0; i < 8; ++i) pairs =
      _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)weights[i], _mm512_set1_epi32(words[i])));
  return sum + (VI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#elif defined(__AVX2__)
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  VI pairs{};
  LB_UNROLL for (int i = 0; i < 8; ++i) {
    pairs = add_words(pairs, byte_products(weights[i], words[i]));
    in_turn(pairs);
  }
  return sum + join_words(pairs, 1);
}
#elif defined(__ARM_FEATURE_DOTPROD)
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  const int8x16_t low = vld1q_s8(reinterpret_cast<const int8_t*>(words));
  const int8x16_t high = vld1q_s8(reinterpret_cast<const int8_t*>(words + 4));
  int32x4_t s = (int32x4_t)sum;
  s = vdotq_laneq_s32(s, (int8x16_t)weights[0], low, 0);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[1], low, 1);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[2], low, 2);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[3], low, 3);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[4], high, 0);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[5], high, 1);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[6], high, 2);
  s = vdotq_laneq_s32(s, (int8x16_t)weights[7], high, 3);
  return (VI)s;
}
#elif defined(__aarch64__)
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  int16x8_t low = vdupq_n_s16(0), high = vdupq_n_s16(0);
  LB_UNROLL for (int i = 0; i < 8; ++i) {
    const int8x16_t w = (int8x16_t)weights[i], x = (int8x16_t)vdupq_n_s32(words[i]);
    low = vmlal_s8(low, vget_low_s8(w), vget_low_s8(x));
    high = vmlal_high_s8(high, w, x);
  }
  return sum + (VI)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}
#else
LB_INLINE VI pack_products(VI sum, const VI (&weights)[8], const int32_t (&words)[8]) {
  LB_UNROLL for (int i = 0; i < 8; ++i) {
    const uint32_t word = static_cast<uint32_t>(words[i]);
    const auto column = [&](int at) { return static_cast<int32_t>(static_cast<int8_t>(word >> (8 * at))); };
#if defined(__SSE2__)
    // Columns 0 and 2, 1 and 3, as pairs of 16 bits.
    const auto pair = [&](int at) { return (column(at) & 0xffff) | (column(at + 2) << 16); };
    const __m128i w = (__m128i)weights[i], even = _mm_set1_epi32(0x00ff00ff);
    sum += (VI)_mm_madd_epi16(_mm_and_si128(w, even), _mm_set1_epi32(pair(0)));
    sum += (VI)_mm_madd_epi16(_mm_and_si128(_mm_srli_epi32(w, 8), even), _mm_set1_epi32(pair(1)));
#else
    LB_UNROLL for (int at = 0; at < 4; ++at) sum += ((weights[i] >> (8 * at)) & 15) * column(at);
#endif
  }
  return sum;
}
#endif

// The nibbles of a pack of kLanes outputs as bytes.
LB_INLINE void load_nibbles(const char* data, VI (&to)[8]) {
  LB_UNROLL for (int step = 0; step < 4; ++step) {
    const VU v = load_uint(data + step * kTileLine);
    to[step] = (VI)(v & 0x0f0f0f0fu);
#if defined(__aarch64__)
    to[4 + step] = (VI)vshrq_n_u8((uint8x16_t)v, 4);
#else
    to[4 + step] = (VI)((v >> 4) & 0x0f0f0f0fu);
#endif
  }
}

struct Int8Tile {
  const char* data;
  const void* scales;          // [groups, kTile]
  const uint8_t* zero_points;  // [groups, kTile], or null for 8
  const PackBytes* x;
  int64_t x_rows, groups, packs;  // packs of a group
};

// out[r * kTile + i]: output i of a tile for row r of the first R.
template <typename T, int R, bool has_zeros>
__attribute__((noinline)) void int8_pass(const Int8Tile& t, float* out) {
  constexpr int V = static_cast<int>(kTile) / kLanes;
  const PackBytes* x = t.x;
  const T* scales = static_cast<const T*>(t.scales);
  const char* data = t.data;
  VF sums[R][V] = {};
  for (int64_t group = 0; group < t.groups; ++group, scales += kTile) {
    VF scale[V];
    VI zero[V];
    fetch_ahead(reinterpret_cast<const char*>(scales) + kFar / 8);
    LB_UNROLL for (int v = 0; v < V; ++v) {
      scale[v] = load(scales + v * kLanes);
      zero[v] = splat_i(8);
      if constexpr (has_zeros) {
        const VF zeros = from_uint8(t.zero_points + group * kTile + v * kLanes);
        zero[v] = __builtin_convertvector(zeros, VI);
      }
    }
    for (int64_t pack = 0; pack < t.packs; ++pack, data += W4Int8::kPackBytes, x += t.x_rows) {
      fetch_weights<W4Int8::kPackBytes>(data);
      LB_UNROLL for (int v = 0; v < V; ++v) {
        VI weights[8];
        load_nibbles(data + v * kVecBytes, weights);
        LB_UNROLL for (int r = 0; r < R; ++r) {
          const VI start = has_zeros ? zero[v] * x[r].minus_sum : splat_i(8 * x[r].minus_sum);
          const VI sum = pack_products(start, weights, x[r].words);
          sums[r][v] = fma(__builtin_convertvector(sum, VF), scale[v] * splat(x[r].unit), sums[r][v]);
        }
      }
    }
  }
  LB_UNROLL for (int r = 0; r < R; ++r) {
    LB_UNROLL for (int v = 0; v < V; ++v) store(out + r * kTile + v * kLanes, sums[r][v]);
  }
}

template <typename T, int R>
LB_INLINE void int8_pass(const Int8Tile& t, float* out) {
  t.zero_points ? int8_pass<T, R, true>(t, out) : int8_pass<T, R, false>(t, out);
}

// out[row * kTile + i]: output i of a tile for each of X rows of x, as many at a time as leave registers for their sums.
template <typename T, int X>
void int8_tile(Int8Tile t, float* out) {
#if defined(__AVX512F__)
  int8_pass<T, X>(t, out);
#else
  constexpr int kMost = kLanes == 4 ? 4 : 2;
  for (int row = 0, width; row < X; row += width, t.x += width, out += width * kTile) {
    width = X - row >= kMost ? kMost : X - row >= 2 ? 2 : 1;
    width == 1 ? int8_pass<T, 1>(t, out) : width == 2 ? int8_pass<T, 2>(t, out) : int8_pass<T, kMost>(t, out);
  }
#endif
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
