// Layer, group and batch normalisation as plain PyTorch has them.
#include "common.h"

using namespace sim;

OP(aclnnGroupNorm, T, x, T, w, T, b, int64_t, N, int64_t, C, int64_t, H, int64_t, g, double, eps, O, o, O, m,
   O, r) {
  put_each(at::native_group_norm(*x, w.opt(), b.opt(), N, C, H, g, eps), o, m, r);
}
OP(aclnnBatchNorm, T, x, T, w, T, b, R, rm, R, rv, bool, tr, double, mom, double, eps, O, o, O, sm, O, si) {
  auto r = at::native_batch_norm(*x, w.opt(), b.opt(), rm.opt(), rv.opt(), tr, mom, eps);
  put(o, std::get<0>(r));
  if (tr) {
    put(sm, std::get<1>(r));
    put(si, std::get<2>(r));
  }
}
