// Rotary position embedding. Rounding follows the kernels of ops-transformer (posembedding/*/op_kernel, read at
// c29bc10): float32 inside and one rounding, except ApplyRotaryPosEmb in float16.
#include "rope.h"

using namespace sim;

using at::Tensor;

OP(aclnnRotaryPositionEmbedding, T, x, T, cos, T, sin, int64_t, mode, O, out) {
  put(out, rotated(*x, *cos, *sin, mode));
}

namespace {

/// In place. float16 is computed in float16 ("cast = 0" in the document's memory formula), so three roundings;
/// bfloat16 in float32 ("cast = 1"), one.
void apply(R x, T cos, T sin) {
  if (x->scalar_type() == at::kHalf) return put(x, *x * *cos + rotate(*x, rotary_half) * *sin);
  put(x, rotated(*x, *cos, *sin, rotary_half));
}

}  // namespace

OP(aclnnApplyRotaryPosEmb, R, query, R, key, T, cos, T, sin, int64_t, layout) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}
OP(aclnnApplyRotaryPosEmbV2, R, query, R, key, T, cos, T, sin, int64_t, layout, CP, mode) {
  apply(query, cos, sin);
  apply(key, cos, sin);
}
