// Rotary position embedding, shared with the operators that rotate on the way to a cache.
#pragma once
#include "fused.h"

namespace sim {

enum RotaryMode : int64_t { rotary_half = 0, rotary_interleave = 1 };

/// (-x2, x1) of the two halves, or of each pair.
inline at::Tensor rotate(const at::Tensor& x, int64_t mode) {
  if (mode == rotary_interleave) {
    auto even = x.slice(-1, 0, std::nullopt, 2), odd = x.slice(-1, 1, std::nullopt, 2);
    return at::stack({-odd, even}, -1).flatten(-2);
  }
  auto halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}

/// x * cos + rotate(x) * sin in float32.
inline at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  auto x32 = fp32(x);
  return x32 * fp32(cos) + rotate(x32, mode) * fp32(sin);
}

/// Pairs (x0, x1, x2, ...) -> (x0, x2, ..., x1, x3, ...): what comes before `rotary_half` in the interleaving operators.
inline at::Tensor halves_of_pairs(const at::Tensor& x) {
  return at::cat({x.slice(-1, 0, std::nullopt, 2), x.slice(-1, 1, std::nullopt, 2)}, -1);
}

}  // namespace sim
