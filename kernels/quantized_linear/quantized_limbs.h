// Rows of bf16, with AVX2 and on aarch64 also of f16, by weights as integers: two or three products of bytes take the
// place of four of floats.
//
// A pack of columns of a row of x is scaled by a power of two to integers, the largest of which has 23 or 22 bits: a
// bf16 of at least 2^-15 of its magnitude is exact, and a smaller one is rounded. Each integer is split into three
// signed limbs of eight bits, whose products with weights are summed exactly. In most packs (2 of 3 of a normal
// distribution) the lowest limbs are all zero, and left out.
#pragma once

#include "common/largest.h"
#include "common/vec.h"
#include "quantized_linear/quantized_linear.h"
#include "quantized_linear/quantized_steps.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512BF16__)  // and VNNI; see cpu_features.cpp
#define LB_LIMBS 1
// What an integer of a weight is more than what it stands for, because the product takes unsigned ones.
constexpr int32_t kOffsetOfW8 = 128;

LB_INLINE VI to_nearest(VF v) { return (VI)_mm512_cvtps_epi32(v); }
LB_INLINE int32_t sum_words(VI v) { return _mm512_reduce_add_epi32((__m512i)v); }
LB_INLINE bool has_bits(VI v) { return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0; }
// The lowest bytes of 16 integers.
typedef __m128i VBytes;
LB_INLINE VBytes low_bytes(const VI* v) { return _mm512_cvtepi32_epi8((__m512i)v[0]); }
LB_INLINE VBytes zip_low(VBytes a, VBytes b) { return _mm_unpacklo_epi8(a, b); }
LB_INLINE VBytes zip_high(VBytes a, VBytes b) { return _mm_unpackhi_epi8(a, b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define LB_LIMBS 1
#define LB_LIMBS_BY_MADD 1
constexpr int32_t kOffsetOfW8 = 0;

LB_INLINE VI to_nearest(VF v) { return (VI)_mm256_cvtps_epi32(v); }
LB_INLINE int32_t sum_words(VI v) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
LB_INLINE bool has_bits(VI v) { return _mm256_testz_si256((__m256i)v, (__m256i)v) == 0; }
// 16 integers that 16 bits hold.
LB_INLINE __m256i low_words(const VI* v) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]), 0xd8);
}
typedef __m128i VBytes;
LB_INLINE VBytes low_bytes(const VI* v) {
  const __m256i words = low_words(v);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
LB_INLINE VBytes zip_low(VBytes a, VBytes b) { return _mm_unpacklo_epi8(a, b); }
LB_INLINE VBytes zip_high(VBytes a, VBytes b) { return _mm_unpackhi_epi8(a, b); }
LB_INLINE void store_words(const VI* v, __m128i* to) {
  const __m256i words = low_words(v);
  memcpy(to, &words, sizeof(words));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define LB_LIMBS 1
constexpr int32_t kOffsetOfW8 = 0;

LB_INLINE VI to_nearest(VF v) { return (VI)vcvtnq_s32_f32((float32x4_t)v); }
LB_INLINE int32_t sum_words(VI v) { return vaddvq_s32((int32x4_t)v); }
LB_INLINE bool has_bits(VI v) { return vmaxvq_u32((uint32x4_t)v) != 0; }
typedef int8x16_t VBytes;
LB_INLINE VBytes low_bytes(const VI* v) {
  const auto words = [](VI a, VI b) { return vuzp1q_s16((int16x8_t)a, (int16x8_t)b); };
  return vuzp1q_s8((int8x16_t)words(v[0], v[1]), (int8x16_t)words(v[2], v[3]));
}
LB_INLINE VBytes zip_low(VBytes a, VBytes b) { return vzip1q_s8(a, b); }
LB_INLINE VBytes zip_high(VBytes a, VBytes b) { return vzip2q_s8(a, b); }
#endif

#if defined(LB_LIMBS)
// A pack of one row. A word has four columns, as the words of weights that it is multiplied by.
struct PackLimbs {
  float unit;  // of the sums of the upper two limbs, the upper one counting 256 times
  int32_t start,
      low_start;  // what sums begin with: weights are more than what they stand for, none below zero
  int32_t has_low;
#if defined(LB_LIMBS_BY_MADD)
  int32_t upper[16], low[16];  // see quantized_limbs_madd.h
#else
  int32_t high[8], middle[8], low[8];
#endif
};

// The largest number of three limbs.
constexpr float kMostLimbs = 127 * 65536 + 127 * 256 + 127;

// The largest power of two by which a number of this magnitude has three limbs.
LB_INLINE float power_for(float largest) {
  uint32_t bits;
  memcpy(&bits, &largest, sizeof(bits));
  bits = (127 + 22 + 127 - (bits >> 23)) << 23;
  float power;
  memcpy(&power, &bits, sizeof(power));
  return power * largest > kMostLimbs ? power / 2 : power;
}

LB_INLINE VI lowest_limb(VI v) { return (v << 24) >> 24; }

// Vectors of a pack.
constexpr int kPackVectors = static_cast<int>(kPack) / kLanes;

LB_INLINE VI total(const VI (&v)[kPackVectors]) {
  VI sum = v[0];
  LB_UNROLL for (int i = 1; i < kPackVectors; ++i) sum += v[i];
  return sum;
}

// NaN for all that is summed where a value is not finite: quantized_linear_cpu.cpp multiplies such a row again.
template <typename S, typename T>
void pack_limbs(const T* x, PackLimbs& to) {
  const float largest = largest_of(x, kPack);
  const bool is_finite = largest == largest;
  const float power = is_finite ? power_for(largest) : 1.0f;
  VI upper[kPackVectors], middle[kPackVectors], low[kPackVectors], all_low{};
  LB_UNROLL for (int i = 0; i < kPackVectors; ++i) {
    const VI v = is_finite ? to_nearest(load(x + i * kLanes) * splat(power)) : VI{};
    low[i] = lowest_limb(v);
    upper[i] = (v - low[i]) >> 8;
    middle[i] = lowest_limb(upper[i]);
    all_low |= low[i];
  }
  to.unit = is_finite ? 256.0f / power : largest;
  to.start = -S::kOffset * sum_words(total(upper));
  to.low_start = -S::kOffset * sum_words(total(low));
  to.has_low = has_bits(all_low);
  S::store(low, to.low);
#if defined(LB_LIMBS_BY_MADD)
  if constexpr (S::kIsOfWords) return S::store(upper, to.upper);
  int32_t *const to_high = to.upper, *const to_middle = to.upper + 8;
#else
  int32_t *const to_high = to.high, *const to_middle = to.middle;
#endif
  LB_UNROLL for (int i = 0; i < kPackVectors; ++i) upper[i] = (upper[i] - middle[i]) >> 8;
  S::store(upper, to_high);
  S::store(middle, to_middle);
}

struct Limbs {
  typedef PackLimbs Element;
  static constexpr bool kIsLimbs = true;
  static constexpr int64_t elements(int64_t k) { return (k + kPack - 1) / kPack; }  // of a row of x
};

// One row of x of `rows`.
template <typename S, typename T>
void pack_limbs_row(const T* x, int64_t k, int64_t rows, PackLimbs* to) {
  const int64_t whole = k / kPack;
  for (int64_t pack = 0; pack < whole; ++pack) pack_limbs<S>(x + pack * kPack, to[pack * rows]);
  if (k % kPack != 0) {
    T rest[kPack] = {};
    memcpy(rest, x + whole * kPack, sizeof(T) * static_cast<size_t>(k % kPack));
    pack_limbs<S>(rest, to[whole * rows]);
  }
}

// The bytes of a pack in the order of the words of weights that they are multiplied by.
struct W8Limbs : Limbs, Bytes {
  static constexpr int32_t kOffset = kOffsetOfW8;
  static constexpr int64_t kPackBytes = kPack * kTile;
#if defined(LB_LIMBS_BY_MADD)
  // Pairs of 16 bits: of each four columns 0 and 2, then 1 and 3.
  static constexpr bool kIsOfWords = true;
  static LB_INLINE void store(const VI (&v)[kPackVectors], int32_t* to) {
    __m128i words[4];
    store_words(v, words);
    store_words(v + kPackVectors / 2, words + 2);
    LB_UNROLL for (int i = 0; i < 4; ++i) words[i] =
        _mm_shufflehi_epi16(_mm_shufflelo_epi16(words[i], 0xd8), 0xd8);
    memcpy(to, words, sizeof(words));
  }
#else
  static LB_INLINE void store(const VI (&v)[kPackVectors], int32_t* to) {
    const VBytes bytes[2] = {low_bytes(v), low_bytes(v + kPackVectors / 2)};
    memcpy(to, bytes, sizeof(bytes));
  }
#endif
};

// A word of weights has in its lower nibbles the columns c, c + 16, c + 1 and c + 17, with c = 2 * step, in its upper
// ones those 8 behind them.
struct W4Limbs : Limbs, Nibbles {
  static constexpr int32_t kOffset = 8;
  static constexpr bool kIsOfWords = false;
  static constexpr int64_t kPackBytes = kPack * kTile / 2;
  static LB_INLINE void store(const VI (&v)[kPackVectors], int32_t* to) {
    const VBytes first = low_bytes(v), second = low_bytes(v + kPackVectors / 2);
    const VBytes bytes[2] = {zip_low(first, second), zip_high(first, second)};
    memcpy(to, bytes, sizeof(bytes));
  }
};
#endif

#if defined(__AVX512BF16__)
LB_INLINE void load_weights(W8Limbs, const char* data, VI (&to)[8]) {
  LB_UNROLL for (int i = 0; i < 8; ++i) to[i] = (VI)(load_uint(data + i * kTileLine) ^ 0x80808080u);
}
LB_INLINE void load_weights(W4Limbs, const char* data, VI (&to)[8]) {
  LB_UNROLL for (int step = 0; step < 4; ++step) {
    const VU v = load_uint(data + step * kTileLine);
    to[step] = (VI)(v & 0x0f0f0f0fu);
    to[4 + step] = (VI)((v >> 4) & 0x0f0f0f0fu);
  }
}

LB_INLINE VI add_products(VI sum, VI weights, int32_t limbs) {
  return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(limbs));
}

// Sums over the pack, of the weights as integers times x.
LB_INLINE VF limb_products(const VI (&weights)[8], const PackLimbs& x) {
  VI high{}, middle = (VI)_mm512_set1_epi32(x.start);
  LB_UNROLL for (int i = 0; i < 8; ++i) {
    high = add_products(high, weights[i], x.high[i]);
    middle = add_products(middle, weights[i], x.middle[i]);
  }
  VF sum = _mm512_cvtepi32_ps((__m512i)((high << 8) + middle));
  if (x.has_low) {
    VI low = (VI)_mm512_set1_epi32(x.low_start);
    LB_UNROLL for (int i = 0; i < 8; ++i) low = add_products(low, weights[i], x.low[i]);
    sum = fma(_mm512_cvtepi32_ps((__m512i)low), splat(1.0f / 256), sum);
  }
  return sum * splat(x.unit);
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
