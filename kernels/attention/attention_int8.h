// Products of a few rows with int8 keys and values, computed in integers: half the instructions of converting those to
// bf16. Part of attention_cpu_isa.cpp; compiled once an instruction set.
#pragma once

#include "attention/attention_direct.h"
#include "attention/attention_task.h"
#include "common/largest.h"
#include "common/vec.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define LB_INT8_ATTENTION 1
namespace liteboost {
namespace LB_ISA {
namespace {

// The words of calls whose rows of bf16 are multiplied as integers, where they are few.
typedef WordsBf16 WordsOfInt8;
// Channels of values that are weighed at once.
constexpr int64_t kWeighedChannels = 64;

// Pairs of int16 that are neighbours along the summed dimension; the sums are int32.
struct WordsInt16 {
  static constexpr int kPerWord = 2;
  static LB_INLINE VF multiply_add(VF a, VF b, VF sum) {
    return (VF)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
  static LB_INLINE VF number(VF sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
};

template <>
struct RowWords<WordsInt16> {
  static LB_INLINE VF load(const int8_t* row, int64_t c, int64_t n) {
    if (n - c >= 2 * kLanes) {
      return (VF)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
    }
    watch(row + c, n - c);
    return (VF)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << (n - c)) - 1u, row + c));
  }
};

// One query row as int16, rounded to nearest even, padded with zeros to a multiple of kLanes words. Returns what
// they are multiples of; 0, and nothing is written, where a value is not finite.
template <typename T>
float pack_query_int16(const T* row, int64_t n, float* out) {
  // A sum over n products with integers of 8 bits stays in 32.
  const float most = static_cast<float>(min_of(32767, (int64_t{1} << 31) / 128 / max_of(n, 1) - 1));
  const float largest = largest_of(row, n);
  if (largest != largest) return 0.0f;
  const VF factor = splat(most / largest);
  for (int64_t c = 0; c < round_up(n, 2 * kLanes); c += kLanes) {
    const VF v = c < n ? load_some(row + c, n - c) : VF{};
    const __m256i integers = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v * factor));
    memcpy(out + c / 2, &integers, sizeof(integers));
  }
  return largest / most;
}

inline void dot_int8(const AttentionArgs& a, const Task& t, const int8_t* keys, int64_t first, int64_t n) {
  dot_keys<WordsInt16>(t.queries_packed, t.query_stride, t.rows, keys, a.key_strides[2], n, a.head_dim,
                       t.logits + first, kBlockKeys, rows_behind(keys, a.key_strides[2], n, a.head_dim));
}

// Splits `width` weights (a multiple of kLanes) into limbs. False where one is negative, which scales of
// quantize_kv are not.
inline bool split_weights(const float* weights, int64_t width, WeightLimbs& out) {
  // 2^24 but for what the product may be rounded up.
  constexpr float kMost = 16776960.0f;
  const float largest = largest_of(weights, width);
  const bool is_finite = largest == largest;
  const VF factor = splat(is_finite ? kMost / largest : 0.0f);
  bool any_below = false;
  for (int64_t j = 0; j < width; j += kLanes) {
    const VF w = load(weights + j);
    any_below = any_below || _mm512_cmp_ps_mask(w, VF{}, _CMP_LT_OQ) != 0;
    const __m512i integers = is_finite ? _mm512_cvtps_epi32(w * factor) : __m512i{};
    const __m128i limbs[3] = {_mm512_cvtepi32_epi8(_mm512_srli_epi32(integers, 16)),
                              _mm512_cvtepi32_epi8(_mm512_srli_epi32(integers, 8)),
                              _mm512_cvtepi32_epi8(integers)};
    for (int d = 0; d < 3; ++d) memcpy(out.limbs[d] + j, &limbs[d], sizeof(limbs[d]));
  }
  out.unit = largest / kMost;
  return !any_below;
}

// 64 channels of four rows; lane l of vector m holds those of channel l / 4 * 16 + m * 4 + l % 4.
LB_INLINE void interleave(const __m512i (&row)[4], __m512i (&quads)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]);
  const __m512i high01 = _mm512_unpackhi_epi8(row[0], row[1]);
  const __m512i high23 = _mm512_unpackhi_epi8(row[2], row[3]);
  quads[0] = _mm512_unpacklo_epi16(low01, low23);
  quads[1] = _mm512_unpackhi_epi16(low01, low23);
  quads[2] = _mm512_unpacklo_epi16(high01, high23);
  quads[3] = _mm512_unpackhi_epi16(high01, high23);
}

// What interleave() did to the order of channels, undone.
LB_INLINE void in_order(VF (&v)[4]) {
  const VF a = _mm512_shuffle_f32x4(v[0], v[1], 0x44);
  const VF b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
  const VF c = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
  const VF d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  v[2] = _mm512_shuffle_f32x4(b, d, 0x88);
  v[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

// output[row][c] = decay[row] * output + sum_j weight[row][at + j] * values[j][c] for up to 64 channels from `c` on.
// `at` is a multiple of 4; weights behind the n-th are zero up to such a multiple.
template <int rows>
void weigh_int8_channels(const WeightLimbs* weights, int64_t at, const int8_t* values, int64_t value_stride,
                         int64_t n, int64_t channels, float* output, int64_t output_stride,
                         const float* decay, int64_t ahead_bytes) {
  const int64_t ahead = prefetch_rows<int8_t>(ahead_bytes);
  const __mmask64 mask = channels >= 64 ? ~__mmask64{0} : (__mmask64{1} << channels) - 1;
  VI sums[rows][3][4];
#pragma GCC unroll 2
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 3
    for (int d = 0; d < 3; ++d) {
#pragma GCC unroll 4
      for (int m = 0; m < 4; ++m) sums[r][d][m] = VI{};
    }
  }
  for (int64_t j = 0; j < n; j += 4) {
    __m512i row[4], quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8_t* from = values + min_of(j + i, n - 1) * value_stride;
      prefetch(from + ahead * value_stride, ahead_bytes);
      watch(from, min_of(channels, 64));
      row[i] = _mm512_maskz_loadu_epi8(mask, from);
    }
    interleave(row, quads);
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 3
      for (int d = 0; d < 3; ++d) {
        int32_t four;
        memcpy(&four, weights[r].limbs[d] + at + j, sizeof(four));
        const __m512i limbs = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int m = 0; m < 4; ++m) {
          sums[r][d][m] = (VI)_mm512_dpbusd_epi32((__m512i)sums[r][d][m], limbs, quads[m]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < rows; ++r) {
    VF v[4];
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      v[m] = _mm512_cvtepi32_ps((__m512i)sums[r][2][m]);
      v[m] = fma(_mm512_cvtepi32_ps((__m512i)sums[r][1][m]), splat(256.0f), v[m]);
      v[m] = fma(_mm512_cvtepi32_ps((__m512i)sums[r][0][m]), splat(65536.0f), v[m]);
    }
    in_order(v);
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      if (m * kLanes >= channels) break;
      float* out = output + r * output_stride + m * kLanes;
      store(out, fma(load(out), splat(decay[r]), v[m] * splat(weights[r].unit)));
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
#elif defined(__ARM_FEATURE_DOTPROD)
#define LB_INT8_ATTENTION 1
#include "attention/attention_int8_neon.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(LB_BF16_PAIRS)
typedef WordsBf16 WordsOfInt8;
#else
struct WordsOfInt8 : Words32 {};
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
#endif

#if defined(LB_INT8_ATTENTION)
namespace liteboost {
namespace LB_ISA {
namespace {

template <int rows>
void weigh_int8_rows(const WeightLimbs* weights, int64_t at, const int8_t* values, int64_t value_stride,
                     int64_t n, int64_t dim, float* output, int64_t output_stride, const float* decay,
                     bool first) {
  for (int64_t c = 0; c < dim; c += kWeighedChannels) {
    // The first channels ask for whole rows ahead; what the others read is then there.
    weigh_int8_channels<rows>(weights, at, values + c, value_stride, n, dim - c, output + c, output_stride,
                              decay, first && c == 0 ? dim : 0);
  }
}

inline void weigh_int8(const WeightLimbs* weights, int64_t at, int64_t rows, const int8_t* values,
                       int64_t value_stride, int64_t n, int64_t dim, float* output, int64_t output_stride,
                       const float* decay) {
  for (int64_t r = 0; r < rows;) {
    float* out = output + r * output_stride;
    if (rows - r >= 2) {
      weigh_int8_rows<2>(weights + r, at, values, value_stride, n, dim, out, output_stride, decay + r,
                         r == 0);
      r += 2;
    } else {
      weigh_int8_rows<1>(weights + r, at, values, value_stride, n, dim, out, output_stride, decay + r,
                         r == 0);
      r += 1;
    }
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
#endif
