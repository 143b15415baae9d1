// Operators over lists of tensors, and optimisers.
#include "common.h"

using namespace sim;

#define EACH(o, e)                               \
  do {                                           \
    for (size_t k_ = 0; k_ < (o).size(); k_++) { \
      put((o).at(k_), e);                        \
    }                                            \
  } while (0)
OP(aclnnForeachAddScalarV2, TL, a, S, s, OL, o) { EACH(o, a.at(k_) + *s); }
OP(aclnnForeachSubScalarV2, TL, a, S, s, OL, o) { EACH(o, a.at(k_) - *s); }
OP(aclnnForeachMulScalarV2, TL, a, S, s, OL, o) { EACH(o, a.at(k_) * *s); }
OP(aclnnForeachDivScalarV2, TL, a, S, s, OL, o) { EACH(o, a.at(k_) / *s); }
OP(aclnnForeachMulScalar, TL, a, T, s, OL, o) { EACH(o, a.at(k_) * s->reshape({})); }
OP(aclnnForeachAddScalar, TL, a, T, s, OL, o) { EACH(o, a.at(k_) + s->reshape({})); }
OP(aclnnForeachDivScalar, TL, a, T, s, OL, o) { EACH(o, a.at(k_) / s->reshape({})); }
OP(aclnnForeachAddListV2, TL, a, TL, b, S, s, OL, o) { EACH(o, at::add(a.at(k_), b.at(k_), *s)); }
OP(aclnnForeachSubListV2, TL, a, TL, b, S, s, OL, o) { EACH(o, at::sub(a.at(k_), b.at(k_), *s)); }
OP(aclnnForeachMulList, TL, a, TL, b, OL, o) { EACH(o, a.at(k_) * b.at(k_)); }
OP(aclnnForeachDivList, TL, a, TL, b, OL, o) { EACH(o, a.at(k_) / b.at(k_)); }
OP(aclnnForeachDivScalarList, TL, a, SL, s, OL, o) {
  auto v = *s;
  EACH(o, a.at(k_) / v[k_]);
}
OP(aclnnForeachMulScalarList, TL, a, SL, s, OL, o) {
  auto v = *s;
  EACH(o, a.at(k_) * v[k_]);
}
OP(aclnnForeachAddScalarList, TL, a, SL, s, OL, o) {
  auto v = *s;
  EACH(o, a.at(k_) + v[k_]);
}
OP(aclnnForeachLerpScalar, TL, a, TL, b, S, w, OL, o) { EACH(o, at::lerp(a.at(k_), b.at(k_), *w)); }
OP(aclnnForeachSqrt, TL, a, OL, o) { EACH(o, a.at(k_).sqrt()); }
OP(aclnnForeachNeg, TL, a, OL, o) { EACH(o, a.at(k_).neg()); }
OP(aclnnForeachReciprocal, TL, a, OL, o) { EACH(o, a.at(k_).reciprocal()); }
OP(aclnnForeachAddcmulScalarV2, TL, a, TL, b, TL, c, S, s, OL, o) {
  EACH(o, at::addcmul(a.at(k_), b.at(k_), c.at(k_), *s));
}
OP(aclnnForeachAddcdivScalarV2, TL, a, TL, b, TL, c, S, s, OL, o) {
  EACH(o, at::addcdiv(a.at(k_), b.at(k_), c.at(k_), *s));
}
OP(aclnnForeachAddcdivScalarList, TL, a, TL, b, TL, c, T, s, OL, o) {
  EACH(o, a.at(k_) + b.at(k_) / c.at(k_) * (*s)[k_]);
}
OP(aclnnForeachNorm, TL, a, S, p, OL, o) {
  EACH(o, at::linalg_vector_norm(a.at(k_), p ? *p : at::Scalar(2)));
}
OP(aclnnForeachCopy, TL, a, OL, o) { EACH(o, a.at(k_)); }
OP(aclnnForeachZeroInplace, RL, a) {
  for (size_t k = 0; k < a.size(); k++) a.at(k).zero_();
}
OP(aclnnApplyAdamWV2, R, w, R, m, R, v, T, vm, T, g, T, step, float, lr, float, b1, float, b2, float, wd,
   float, eps, bool, ams, bool, maxi) {
  auto gg = maxi ? g->neg() : *g;
  double t = step->to(at::kDouble).item<double>();
  TORCH_CHECK(!ams, "amsgrad not simulated");
  w->mul_(1 - lr * wd);
  m->lerp_(gg.to(m->scalar_type()), 1 - b1);
  v->mul_(b2).addcmul_(gg, gg, 1 - b2);
  auto den = (v->sqrt() / std::sqrt(1 - std::pow(b2, t))).add_(eps);
  w->addcdiv_(*m, den, -lr / (1 - std::pow(b1, t)));
}
OP(aclnnForeachNonFiniteCheckAndUnscale, RL, g, O, found, T, inv) {
  for (size_t k = 0; k < g.size(); k++) {
    auto& t = g.at(k);
    if (!at::isfinite(t).all().item<bool>()) found->fill_(1.0);
    t.mul_(inv->reshape({}).to(t.scalar_type()));
  }
}
OP(aclnnAmpUpdateScale, T, scale, T, growth, T, found, double, gf, double, bf, int64_t, gi, O, so, O, go) {
  if (found->item<float>() != 0) {
    put(so, *scale * bf);
    go->zero_();
    return;
  }
  auto g = growth->item<int>() + 1;
  if (g == gi) {
    put(so, *scale * gf);
    go->zero_();
  } else {
    put(so, *scale);
    go->fill_(g);
  }
}
