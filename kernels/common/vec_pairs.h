// Elements in pairs, even and odd channels apart, for the torch-free loops; see vec.h.
//
//   load_pairs(p) store_pairs(p, v)   the 2 * kLanes elements at p as two vectors
//   load_pairs(p, n)  store_pairs(p, v, n)   the first n < kLanes pairs
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

#if defined(__AVX512F__)
#define LB_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define LB_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LB_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LB_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define LB_EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define LB_ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define LB_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define LB_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LB_EVEN_LANES 0, 2, 4, 6
#define LB_ODD_LANES 1, 3, 5, 7
#define LB_ZIP_LOW 0, 4, 1, 5
#define LB_ZIP_HIGH 2, 6, 3, 7
#endif
#if defined(__clang__)
#define LB_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LB_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif
LB_INLINE VF even_lanes(VF a, VF b) { return LB_SHUFFLE(a, b, LB_EVEN_LANES); }
LB_INLINE VF odd_lanes(VF a, VF b) { return LB_SHUFFLE(a, b, LB_ODD_LANES); }
// The inverse: even and odd lanes woven together, first and second half.
LB_INLINE VF zip_low(VF even, VF odd) { return LB_SHUFFLE(even, odd, LB_ZIP_LOW); }
LB_INLINE VF zip_high(VF even, VF odd) { return LB_SHUFFLE(even, odd, LB_ZIP_HIGH); }

struct VPair {
  VF even, odd;
};

// The 2 * kLanes elements at p, even and odd ones apart. A pair of 16-bit elements is one 32-bit lane, low
// half first.
LB_INLINE VPair load_pairs(const float* p) {
  const VF a = load(p), b = load(p + kLanes);
  return {even_lanes(a, b), odd_lanes(a, b)};
}
LB_INLINE VPair load_pairs(const bf16* p) {
  VU both;
  memcpy(&both, p, sizeof(both));
  return {as_float(both << 16), as_float(both & 0xffff0000u)};
}
LB_INLINE VPair load_pairs(const f16* p) {
  VU both;
  memcpy(&both, p, sizeof(both));
  return {f16_to_float(narrow(both & 0xffffu)), f16_to_float(narrow(both >> 16))};
}
LB_INLINE void store_pairs(float* p, VPair v) {
  store(p, zip_low(v.even, v.odd));
  store(p + kLanes, zip_high(v.even, v.odd));
}
LB_INLINE void store_pairs(bf16* p, VPair v) {
  const VU both = widen(float_to_bf16(v.even)) | (widen(float_to_bf16(v.odd)) << 16);
  memcpy(p, &both, sizeof(both));
}
LB_INLINE void store_pairs(f16* p, VPair v) {
  const VU both = widen(float_to_f16(v.even)) | (widen(float_to_f16(v.odd)) << 16);
  memcpy(p, &both, sizeof(both));
}

template <typename T>
LB_INLINE VPair load_pairs(const T* p, Full) {
  return load_pairs(p);
}
template <typename T>
LB_INLINE void store_pairs(T* p, VPair v, Full) {
  store_pairs(p, v);
}
#if defined(__aarch64__)
// The first n pairs, n < kLanes.
LB_INLINE VPair load_pairs(const float* p, int n) {
  const VF a = n < 2 ? load(p, 2 * n) : load(p), b = n < 2 ? VF{} : load(p + kLanes, 2 * n - kLanes);
  return {even_lanes(a, b), odd_lanes(a, b)};
}
LB_INLINE void store_pairs(float* p, VPair v, int n) {
  const VF a = zip_low(v.even, v.odd), b = zip_high(v.even, v.odd);
  if (n < 2) return store(p, a, 2 * n);
  store(p, a);
  store(p + kLanes, b, 2 * n - kLanes);
}
// A pair of 16 bits is as wide as a float.
template <typename T>
LB_INLINE VPair load_pairs(const T* p, int n) {
  T both[2 * kLanes];
  const uint8x16_t bytes = load_bytes(p, 4 * n);
  memcpy(both, &bytes, sizeof(both));
  return load_pairs(both);
}
template <typename T>
LB_INLINE void store_pairs(T* p, VPair v, int n) {
  T both[2 * kLanes];
  VF words;
  store_pairs(both, v);
  memcpy(&words, both, sizeof(words));
  store(reinterpret_cast<float*>(p), words, n);
}
#else
// The first n pairs, n < kLanes, through the stack.
template <typename T>
LB_INLINE VPair load_pairs(const T* p, int n) {
  T lanes[2 * kLanes] = {};
  for (int i = 0; i < 2 * n; ++i) lanes[i] = p[i];
  return load_pairs(lanes);
}
template <typename T>
LB_INLINE void store_pairs(T* p, VPair v, int n) {
  T lanes[2 * kLanes];
  store_pairs(lanes, v);
  for (int i = 0; i < 2 * n; ++i) p[i] = lanes[i];
}
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
