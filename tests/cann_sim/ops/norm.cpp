// RMS norms and what is fused with them.
#include "common.h"

using namespace sim;

using at::Tensor;

static std::pair<Tensor, Tensor> rms(const Tensor& x, const Tensor& g, double eps, double gadd = 0) {
  std::vector<int64_t> d;
  for (int64_t k = x.dim() - g.dim(); k < x.dim(); k++) d.push_back(k);
  auto xf = fp32(x);
  auto r = at::rsqrt(at::mean(xf * xf, d, true) + eps);
  return {(xf * r) * (fp32(g) + gadd), r};
}
OP(aclnnRmsNorm, T, x, T, g, double, eps, O, y, O, r) {
  auto p = rms(*x, *g, eps);
  put(y, p.first);
  put(r, p.second);
}
OP(aclnnGemmaRmsNorm, T, x, T, g, double, eps, O, y, O, r) {
  auto p = rms(*x, *g, eps, 1.0);
  put(y, p.first);
  put(r, p.second);
}
OP(aclnnAddRmsNorm, T, a, T, b, T, g, double, eps, O, y, O, r, O, x) {
  auto s = *a + *b;
  auto p = rms(s, *g, eps);
  put(y, p.first);
  put(r, p.second);
  put(x, s);
}
OP(aclnnInplaceAddRmsNorm, R, a, R, b, T, g, double, eps, O, r) {
  auto s = *a + *b;
  auto p = rms(s, *g, eps);
  put(a, p.first);
  put(r, p.second);
  put(b, s);
}
OP(aclnnRmsNormGrad, T, dy, T, x, T, r, T, g, O, dx, O, dg) {
  std::vector<int64_t> d, e;
  for (int64_t k = 0; k < x->dim(); k++) (k < x->dim() - g->dim() ? e : d).push_back(k);
  auto xf = fp32(*x), gy = fp32(*dy) * fp32(*g), rs = r->reshape(at::mean(xf, d, true).sizes());
  auto n = xf * rs;
  put(dx, rs * (gy - n * at::mean(gy * n, d, true)));
  auto w = fp32(*dy) * n;
  put(dg, e.empty() ? w : at::sum(w, e));
}
