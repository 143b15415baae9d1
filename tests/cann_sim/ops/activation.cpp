// Gated activations.
#include "common.h"

using namespace sim;

using at::Tensor;

OP(aclnnSwiGlu, T, x, int64_t, d, O, o) {
  auto c = fp32(*x).chunk(2, d);
  put(o, at::silu(c[0]) * c[1]);
}
OP(aclnnSwiGluGrad, T, g, T, x, int64_t, d, O, o) {
  auto c = fp32(*x).chunk(2, d);
  auto gf = fp32(*g);
  put(o, at::cat({at::silu_backward(gf * c[1], c[0]), gf * at::silu(c[0])}, d));
}
OP(aclnnGlu, T, x, int64_t, d, O, o) { put(o, at::glu(*x, d)); }
