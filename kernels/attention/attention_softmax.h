// Masks and the online softmax of attention, one row of logits at a time. Part of attention_cpu_isa.cpp;
// compiled once an instruction set.
#pragma once

#include "attention/attention.h"
#include "attention/attention_tile.h"
#include "common/vec.h"
#include "common/vec_bf16.h"
#include "common/vec_math.h"

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kInfinity = __builtin_inff();
constexpr float kMinusInfinity = -kInfinity;
constexpr float kNaN = __builtin_nanf("");

// 2^x for x <= 0, within 1 unit in the last place; 0 below -126, 1 at 0, NaN for NaN. Cheaper than the
// general exp, and, with the products, what prefill spends its time on.
LB_INLINE VF exp2_nonpositive(VF x) {
  // 2^f on [0, 1) by the polynomial of least relative error (Remez), 2e-9 before rounding.
#if defined(__AVX512DQ__)
  const VF f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const VF clamped = max(x, splat(-126.0f));
  // The sum's low mantissa bits are floor(x), or one less for an integer, where f is then 1: as good.
  const VF shifted = (clamped - 0.5f) + 12582912.0f;
  const VF f = clamped - (shifted - 12582912.0f);
#endif
  VF p = splat(2.170225544e-4f);
  p = fma(p, f, splat(1.243968783e-3f));
  p = fma(p, f, splat(9.678840996e-3f));
  p = fma(p, f, splat(5.548334198e-2f));
  p = fma(p, f, splat(2.402298363e-1f));
  p = fma(p, f, splat(6.931469838e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512DQ__)
  return _mm512_scalef_ps(p, x);
#else
  const VF scaled = as_float(as_uint(p) + (as_uint(shifted) << 23));
  return x >= splat(-126.0f) ? scaled : (x < splat(-126.0f) ? VF{} : x);
#endif
}

LB_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(splat(x))[0]; }

// What is known of a block of rows and keys from its bool mask.
enum class Cover { none, some, all };

// Adds what `n` mask bytes, `stride` apart, say to `any` (was one set?) and `all` (were all?).
LB_INLINE void scan_bool_mask(const uint8_t* mask, int64_t stride, int64_t n, bool& any, bool& all) {
  uint64_t ored = 0;
  uint64_t anded = ~uint64_t{0};
  int64_t j = 0;
  if (stride == 1) {
    for (; j + 8 <= n; j += 8) {
      uint64_t eight;
      memcpy(&eight, mask + j, 8);
      ored |= eight;
      anded &= eight;
    }
  }
  all = all && (anded & 0x0101010101010101u) == 0x0101010101010101u;
  for (; j < n; ++j) {
    ored |= mask[j * stride];
    all = all && mask[j * stride] != 0;
  }
  any = any || ored != 0;
}

// All bits of the lanes whose byte is not zero.
LB_INLINE VI is_set(const uint8_t* mask) {
#if defined(__aarch64__)
  return load(reinterpret_cast<const int8_t*>(mask)) != VF{};
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  memcpy(&bytes, mask, sizeof(bytes));
  return __builtin_convertvector(bytes, VU) != splat_u(0u);
#endif
}

LB_INLINE void apply_bool_mask(float* logits, const uint8_t* mask, int64_t stride, int64_t n) {
  int64_t j = 0;
  if (stride == 1) {
    for (; j + kLanes <= n; j += kLanes) {
      const VF logit = load(logits + j);
      store(logits + j, is_set(mask + j) ? logit : logit + splat(kMinusInfinity));
    }
  }
  for (; j < n; ++j) {
    if (mask[j * stride] == 0) logits[j] += kMinusInfinity;
  }
}

template <typename T>
LB_INLINE void add_float_mask(float* logits, const T* mask, int64_t stride, int64_t n) {
  if (stride == 1) {
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store(logits + j, load(logits + j) + load(mask + j));
    if (j < n) {
      const int tail = static_cast<int>(n - j);
      store(logits + j, load(logits + j, tail) + load(mask + j, tail), tail);
    }
  } else {
    for (int64_t j = 0; j < n; ++j) logits[j] += load(mask + j * stride, 1)[0];
  }
}

// The mask of one row from the first key of a block on.
struct MaskRow {
  const void* data;
  AttentionMask type;
  int64_t stride;

  template <typename T>
  LB_INLINE const T* at(int64_t key) const {
    return static_cast<const T*>(data) + key * stride;
  }
};

// Multiplies the dot products of keys [begin, end) of a row, and of keys that share a vector with these, by the
// scales of the keys and of the query.
LB_INLINE void multiply_by(float* row, const float* scales, float scale, int64_t begin, int64_t end) {
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes)
    store(row + j, load(row + j) * splat(scale) * load(scales + j));
}

// Scales and caps the dot products of keys [begin, end) of a row, and of keys that share a vector with these.
LB_INLINE void scale_logits(float* row, int64_t begin, int64_t end, float scaling, float softcap) {
  const float inner = softcap > 0.0f ? scaling / softcap : scaling;
  for (int64_t j = begin / kLanes * kLanes; j < end; j += kLanes) {
    VF x = load(row + j) * inner;
    if (softcap > 0.0f) x = tanh(x) * softcap;
    store(row + j, x);
  }
}

inline void apply_mask(float* row, int64_t begin, int64_t end, const MaskRow& mask) {
  const int64_t n = end - begin;
  switch (mask.type) {
    case AttentionMask::none:
      break;
    case AttentionMask::boolean:
      apply_bool_mask(row + begin, mask.at<uint8_t>(begin), mask.stride, n);
      break;
    case AttentionMask::f32:
      add_float_mask(row + begin, mask.at<float>(begin), mask.stride, n);
      break;
    case AttentionMask::bf16:
      add_float_mask(row + begin, mask.at<bf16>(begin), mask.stride, n);
      break;
    case AttentionMask::f16:
      add_float_mask(row + begin, mask.at<f16>(begin), mask.stride, n);
      break;
  }
}

// Probabilities of 2 * kLanes or kLanes logits, stored as words over the logits they come from; returns their
// sum as it will count in the product with the values.
template <typename Words>
struct StoreProbabilities {
  static LB_INLINE VF two(float* row, int64_t j, VF low, VF high) {
    store(row + j, low);
    store(row + j + kLanes, high);
    return low + high;
  }
  static LB_INLINE VF one(float* row, int64_t j, VF p) {
    store(row + j, p);
    return p;
  }
};
#if defined(LB_BF16_PAIRS)
template <>
struct StoreProbabilities<WordsBf16> {
  // Halves the space: pair j / 2 never lies behind the logits still to be read.
  static LB_INLINE VF two(float* row, int64_t j, VF low, VF high) {
    const VF pairs = round_pairs(low, high);
    store(row + j / 2, pairs);
    return sum_pairs(pairs);
  }
  static LB_INLINE VF one(float* row, int64_t j, VF p) {
    // Summed in the pairs of two vectors: whether zeros follow must change no bit.
    const VF pairs = round_pairs(p, VF{});
    memcpy(row + j / 2, &pairs, sizeof(pairs) / 2);
    return sum_pairs(pairs);
  }
};
#endif

// The maximum of a row with one more block of logits, `found` being the largest that was found there; NaN where that is
// the answer. A maximum over lanes may lose a NaN to a number, which does not matter: the NaN is in the sum. Only where
// no finite number is left does it decide between a row that sees no key, one that is NaN and a logit of infinity, and
// only then are the logits read again.
inline float updated_maximum(const float* row, int64_t width, float found, float maximum, float total) {
  const float updated = found <= maximum ? maximum : found;
  if (updated != kInfinity && updated != kMinusInfinity) return updated;
  // A total is NaN also behind a logit of infinity, which the maximum then says.
  if (maximum != maximum || (total != total && maximum != kInfinity)) return kNaN;
  VF spoiled{};
  for (int64_t j = 0; j < width; j += kLanes) {
    const VF x = load(row + j);
    spoiled = x == x ? spoiled : x;
  }
  return sum(spoiled) == 0.0f ? updated : kNaN;
}

// One step of the online softmax over the keys [begin, end) of a row of `width` logits (a multiple of
// kLanes); begin, end and width count from the same key. Replaces the logits by probabilities relative to the
// largest logit so far (0 outside [begin, end)), updates that maximum and the sum, and returns the factor
// that takes earlier sums to the new maximum. `to_log2` > 0 takes the row's values to logits of base 2. With
// `weighted`, what is stored, and not what is summed, is multiplied by `weights`, one for each of the row.
template <typename Words, bool weighted>
LB_INLINE float softmax_step(float* row, int64_t begin, int64_t end, int64_t width, float to_log2,
                             float& maximum, float& total, const float* weights) {
  if (begin > end) begin = end;
  for (int64_t j = 0; j < begin; ++j) row[j] = kMinusInfinity;
  for (int64_t j = end; j < width; ++j) row[j] = kMinusInfinity;

  VF largest = splat(kMinusInfinity);
  for (int64_t j = 0; j < width; j += kLanes) largest = max(load(row + j), largest);
  const float updated = updated_maximum(row, width, hmax(largest), maximum, total);
  if (updated == kMinusInfinity) {
    for (int64_t j = 0; j < width; j += kLanes) StoreProbabilities<Words>::one(row, j, VF{});
    return 1.0f;
  }

  VF sums = {};
  const VF shift = splat(updated);
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes) {
    const VF low = exp2_nonpositive((load(row + j) - shift) * to_log2);
    const VF high = exp2_nonpositive((load(row + j + kLanes) - shift) * to_log2);
    if constexpr (weighted) {
      sums += low + high;
      StoreProbabilities<Words>::two(row, j, low * load(weights + j), high * load(weights + j + kLanes));
    } else {
      sums += StoreProbabilities<Words>::two(row, j, low, high);
    }
  }
  if (j < width) {
    const VF last = exp2_nonpositive((load(row + j) - shift) * to_log2);
    if constexpr (weighted) {
      sums += last;
      StoreProbabilities<Words>::one(row, j, last * load(weights + j));
    } else {
      sums += StoreProbabilities<Words>::one(row, j, last);
    }
  }

  const float decay = exp2_nonpositive((maximum - updated) * to_log2);
  maximum = updated;
  total = total * decay + sum(sums);
  return decay;
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
