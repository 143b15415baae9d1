// One step of a sum, the run of K that one vector of weights covers, for each element type: how weights are read, what x
// becomes when packed, and their product. Part of linear_cpu_isa.cpp; compiled once an instruction set.
//
// Packed rows are zero beyond K, and so are the lanes of a partial load.
#pragma once

#include "common/vec.h"
#include "linear/linear_rows.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#define LB_UNROLL _Pragma("GCC unroll 8")

// Sums of one row, that hide the latency of the addition.
#if defined(__aarch64__)
constexpr int kRowSums = 8;
#else
constexpr int kRowSums = 4;
#endif

template <typename T>
struct Step {
  typedef VF Weights;
  static constexpr int kSize = kLanes;            // elements of K
  static constexpr int kPackedBytes = kVecBytes;  // of packed x a row
  static LB_INLINE Weights read(const T* p) { return load(p); }
  static LB_INLINE Weights read(const T* p, int n) { return load(p, n); }
  static LB_INLINE void pack(char* packed, Weights x) { memcpy(packed, &x, sizeof(x)); }
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    VF xs;
    memcpy(&xs, x, sizeof(xs));
    return fma(w, xs, sum);
  }
};

// A full vector of 16-bit elements: pairs of neighbours.
typedef uint16_t VPairs __attribute__((vector_size(kVecBytes)));

template <typename T>
LB_INLINE VPairs read_pairs(const T* p) {
  VPairs v;
  memcpy(&v, p, sizeof(v));
  return v;
}
template <typename T>
LB_INLINE VPairs read_pairs(const T* p, int n) {
#if defined(__AVX512BW__)
  return (VPairs)_mm512_maskz_loadu_epi16((1u << n) - 1u, p);
#elif defined(__aarch64__)
  return (VPairs)load_bytes(p, 2 * n);
#else
  T lanes[2 * kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return read_pairs(lanes);
#endif
}

// A full vector as two of floats, which Split makes of it. x is packed in that same order: firsts, then seconds.
struct TwoFloats {
  VF first, second;
};
template <typename T, TwoFloats (*split)(VPairs)>
struct SplitStep {
  typedef TwoFloats Weights;
  static constexpr int kSize = 2 * kLanes;
  static constexpr int kPackedBytes = 2 * kVecBytes;
  static LB_INLINE Weights read(const T* p) { return split(read_pairs(p)); }
  static LB_INLINE Weights read(const T* p, int n) { return split(read_pairs(p, n)); }
  static LB_INLINE void pack(char* packed, Weights x) {
    memcpy(packed, &x.first, kVecBytes);
    memcpy(packed + kVecBytes, &x.second, kVecBytes);
  }
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    VF first, second;
    memcpy(&first, x, kVecBytes);
    memcpy(&second, x + kVecBytes, kVecBytes);
    return fma(w.second, second, fma(w.first, first, sum));
  }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Both of a pair at once, summed in fp32.
template <>
struct Step<bf16> {
  typedef VPairs Weights;
  static constexpr int kSize = 2 * kLanes;
  static constexpr int kPackedBytes = kVecBytes;
  static LB_INLINE Weights read(const bf16* p) { return read_pairs(p); }
  static LB_INLINE Weights read(const bf16* p, int n) { return read_pairs(p, n); }
  static LB_INLINE void pack(char* packed, Weights x) { memcpy(packed, &x, sizeof(x)); }
#if defined(__AVX512BF16__)
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    Weights xs;
    memcpy(&xs, x, sizeof(xs));
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)xs);
  }
#else
  static LB_INLINE VF multiply_add(VF sum, Weights w, const char* x) {
    Weights xs;
    memcpy(&xs, x, sizeof(xs));
    return (VF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)w, (bfloat16x8_t)xs);
  }
#endif
};
#elif defined(__aarch64__)
// In the order of memory: one instruction widens either half of a register.
LB_INLINE TwoFloats halves_of_bf16(VPairs v) {
  const uint16x8_t bits = (uint16x8_t)v;
  return {(VF)vshll_n_u16(vget_low_u16(bits), 16), (VF)vshll_high_n_u16(bits, 16)};
}
template <>
struct Step<bf16> : SplitStep<bf16, halves_of_bf16> {};
#else
// bf16 is the upper half of fp32, so of a pair a shift makes the first a float and a mask the second,
// with no lane crossing another.
LB_INLINE TwoFloats pairs_of_bf16(VPairs v) {
  const VU bits = (VU)v;
  return {as_float(bits << 16), as_float(bits & 0xffff0000u)};
}
template <>
struct Step<bf16> : SplitStep<bf16, pairs_of_bf16> {};
#endif

#if defined(__aarch64__)
LB_INLINE TwoFloats halves_of_f16(VPairs v) {
  const float16x8_t halves = (float16x8_t)v;
  return {(VF)vcvt_f32_f16(vget_low_f16(halves)), (VF)vcvt_high_f32_f16(halves)};
}
template <>
struct Step<f16> : SplitStep<f16, halves_of_f16> {};
#endif

template <typename T>
int64_t steps_of(int64_t k) {
  return (k + Step<T>::kSize - 1) / Step<T>::kSize;
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
