// Rotary position embedding.
#include "common.h"

using namespace sim;

using at::Tensor;

static Tensor rot(const Tensor& x, int64_t mode) {
  if (mode == 1) {
    auto a = x.slice(-1, 0, std::nullopt, 2), b = x.slice(-1, 1, std::nullopt, 2);
    return at::stack({-b, a}, -1).flatten(-2);
  }
  TORCH_CHECK(mode == 0, "rotary mode ", mode, " not simulated");
  auto c = x.chunk(2, -1);
  return at::cat({-c[1], c[0]}, -1);
}
static Tensor rope(const Tensor& x, const Tensor& c, const Tensor& s, int64_t mode) {
  auto xf = fp32(x);
  return xf * fp32(c) + rot(xf, mode) * fp32(s);
}
OP(aclnnRotaryPositionEmbedding, T, x, T, c, T, s, int64_t, mode, O, o) { put(o, rope(*x, *c, *s, mode)); }
OP(aclnnRotaryPositionEmbeddingV2, T, x, T, c, T, s, int64_t, mode, T, rotate, O, o) {
  put(o, rope(*x, *c, *s, mode));
}
OP(aclnnApplyRotaryPosEmb, R, q, R, k, T, c, T, s, int64_t, layout) {
  put(q, rope(*q, *c, *s, 0));
  put(k, rope(*k, *c, *s, 0));
}
