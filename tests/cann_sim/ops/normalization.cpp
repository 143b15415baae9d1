// Layer, group and batch normalisation as plain PyTorch has them.
#include "common.h"

using namespace sim;

OP(aclnnLayerNorm, T, x, IA, s, T, w, T, b, double, eps, O, o, O, m, O, r) {
  auto y = at::native_layer_norm(*x, *s, w.opt(), b.opt(), eps);
  put(o, std::get<0>(y));
  put(m, std::get<1>(y));
  put(r, std::get<2>(y));
}
OP(aclnnLayerNormBackward, T, g, T, x, IA, s, T, m, T, r, T, w, T, b, BA, mask, O, gx, O, gw, O, gb) {
  auto y = at::native_layer_norm_backward(*g, *x, *s, *m, *r, w.opt(), b.opt(), {mask[0], mask[1], mask[2]});
  if (mask[0]) put(gx, std::get<0>(y));
  if (mask[1]) put(gw, std::get<1>(y));
  if (mask[2]) put(gb, std::get<2>(y));
}
OP(aclnnGroupNorm, T, x, T, w, T, b, int64_t, N, int64_t, C, int64_t, H, int64_t, g, double, eps, O, o, O, m,
   O, r) {
  auto y = at::native_group_norm(*x, w.opt(), b.opt(), N, C, H, g, eps);
  put(o, std::get<0>(y));
  put(m, std::get<1>(y));
  put(r, std::get<2>(y));
}
OP(aclnnBatchNorm, T, x, T, w, T, b, R, rm, R, rv, bool, tr, double, mom, double, eps, O, o, O, sm, O, si) {
  auto r = at::native_batch_norm(*x, w.opt(), b.opt(), rm.opt(), rv.opt(), tr, mom, eps);
  put(o, std::get<0>(r));
  if (tr) {
    put(sm, std::get<1>(r));
    put(si, std::get<2>(r));
  }
}
