// What the fused operators share: where they round.
#pragma once
#include "common.h"

namespace sim {

/// float32 values as they are after a store in `dtype` and a load: a rounding inside an operator.
inline at::Tensor rounded(const at::Tensor& x, at::ScalarType dtype) { return x.to(dtype).to(at::kFloat); }

/// The last `count` axes of `x`.
inline std::vector<int64_t> last_axes(const at::Tensor& x, int64_t count) {
  std::vector<int64_t> axes;
  for (int64_t k = x.dim() - count; k < x.dim(); k++) axes.push_back(k);
  return axes;
}

/// 1 / sqrt(mean of squares over the last `count` axes + eps). The kernels hold eps as a float.
inline at::Tensor inverse_rms(const at::Tensor& x, int64_t count, double eps) {
  return at::rsqrt(at::mean(x * x, last_axes(x, count), true) + static_cast<float>(eps));
}

}  // namespace sim
