// The largest magnitude of a row, by which it is rounded to integers; see vec.h.
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// What a row's largest magnitude counts as at least, so that dividing by it gives a number.
constexpr float kLeastMagnitude = 0x1p-100f;

// The largest magnitude of n values, at least kLeastMagnitude; NaN where one of them is not finite.
template <typename T>
LB_INLINE float largest_of(const T* values, int64_t n) {
  VF largest = splat(kLeastMagnitude);
  VF infinite{};
  for_lanes(n, [&](int64_t i, auto lanes) {
    const VF v = load(values + i, lanes);
    largest = max(largest, abs(v));
    infinite += v * splat(0.0f);  // NaN for NaN and infinity
  });
  return sum(infinite) == 0.0f ? hmax(largest) : __builtin_nanf("");
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
