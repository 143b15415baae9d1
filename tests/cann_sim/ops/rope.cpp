// Rotary position embedding. Rounding follows the kernels of ops-transformer (posembedding/*/op_kernel, read at
// c29bc10): float32 inside and one rounding, except ApplyRotaryPosEmb in float16.
#include "fused.h"

using namespace sim;

using at::Tensor;

namespace {

enum RotaryMode : int64_t { rotary_half = 0, rotary_interleave = 1 };

/// (-x2, x1) of the two halves, or of each pair.
Tensor rotate(const Tensor& x, int64_t mode) {
  if (mode == rotary_interleave) {
    auto even = x.slice(-1, 0, std::nullopt, 2), odd = x.slice(-1, 1, std::nullopt, 2);
    return at::stack({-odd, even}, -1).flatten(-2);
  }
  auto halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}

/// x * cos + rotate(x) * sin in float32.
Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode) {
  auto x32 = fp32(x);
  return x32 * fp32(cos) + rotate(x32, mode) * fp32(sin);
}

/// In place. float16 is computed in float16 ("cast = 0" in the document's memory formula), so three roundings;
/// bfloat16 in float32 ("cast = 1"), one.
void apply(R x, T cos, T sin) {
  if (x->scalar_type() == at::kHalf) return put(x, *x * *cos + rotate(*x, rotary_half) * *sin);
  put(x, rotated(*x, *cos, *sin, rotary_half));
}

}  // namespace

OP(aclnnRotaryPositionEmbedding, T, x, T, cos, T, sin, int64_t, mode, O, out) {
  put(out, rotated(*x, *cos, *sin, mode));
}

OP(aclnnApplyRotaryPosEmb, R, query, R, key, T, cos, T, sin, int64_t, layout) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}
OP(aclnnApplyRotaryPosEmbV2, R, query, R, key, T, cos, T, sin, int64_t, layout, CP, mode) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}
