// Random numbers and dropout masks.
#include "common.h"

using namespace sim;

OP(aclnnInplaceNormal, O, x, float, m, float, s, int64_t, seed, int64_t, off) {
  x->normal_(m, s, generator(seed, off));
}
OP(aclnnInplaceUniform, O, x, double, a, double, b, uint64_t, seed, uint64_t, off) {
  x->uniform_(a, b, generator(seed, off));
}
OP(aclnnInplaceRandom, O, x, int64_t, a, int64_t, b, int64_t, seed, int64_t, off) {
  x->random_(a, b, generator(seed, off));
}
OP(aclnnInplaceBernoulli, O, x, S, p, int64_t, seed, int64_t, off) {
  x->bernoulli_((*p).toDouble(), generator(seed, off));
}
OP(aclnnRandperm, int64_t, n, int64_t, seed, int64_t, off, O, o) {
  put(o, at::randperm(n, generator(seed, off), at::TensorOptions(at::kLong)));
}
OP(aclnnMultinomial, T, x, int64_t, n, bool, r, int64_t, seed, int64_t, off, O, o) {
  put(o, at::multinomial(*x, n, r, generator(seed, off)));
}
OP(aclnnNormalFloatFloat, float, m, float, s, int64_t, seed, int64_t, off, O, o) {
  o->normal_(m, s, generator(seed, off));
}
OP(aclnnNormalTensorTensor, T, m, T, s, int64_t, seed, int64_t, off, O, o) {
  put(o, at::normal(*m, *s, generator(seed, off)));
}
OP(aclnnInplaceBernoulliTensor, O, x, T, p, int64_t, seed, int64_t, off) {
  x->bernoulli_(*p, generator(seed, off));
}
// mask is a bit mask on the real device (1 bit per element, padded to 128): same layout here
static void genmask(at::Tensor& m, int64_t n, double p, int64_t seed, int64_t off) {
  auto keep = at::empty({n}, at::kFloat).uniform_(0, 1, generator(seed, off)).ge(p);
  auto* k = keep.data_ptr<bool>();
  auto* d = (uint8_t*)m.data_ptr();
  m.zero_();
  for (int64_t i = 0; i < n; i++)
    if (k[i]) d[i / 8] |= 1u << (i % 8);
}
static int64_t prod(IA s) {
  int64_t n = 1;
  for (auto x : *s) n *= x;
  return n;
}
OP(aclnnDropoutGenMask, IA, s, double, p, int64_t, seed, int64_t, off, O, m) {
  genmask(*m, prod(s), p, seed, off);
}
OP(aclnnDropoutGenMaskV2, IA, s, double, p, int64_t, seed, int64_t, off, DT, dt, O, m) {
  genmask(*m, prod(s), p, seed, off);
}
OP(aclnnDropoutDoMask, T, x, T, m, double, p, O, o) {
  auto c = x->contiguous();
  auto keep = at::empty(c.sizes(), at::kBool);
  auto* k = keep.data_ptr<bool>();
  auto* d = (uint8_t*)m->data_ptr();
  for (int64_t i = 0; i < c.numel(); i++) k[i] = d[i / 8] >> (i % 8) & 1;
  put(o, c * keep.to(c.scalar_type()) * (p < 1 ? 1.0 / (1.0 - p) : 0.0));
}
