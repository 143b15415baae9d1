// Reductions, scans, sorting and searching.
#include "common.h"

using namespace sim;

OP(aclnnMean, T, x, IA, d, bool, k, DT, dt, O, o) {
  put(o, at::mean(*x, d ? at::OptionalIntArrayRef(*d) : at::OptionalIntArrayRef(), k, scalar_type(dt)));
}
OP(aclnnReduceSum, T, x, IA, d, bool, k, DT, dt, O, o) {
  put(o, at::sum(*x, d ? at::OptionalIntArrayRef(*d) : at::OptionalIntArrayRef(), k, scalar_type(dt)));
}
OP(aclnnReduceNansum, T, x, IA, d, bool, k, DT, dt, O, o) { put(o, at::nansum(*x, *d, k, scalar_type(dt))); }
OP(aclnnProd, T, x, DT, dt, O, o) { put(o, at::prod(*x, scalar_type(dt))); }
OP(aclnnProdDim, T, x, int64_t, d, bool, k, DT, dt, O, o) { put(o, at::prod(*x, d, k, scalar_type(dt))); }
OP(aclnnMax, T, x, O, o) { put(o, at::max(*x)); }
OP(aclnnMin, T, x, O, o) { put(o, at::min(*x)); }
OP(aclnnMaxDim, T, x, int64_t, d, bool, k, O, v, O, i) { put_each(at::max(*x, d, k), v, i); }
OP(aclnnMinDim, T, x, int64_t, d, bool, k, O, v, O, i) { put_each(at::min(*x, d, k), v, i); }
OP(aclnnAmax, T, x, IA, d, bool, k, O, o) { put(o, at::amax(*x, *d, k)); }
OP(aclnnAmin, T, x, IA, d, bool, k, O, o) { put(o, at::amin(*x, *d, k)); }
OP(aclnnArgMax, T, x, int64_t, d, bool, k, O, o) { put(o, at::argmax(*x, d, k)); }
OP(aclnnArgMin, T, x, int64_t, d, bool, k, O, o) { put(o, at::argmin(*x, d, k)); }
static at::Tensor anyall(const at::Tensor& x, at::IntArrayRef d, bool k, bool all) {
  if (d.empty()) d = at::IntArrayRef();
  auto b = x.to(at::kBool);
  std::vector<int64_t> dd(d.begin(), d.end());
  if (dd.empty())
    for (int64_t i = 0; i < x.dim(); i++) dd.push_back(i);
  for (auto& i : dd)
    if (i < 0) i += x.dim();
  std::sort(dd.rbegin(), dd.rend());
  if (x.dim() == 0) return all ? b.all() : b.any();
  for (auto i : dd) b = all ? at::all(b, i, k) : at::any(b, i, k);
  return b;
}
OP(aclnnAny, T, x, IA, d, bool, k, O, o) { put(o, anyall(*x, *d, k, false)); }
OP(aclnnAll, T, x, IA, d, bool, k, O, o) { put(o, anyall(*x, *d, k, true)); }
OP(aclnnCumsum, T, x, int64_t, d, DT, dt, O, o) { put(o, at::cumsum(*x, d, scalar_type(dt))); }
OP(aclnnCumprod, T, x, S, d, DT, dt, O, o) { put(o, at::cumprod(*x, (*d).toLong(), scalar_type(dt))); }
OP(aclnnLogSumExp, T, x, IA, d, bool, k, O, o) { put(o, at::logsumexp(*x, *d, k)); }
OP(aclnnVarCorrection, T, x, IA, d, int64_t, c, bool, k, O, o) { put(o, at::var(*x, *d, at::Scalar(c), k)); }
OP(aclnnStd, T, x, IA, d, int64_t, c, bool, k, O, o) { put(o, at::std(*x, *d, at::Scalar(c), k)); }
OP(aclnnVarMean, T, x, IA, d, int64_t, c, bool, k, O, v, O, m) {
  put_each(at::var_mean(*x, *d, at::Scalar(c), k), v, m);
}
OP(aclnnNorm, T, x, S, p, IA, d, bool, k, O, o) { put(o, at::norm(*x, p.opt(), *d, k)); }
OP(aclnnLinalgVectorNorm, T, x, S, p, IA, d, bool, k, DT, dt, O, o) {
  put(o, at::linalg_vector_norm(*x, *p,
                                d && d.p->v.size() ? at::OptionalIntArrayRef(*d) : at::OptionalIntArrayRef(),
                                k, o->scalar_type()));
}
OP(aclnnTopk, T, x, int64_t, k, int64_t, d, bool, l, bool, s, O, v, O, i) {
  put_each(at::topk(*x, k, d, l, s), v, i);
}
OP(aclnnSort, T, x, bool, st, int64_t, d, bool, desc, O, v, O, i) {
  put_each(at::sort(*x, st, d, desc), v, i);
}
OP(aclnnBincount, T, x, T, w, int64_t, n, O, o) { put(o, at::bincount(*x, w.opt(), n)); }
OP(aclnnSearchSorted, T, s, T, x, bool, i32, bool, right, T, sorter, O, o) {
  put(o, at::searchsorted(*s, *x, i32, right, std::nullopt, sorter.opt()));
}
OP(aclnnAminmax, T, x, IA, d, bool, k, O, mn, O, mx) {
  put(mn, at::amin(*x, *d, k));
  put(mx, at::amax(*x, *d, k));
}
OP(aclnnHistc, T, x, int64_t, bins, S, lo, S, hi, O, o) {
  put(o, at::histc(x->to(at::kFloat), bins, *lo, *hi));
}
OP(aclnnCummax, T, x, int64_t, d, O, v, O, i) { put_each(at::cummax(*x, d), v, i); }
OP(aclnnCummin, T, x, int64_t, d, O, v, O, i) { put_each(at::cummin(*x, d), v, i); }
OP(aclnnMedianDim, T, x, int64_t, d, bool, k, O, v, O, i) { put_each(at::median(*x, d, k), v, i); }
OP(aclnnNanMedianDim, T, x, int64_t, d, bool, k, O, v, O, i) { put_each(at::nanmedian(*x, d, k), v, i); }
OP(aclnnKthvalue, T, x, int64_t, n, int64_t, d, bool, k, O, v, O, i) {
  put_each(at::kthvalue(*x, n, d, k), v, i);
}
OP(aclnnStdMeanCorrection, T, x, IA, d, int64_t, c, bool, k, O, s, O, m) {
  put_each(at::std_mean(*x, *d, at::Scalar(c), k), s, m);
}
OP(aclnnRenorm, T, x, S, p, int64_t, d, S, mx, O, o) { put(o, at::renorm(*x, *p, d, *mx)); }
