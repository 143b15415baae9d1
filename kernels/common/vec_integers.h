// Lanes rounded to integers of 8 bits and stored, for the torch-free loops; see vec.h.
#pragma once

#include "common/vec.h"
#include "common/vec_math.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// The nearest integers, ties to even, of numbers that 8 bits hold.
#if defined(__aarch64__)
LB_INLINE VB round_bytes(VF v) { return narrow_bytes((VI)vcvtnq_s32_f32((float32x4_t)v)); }
#else
LB_INLINE VB round_bytes(VF v) { return narrow_bytes((VI)as_uint(v + splat(kToInteger)) << 24 >> 24); }
#endif

LB_INLINE void store(int8_t* p, VB v, Full) { memcpy(p, &v, sizeof(v)); }
LB_INLINE void store(int8_t* p, VB v, int n) {
#if defined(__aarch64__)
  uint32_t bytes;
  memcpy(&bytes, &v, sizeof(bytes));
  store_word(p, bytes, n);
#else
  int8_t lanes[kLanes];
  memcpy(lanes, &v, sizeof(v));
  for (int i = 0; i < n && i < kLanes; ++i) p[i] = lanes[i];
#endif
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
