// Shapes, gathers and scatters.
#include "common.h"

using namespace sim;

OP(aclnnCat, TL, l, int64_t, d, O, o) { put(o, at::cat(*l, d)); }
OP(aclnnStack, TL, l, int64_t, d, O, o) { put(o, at::stack(*l, d)); }
OP(aclnnSplitWithSize, T, x, IA, s, int64_t, d, OL, o) {
  auto r = at::split_with_sizes(*x, *s, d);
  for (size_t k = 0; k < r.size(); k++) put(o.at(k), r[k]);
}
OP(aclnnRepeat, T, x, IA, r, O, o) { put(o, x->repeat(*r)); }
OP(aclnnRepeatInterleave, T, x, T, r, int64_t, n, O, o) { put(o, at::repeat_interleave(x->flatten(), *r)); }
OP(aclnnRepeatInterleaveInt, T, x, int64_t, r, int64_t, n, O, o) {
  put(o, at::repeat_interleave(x->flatten(), r));
}
OP(aclnnRepeatInterleaveIntWithDim, T, x, int64_t, r, int64_t, d, int64_t, n, O, o) {
  put(o, at::repeat_interleave(*x, r, d));
}
OP(aclnnRepeatInterleaveWithDim, T, x, T, r, int64_t, d, int64_t, n, O, o) {
  put(o, at::repeat_interleave(*x, *r, d));
}
OP(aclnnFlip, T, x, IA, d, O, o) { put(o, at::flip(*x, *d)); }
OP(aclnnRoll, T, x, IA, s, IA, d, O, o) { put(o, at::roll(*x, *s, *d)); }
OP(aclnnTriu, T, x, int64_t, d, O, o) { put(o, at::triu(*x, d)); }
OP(aclnnTril, T, x, int64_t, d, O, o) { put(o, at::tril(*x, d)); }
OP(aclnnInplaceTriu, R, x, int64_t, d) { put(x, at::triu(*x, d)); }
OP(aclnnInplaceTril, R, x, int64_t, d) { put(x, at::tril(*x, d)); }
OP(aclnnConstantPadNd, T, x, IA, p, S, v, O, o) { put(o, at::constant_pad_nd(*x, *p, *v)); }
OP(aclnnEmbedding, T, w, T, i, O, o) { put(o, at::embedding(*w, i->to(at::kLong))); }
OP(aclnnIndexSelect, T, x, int64_t, d, T, i, O, o) { put(o, at::index_select(*x, d, i->to(at::kLong))); }
OP(aclnnGather, T, x, int64_t, d, T, i, O, o) { put(o, at::gather(*x, d, i->to(at::kLong))); }
OP(aclnnGatherV3, T, x, int64_t, d, T, i, int64_t, b, int64_t, m, O, o) {
  put(o, at::index_select(*x, d, i->to(at::kLong).flatten()));
}
OP(aclnnTake, T, x, T, i, O, o) { put(o, at::take(*x, i->to(at::kLong))); }
static at::Tensor scat(const at::Tensor& x, int64_t d, const at::Tensor& i, const at::Tensor& s,
                       int64_t red) {
  if (red == 1) return at::scatter_add(x, d, i.to(at::kLong), s);
  if (red == 2) return at::scatter(x, d, i.to(at::kLong), s, "multiply");
  return at::scatter(x, d, i.to(at::kLong), s);
}
OP(aclnnScatter, T, x, int64_t, d, T, i, T, s, int64_t, red, O, o) { put(o, scat(*x, d, *i, *s, red)); }
OP(aclnnInplaceScatter, R, x, int64_t, d, T, i, T, s, int64_t, red) { put(x, scat(*x, d, *i, *s, red)); }
OP(aclnnScatterValue, T, x, int64_t, d, T, i, S, v, int64_t, red, O, o) {
  put(o, scat(*x, d, *i, at::full(i->sizes(), *v, x->options()), red));
}
OP(aclnnInplaceScatterValue, R, x, int64_t, d, T, i, S, v, int64_t, red) {
  put(x, scat(*x, d, *i, at::full(i->sizes(), *v, x->options()), red));
}
OP(aclnnScatterAdd, T, x, int64_t, d, T, i, T, s, O, o) {
  put(o, at::scatter_add(*x, d, i->to(at::kLong), *s));
}
OP(aclnnIndexAdd, T, x, int64_t, d, T, i, T, s, S, al, O, o) {
  put(o, at::index_add(*x, d, i->to(at::kLong), *s, *al));
}
OP(aclnnIndexCopy, T, x, int64_t, d, T, i, T, s, O, o) {
  put(o, at::index_copy(*x, d, i->to(at::kLong), *s));
}
OP(aclnnInplaceIndexCopy, R, x, int64_t, d, T, i, T, s) { x->index_copy_(d, i->to(at::kLong), *s); }
static c10::List<std::optional<at::Tensor>> idx(TL l) {
  c10::List<std::optional<at::Tensor>> r;
  for (auto& t : *l) {
    if (!t.defined() || (t.numel() == 0 && t.dim() == 1 && t.size(0) == 0))
      r.push_back(std::nullopt);
    else
      r.push_back(t.scalar_type() == at::kBool || t.scalar_type() == at::kByte ? t : t.to(at::kLong));
  }
  return r;
}
OP(aclnnIndex, T, x, TL, i, O, o) { put(o, at::index(*x, idx(i))); }
OP(aclnnIndexPutImpl, R, x, TL, i, T, v, bool, acc, bool, uns) {
  at::index_put_(*x, idx(i), v->scalar_type() == x->scalar_type() ? *v : v->to(x->scalar_type()), acc);
}
OP(aclnnStridedSlice, T, x, IA, b, IA, e, IA, s, int64_t, bm, int64_t, em, int64_t, el, int64_t, nm, int64_t,
   sm, O, o) {
  at::Tensor y = *x;
  for (size_t k = 0; k < (*b).size(); k++) y = y.slice(k, (*b)[k], (*e)[k], (*s)[k]);
  put(o, y);
}
// dynamic-shape outputs: data goes to the front of the (over-allocated) output, shape through aclGetViewShape
static void dyn(O o, const at::Tensor& r) {
  auto c = r.to(o->scalar_type()).contiguous();
  at::from_blob(o->data_ptr(), {c.numel()}, o->options()).copy_(c.flatten());
  o.shrink(c.sizes());
}
OP(aclnnNonzero, T, x, O, o) { dyn(o, at::nonzero(*x)); }
OP(aclnnNonzeroV2, T, x, O, o) { dyn(o, at::nonzero(*x).t()); }
OP(aclnnMaskedSelect, T, x, T, m, O, o) { dyn(o, at::masked_select(*x, m->to(at::kBool))); }
OP(aclnnUnique2, T, x, bool, s, bool, ri, bool, rc, O, y, O, yi, O, yc) {
  auto r = at::_unique2(*x, s, ri, rc);
  dyn(y, std::get<0>(r));
  if (ri) put(yi, std::get<1>(r));
  if (rc) dyn(yc, std::get<2>(r));
}
OP(aclnnEmbeddingDenseBackward, T, g, T, i, int64_t, n, int64_t, pad, bool, sc, O, o) {
  put(o, at::embedding_dense_backward(*g, i->to(at::kLong), n, pad, sc));
}
OP(aclnnScatterReduce, T, x, int64_t, d, T, i, T, s, int64_t, r, bool, inc, O, o) {
  static const char* n[] = {"sum", "prod", "mean", "amax", "amin"};
  put(o, at::scatter_reduce(*x, d, i->to(at::kLong), *s, r == 2 ? "prod" : r == 1 ? "sum" : n[r], inc));
}
OP(aclnnUnique, T, x, bool, s, bool, ri, O, y, O, yi) {
  auto r = at::_unique(*x, s, ri);
  auto c = std::get<0>(r).contiguous();
  y->flatten().slice(0, 0, c.numel()).copy_(c);
  y.shrink(c.sizes());
  if (ri) put(yi, std::get<1>(r));
}
OP(aclnnInplacePut, R, x, T, i, T, s, bool, acc) { x->put_(i->to(at::kLong), *s, acc); }
OP(aclnnIndexFill, T, x, int64_t, d, T, i, S, v, O, o) {
  put(o, at::index_fill(*x, d, i->to(at::kLong), *v));
}
