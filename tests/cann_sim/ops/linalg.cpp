// Linear algebra other than matrix products of two axes and more.
#include "common.h"

using namespace sim;

OP(aclnnMv, T, a, T, b, O, o, int8_t, c) { put(o, at::mv(*a, *b)); }
OP(aclnnDot, T, a, T, b, O, o) { put(o, at::dot(*a, *b)); }
OP(aclnnAddmv, T, x, T, m, T, v, S, al, S, be, O, o, int8_t, c) { put(o, at::addmv(*x, *m, *v, *be, *al)); }
OP(aclnnAddr, T, x, T, a, T, b, S, be, S, al, O, o) { put(o, at::addr(*x, *a, *b, *be, *al)); }
OP(aclnnAddbmm, T, x, T, a, T, b, S, be, S, al, O, o, int8_t, c) { put(o, at::addbmm(*x, *a, *b, *be, *al)); }
OP(aclnnLinalgCross, T, a, T, b, int64_t, d, O, o) { put(o, at::linalg_cross(*a, *b, d)); }
OP(aclnnCdist, T, a, T, b, float, p, int64_t, m, O, o) { put(o, at::cdist(*a, *b, p)); }
OP(aclnnTriangularSolve, T, b, T, a, bool, up, bool, tr, bool, un, O, x, O, m) {
  put_each(at::triangular_solve(*b, *a, up, tr, un), x, m);
}
OP(aclnnSvd, T, a, bool, full, bool, uv, O, s, O, u, O, v) {
  auto r = at::_linalg_svd(*a, full, uv);
  put(s, std::get<1>(r));
  if (uv) {
    put(u, std::get<0>(r));
    put(v, std::get<2>(r).transpose(-1, -2));
  }
}
OP(aclnnLinalgQr, T, a, int64_t, mode, O, q, O, r_) {
  static const char* n[] = {"reduced", "complete", "r"};
  auto r = at::linalg_qr(*a, n[mode]);
  if (mode != 2) put(q, std::get<0>(r));
  put(r_, std::get<1>(r));
}
