// attention_int8.h for aarch64, with its dot products of four bytes in place of AVX-512. Part of attention_cpu_isa.cpp;
// compiled once an instruction set.
//
// Both operands of these are signed bytes, so a query is split into two limbs of 8 bits and a probability into three.
// Each limb has a sum of its own; those of the upper limbs count 256 and 65536 times.
#pragma once

#include "attention/attention_task.h"
#include "common/largest.h"
#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Channels of values that are weighed at once.
constexpr int64_t kWeighedChannels = 16;

LB_INLINE VI lowest_byte(VI v) { return (v << 24) >> 24; }
LB_INLINE void store_bytes(void* p, VI v) {
  const VB bytes = narrow_bytes(v);
  memcpy(p, &bytes, sizeof(bytes));
}

// One query row, rounded to integers of 16 bits: their upper limbs, padded with zeros to a multiple of 16, then their
// lower ones. Returns what they are multiples of; 0, and nothing is written, where a value is not finite.
template <typename T>
float pack_query_int16(const T* row, int64_t n, float* out) {
  // What two limbs hold, and a sum over n products with integers of 8 bits stays in 32.
  const float most = static_cast<float>(min_of(127 * 256 + 127, (int64_t{1} << 31) / 128 / max_of(n, 1) - 1));
  const float largest = largest_of(row, n);
  if (largest != largest) return 0.0f;
  const VF factor = splat(most / largest);
  int8_t* upper = reinterpret_cast<int8_t*>(out);
  const int64_t size = round_up(n, 16);
  for (int64_t c = 0; c < size; c += kLanes) {
    const VF v = c < n ? load_some(row + c, n - c) : VF{};
    const VI integers = (VI)vcvtnq_s32_f32((float32x4_t)(v * factor));
    const VI low = lowest_byte(integers);
    store_bytes(upper + c, (integers - low) >> 8);
    store_bytes(upper + size + c, low);
  }
  return largest / most;
}

// The sums of the lanes of each of four vectors.
LB_INLINE VI sum_each(const VI (&v)[4]) {
  const int32x4_t a = vpaddq_s32((int32x4_t)v[0], (int32x4_t)v[1]);
  return (VI)vpaddq_s32(a, vpaddq_s32((int32x4_t)v[2], (int32x4_t)v[3]));
}

// dots[row][j] for `rows` query rows and the first n keys. Written up to the next multiple of kLanes keys.
template <int rows>
void dot_int8_rows(const float* queries, int64_t query_stride, const int8_t* keys, int64_t key_stride,
                   int64_t n, int64_t dim, float* dots, int64_t dots_stride, bool ahead) {
  const int64_t size = round_up(dim, 16);
  for (int64_t j = 0; j < n; j += kLanes) {
    const int8_t* key[kLanes];
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) key[i] = keys + min_of(j + i, n - 1) * key_stride;
    if (ahead) {
      for (int i = 0; i < kLanes; ++i) prefetch(key[i] + prefetch_rows<int8_t>(dim) * key_stride, dim);
    }
    VI upper[rows][kLanes] = {}, lower[rows][kLanes] = {};
    const auto add = [&](int64_t c, const int8x16_t(&words)[kLanes]) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int r = 0; r < rows; ++r) {
        const int8_t* query = reinterpret_cast<const int8_t*>(queries + r * query_stride) + c;
        const int8x16_t high = vld1q_s8(query), low = vld1q_s8(query + size);
#pragma GCC unroll 4
        for (int i = 0; i < kLanes; ++i) {
          upper[r][i] = (VI)vdotq_s32((int32x4_t)upper[r][i], words[i], high);
          lower[r][i] = (VI)vdotq_s32((int32x4_t)lower[r][i], words[i], low);
        }
      }
    };
    int8x16_t words[kLanes];
    int64_t c = 0;
    for (; c + 16 <= dim; c += 16) {
#pragma GCC unroll 4
      for (int i = 0; i < kLanes; ++i) words[i] = vld1q_s8(key[i] + c);
      add(c, words);
    }
    if (c < dim) {
#pragma GCC unroll 4
      for (int i = 0; i < kLanes; ++i)
        words[i] = vreinterpretq_s8_u8(load_bytes(key[i] + c, static_cast<int>(dim - c)));
      add(c, words);
    }
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) {
      const VI sums = (sum_each(upper[r]) << 8) + sum_each(lower[r]);
      store(dots + r * dots_stride + j, __builtin_convertvector(sums, VF));
    }
  }
}

inline void dot_int8(const AttentionArgs& a, const Task& t, const int8_t* keys, int64_t first, int64_t n) {
  for (int64_t r = 0; r < t.rows;) {
    const float* query = t.queries_packed + r * t.query_stride;
    float* out = t.logits + r * kBlockKeys + first;
    const int64_t stride = a.key_strides[2];
    if (t.rows - r >= 2) {
      dot_int8_rows<2>(query, t.query_stride, keys, stride, n, a.head_dim, out, kBlockKeys, r == 0);
      r += 2;
    } else {
      dot_int8_rows<1>(query, t.query_stride, keys, stride, n, a.head_dim, out, kBlockKeys, r == 0);
      r += 1;
    }
  }
}

// Splits `width` weights (a multiple of kLanes) into limbs. False where one is negative, which scales of
// quantize_kv are not.
inline bool split_weights(const float* weights, int64_t width, WeightLimbs& out) {
  // What three limbs hold, but for what the product may be rounded up.
  constexpr float kMost = 127 * 65536 + 127 * 256;
  const float largest = largest_of(weights, width);
  const bool is_finite = largest == largest;
  const VF factor = splat(is_finite ? kMost / largest : 0.0f);
  VI below{};
  for (int64_t j = 0; j < width; j += kLanes) {
    const VF w = load(weights + j);
    below |= w < VF{};
    const VI integers = is_finite ? (VI)vcvtnq_s32_f32((float32x4_t)(w * factor)) : VI{};
    const VI low = lowest_byte(integers), upper = (integers - low) >> 8, middle = lowest_byte(upper);
    store_bytes(out.limbs[0] + j, (upper - middle) >> 8);
    store_bytes(out.limbs[1] + j, middle);
    store_bytes(out.limbs[2] + j, low);
  }
  out.unit = largest / kMost;
  return vmaxvq_u32((uint32x4_t)below) == 0;
}

// 16 channels of four rows: in each lane of vector m those of channel 4 * m + lane.
LB_INLINE void interleave(const int8x16_t (&row)[4], int8x16_t (&quads)[4]) {
  const int16x8_t low01 = vreinterpretq_s16_s8(vzip1q_s8(row[0], row[1]));
  const int16x8_t low23 = vreinterpretq_s16_s8(vzip1q_s8(row[2], row[3]));
  const int16x8_t high01 = vreinterpretq_s16_s8(vzip2q_s8(row[0], row[1]));
  const int16x8_t high23 = vreinterpretq_s16_s8(vzip2q_s8(row[2], row[3]));
  quads[0] = vreinterpretq_s8_s16(vzip1q_s16(low01, low23));
  quads[1] = vreinterpretq_s8_s16(vzip2q_s16(low01, low23));
  quads[2] = vreinterpretq_s8_s16(vzip1q_s16(high01, high23));
  quads[3] = vreinterpretq_s8_s16(vzip2q_s16(high01, high23));
}

// output[row][c] = decay[row] * output + sum_j weight[row][at + j] * values[j][c] for up to 16 channels from `c` on.
// `at` is a multiple of 4; weights behind the n-th are zero up to such a multiple. `whole`: there are 16 channels.
template <int rows, bool whole>
void weigh_some_channels(const WeightLimbs* weights, int64_t at, const int8_t* values, int64_t value_stride,
                         int64_t n, int64_t channels, float* output, int64_t output_stride,
                         const float* decay, int64_t ahead) {
  VI sums[rows][3][4] = {};
  for (int64_t j = 0; j < n; j += 4) {
    int8x16_t row[4], quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int8_t* from = values + min_of(j + i, n - 1) * value_stride;
      fetch_ahead(from + ahead * value_stride);
      row[i] = whole ? vld1q_s8(from) : vreinterpretq_s8_u8(load_bytes(from, static_cast<int>(channels)));
    }
    interleave(row, quads);
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 3
      for (int d = 0; d < 3; ++d) {
        int32_t four;
        memcpy(&four, weights[r].limbs[d] + at + j, sizeof(four));
        const int8x16_t limbs = (int8x16_t)splat_i(four);
#pragma GCC unroll 4
        for (int m = 0; m < 4; ++m) sums[r][d][m] = (VI)vdotq_s32((int32x4_t)sums[r][d][m], quads[m], limbs);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      if (!whole && m * kLanes >= channels) break;
      VF v = __builtin_convertvector(sums[r][2][m], VF);
      v = fma(__builtin_convertvector(sums[r][1][m], VF), splat(256.0f), v);
      v = fma(__builtin_convertvector(sums[r][0][m], VF), splat(65536.0f), v);
      float* out = output + r * output_stride + m * kLanes;
      store(out, fma(load(out), splat(decay[r]), v * splat(weights[r].unit)));
    }
  }
}

template <int rows>
LB_INLINE void weigh_int8_channels(const WeightLimbs* weights, int64_t at, const int8_t* values,
                                   int64_t value_stride, int64_t n, int64_t channels, float* output,
                                   int64_t output_stride, const float* decay, int64_t) {
  const auto weigh =
      channels >= kWeighedChannels ? weigh_some_channels<rows, true> : weigh_some_channels<rows, false>;
  weigh(weights, at, values, value_stride, n, channels, output, output_stride, decay,
        prefetch_rows<int8_t>(value_stride));
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
