// Creation, filling, copying and casting.
#include "common.h"

using namespace sim;

OP(aclnnInplaceCopy, O, dst, T, src) {
  if (dst->numel() == 1 && src->numel() == 1)
    dst->copy_(src->reshape(dst->sizes()));
  else
    dst->copy_(*src);
}
OP(aclnnCast, T, x, DT, dt, O, o) { put(o, x->to(scalar_type(dt))); }
OP(aclnnInplaceZero, O, x) { x->zero_(); }
OP(aclnnInplaceOne, O, x) { x->fill_(1); }
OP(aclnnInplaceFillScalar, O, x, S, v) { x->fill_(*v); }
OP(aclnnInplaceFillTensor, O, x, T, v) { x->fill_(v->reshape({})); }
OP(aclnnArange, S, a, S, b, S, c, O, o) {
  put(o, at::arange(*a, *b, *c, o->options()).slice(0, 0, o->numel()));
}
OP(aclnnRange, S, a, S, b, S, c, O, o) { put(o, at::range(*a, *b, *c, o->options())); }
OP(aclnnLinspace, S, a, S, b, int64_t, n, O, o) { put(o, at::linspace(*a, *b, n, o->options())); }
OP(aclnnEye, int64_t, n, int64_t, m, O, o) { put(o, at::eye(n, m, o->options())); }
OP(aclnnOneHot, T, x, int, depth, T, on, T, off, int64_t, axis, O, o) {
  auto r = at::one_hot(x->to(at::kLong), depth);
  (void)axis;
  put(o, at::where(r.to(at::kBool), on->reshape({}), off->reshape({})));
}
OP(aclnnLogSpace, S, a, S, b, int64_t, n, double, base, O, o) {
  put(o, at::logspace(*a, *b, n, base, o->options()));
}
