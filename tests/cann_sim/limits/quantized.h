// Checks that the limits of quantized, routing and collective operators share.
#pragma once
#include <algorithm>

#include "../ops/common.h"
#include "checks.h"

namespace sim {

constexpr auto kInt8 = at::kChar, kInt32 = at::kInt, kFloat32 = at::kFloat;
constexpr Dtypes kSixteenBits = {at::kHalf, at::kBFloat16};
constexpr Dtypes kFloats = {at::kHalf, at::kBFloat16, at::kFloat};

inline bool is_one_of(at::ScalarType dtype, Dtypes dtypes) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}
inline bool given(const TensorHandle& x) { return static_cast<bool>(x); }
/// Everything but the last axis.
inline std::vector<int64_t> rows_of(const TensorHandle& x) { return x->sizes().slice(0, x->dim() - 1).vec(); }
inline int64_t row_count(const TensorHandle& x) { return c10::multiply_integers(rows_of(x)); }

/// A quantized output: int8 of x's shape, or int32 that holds 8 int4 (last axis an eighth).
inline void require_quantized_shape(const TensorHandle& y, const char* name, at::IntArrayRef x_shape) {
  if (!y) return;
  auto shape = x_shape.vec();
  if (y->scalar_type() == at::kInt) {
    require(shape.back() % 8 == 0, name, " of int4 in int32 needs a last axis divisible by 8, it is ",
            shape.back());
    shape.back() /= 8;
  }
  require_shape(y, name, shape);
}

}  // namespace sim
