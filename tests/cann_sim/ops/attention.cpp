// Attention: training and inference operators.
#include "common.h"

using namespace sim;

using at::Tensor;

struct AttnIn {
  Tensor mask, pse;
  double scale;
  int64_t pre, next, sparse;
  Tensor drop;
};  // drop: multiplier for the probabilities or undefined
struct AttnOut {
  Tensor o, p, mx, sum;
};
static Tensor hidden(const AttnIn& a, int64_t B, int64_t N, int64_t S1, int64_t S2) {  // true = masked out
  auto i = at::arange(S1).unsqueeze(1), j = at::arange(S2).unsqueeze(0);
  Tensor m;
  auto full = [&] {
    auto k = a.mask.to(at::kBool);
    while (k.dim() > 4) k = k.squeeze(0);
    return k.slice(-2, 0, S1).slice(-1, 0, S2);
  };
  switch (a.sparse) {
    case 0:
      if (!a.mask.defined()) return m;
      m = full();
      if (a.next < S2) m = m.logical_or(j > i + a.next);
      if (a.pre < S1) m = m.logical_or(j < i - a.pre);
      break;
    case 1:
      if (a.mask.defined()) m = full();
      break;
    case 2:
      m = j > i;
      break;
    case 3:
      m = j > i + (S2 - S1);
      break;
    case 4: {
      auto b = i + (S2 - S1);
      m = (j > b + a.next).logical_or(j < b - a.pre);
      break;
    }
    default:
      TORCH_CHECK(false, "sparse_mode ", a.sparse, " not simulated");
  }
  return m;
}
static AttnOut attend(const Tensor& q, Tensor k, Tensor v, const AttnIn& a) {  // all [B,N,S,D]
  auto B = q.size(0), N = q.size(1), S1 = q.size(2), S2 = k.size(2);
  if (k.size(1) != N) {
    k = k.repeat_interleave(N / k.size(1), 1);
    v = v.repeat_interleave(N / v.size(1), 1);
  }
  auto qf = fp32(q), kf = fp32(k), vf = fp32(v);
  auto s = at::matmul(qf, kf.transpose(-1, -2));
  if (a.pse.defined()) s = s + fp32(a.pse);
  s = s * a.scale;
  auto m = hidden(a, B, N, S1, S2);
  if (m.defined()) s = s.masked_fill(m, -std::numeric_limits<float>::infinity());
  AttnOut r;
  r.mx = at::amax(s, {-1}, true);
  auto mx = at::where(at::isinf(r.mx), at::zeros_like(r.mx), r.mx);
  auto e = at::exp(s - mx);
  r.sum = at::sum(e, {-1}, true);
  r.p = e / at::clamp_min(r.sum, 1e-30);
  r.o = at::matmul(a.drop.defined() ? r.p * a.drop : r.p, vf);
  return r;
}
// layout <-> BNSD
static Tensor tobnsd(const Tensor& x, const std::string& l, int64_t heads) {
  if (l == "BNSD") return x;
  if (l == "BSND") return x.transpose(1, 2);
  if (l == "BSH") return x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
  if (l == "SBH") return x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}).permute({1, 2, 0, 3});
  TORCH_CHECK(false, "layout ", l, " not simulated");
}
static Tensor frombnsd(const Tensor& x, const std::string& l) {
  if (l == "BNSD") return x;
  if (l == "BSND") return x.transpose(1, 2);
  if (l == "BSH") return x.transpose(1, 2).flatten(2);
  if (l == "SBH") return x.permute({2, 0, 1, 3}).flatten(2);
  TORCH_CHECK(false, "layout ", l);
}
static int64_t kvheads(const Tensor& q, const Tensor& k, const std::string& l, int64_t n) {
  return l == "BSH" || l == "SBH" ? k.size(2) / (q.size(2) / n) : 0;
}
static Tensor unpack(T drop, double keep, at::IntArrayRef shape) {  // device bit mask -> 0 or 1/keep
  if (keep >= 1.0 || !drop) return Tensor();
  int64_t n = 1;
  for (auto x : shape) n *= x;
  TORCH_CHECK(drop->numel() * 8 >= n, "dropout mask too small");
  auto r = at::empty({n}, at::kFloat);
  auto* f = r.data_ptr<float>();
  auto* d = (const uint8_t*)drop->data_ptr();
  for (int64_t i = 0; i < n; i++) f[i] = (d[i / 8] >> (i % 8) & 1) / keep;
  return r.reshape(shape);
}
static void fa_fwd(T q, T k, T v, T pse, T drop, T mask, double scale, double keep, int64_t pre, int64_t next,
                   int64_t n, const std::string& l, int64_t sparse, O mx, O sum, O o) {
  auto qq = tobnsd(*q, l, n), kk = tobnsd(*k, l, kvheads(*q, *k, l, n)),
       vv = tobnsd(*v, l, kvheads(*q, *k, l, n));
  auto r = attend(qq, kk, vv,
                  {mask.orundef(), pse.orundef(), scale, pre, next, sparse,
                   unpack(drop, keep, {qq.size(0), qq.size(1), qq.size(2), kk.size(2)})});
  put(o, frombnsd(r.o, l));
  if (mx) put(mx, r.mx.expand({-1, -1, -1, 8}));
  if (sum) put(sum, r.sum.expand({-1, -1, -1, 8}));
}
OP(aclnnFlashAttentionScore, T, q, T, k, T, v, T, pse, T, drop, T, pad, T, mask, IA, prefix, double, scale,
   double, keep, int64_t, pre, int64_t, next, int64_t, n, CP, l, int64_t, inner, int64_t, sparse, O, mx, O,
   sum, O, so, O, o) {
  fa_fwd(q, k, v, pse, drop, mask, scale, keep, pre, next, n, l, sparse, mx, sum, o);
}
OP(aclnnFlashAttentionScoreV2, T, q, T, k, T, v, T, pse, T, drop, T, pad, T, mask, IA, prefix, IA, qs, IA, ks,
   double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, n, CP, l, int64_t, inner, int64_t,
   sparse, int64_t, pt, O, mx, O, sum, O, so, O, o) {
  fa_fwd(q, k, v, pse, drop, mask, scale, keep, pre, next, n, l, sparse, mx, sum, o);
}
static void fa_bwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, const AttnIn& a,
                   Tensor& dq, Tensor& dk, Tensor& dv) {
  auto N = q.size(1), NK = k.size(1), g = N / NK;
  auto r = attend(q, k, v, a);
  auto df = fp32(dy);
  auto kf = fp32(k).repeat_interleave(g, 1), vf = fp32(v).repeat_interleave(g, 1);
  auto dp = at::matmul(df, vf.transpose(-1, -2));
  if (a.drop.defined()) dp = dp * a.drop;
  auto pd = a.drop.defined() ? r.p * a.drop : r.p;
  auto ds = r.p * (dp - at::sum(dp * r.p, {-1}, true)) * a.scale;
  auto red = [&](const Tensor& x) { return x.reshape({x.size(0), NK, g, x.size(2), x.size(3)}).sum(2); };
  dq = at::matmul(ds, kf);
  dk = red(at::matmul(ds.transpose(-1, -2), fp32(q)));
  dv = red(at::matmul(pd.transpose(-1, -2), df));
}
OP(aclnnFlashAttentionScoreGrad, T, q, T, k, T, v, T, dy, T, pse, T, drop, T, pad, T, mask, T, mx, T, sum, T,
   sm, T, ao, IA, prefix, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, n, CP, lay,
   int64_t, inner, int64_t, sparse, O, dq, O, dk, O, dv, O, dpse) {
  std::string l = lay;
  auto kn = kvheads(*q, *k, l, n);
  Tensor a, b, c;
  auto qq = tobnsd(*q, l, n), kk = tobnsd(*k, l, kn);
  fa_bwd(qq, kk, tobnsd(*v, l, kn), tobnsd(*dy, l, n),
         {mask.orundef(), pse.orundef(), scale, pre, next, sparse,
          unpack(drop, keep, {qq.size(0), qq.size(1), qq.size(2), kk.size(2)})},
         a, b, c);
  put(dq, frombnsd(a, l));
  put(dk, frombnsd(b, l));
  put(dv, frombnsd(c, l));
}
// TND (packed variable-length) layout: cumulative sequence lengths
template <class F>
static void each_seq(IA ql, IA kl, F f) {
  int64_t a = 0, b = 0;
  for (size_t i = 0; i < (*ql).size(); i++) {
    int64_t x = (*ql)[i], y = (*kl)[i];
    if (x > a) f(i, a, x, b, y);
    a = x;
    b = y;
  }
}
static Tensor tnd(const Tensor& x, int64_t a, int64_t b) {
  return x.slice(0, a, b).transpose(0, 1).unsqueeze(0);
}
OP(aclnnFlashAttentionVarLenScore, T, q, T, k, T, v, T, pse, T, drop, T, pad, T, mask, IA, prefix, IA, ql, IA,
   kl, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, n, CP, l, int64_t, inner, int64_t,
   sparse, O, mx, O, sum, O, so, O, o) {
  each_seq(ql, kl, [&](size_t, int64_t a, int64_t b, int64_t c, int64_t d) {
    auto r = attend(tnd(*q, a, b), tnd(*k, c, d), tnd(*v, c, d),
                    {mask.orundef(), Tensor(), scale, pre, next, sparse, {}});
    o->slice(0, a, b).copy_(r.o[0].transpose(0, 1));
    mx->slice(0, a, b).copy_(r.mx[0].transpose(0, 1).expand({-1, -1, 8}));
    sum->slice(0, a, b).copy_(r.sum[0].transpose(0, 1).expand({-1, -1, 8}));
  });
}
static void fia(T q, TL kl, TL vl, T pse, T mask, IA aq, IA ak, T table, int64_t n, double scale, int64_t pre,
                int64_t next, std::string l, int64_t nk, int64_t sparse, int64_t bs, bool want_lse, O o,
                O lse) {
  if (nk == 0) nk = n;
  std::string lo = l;
  auto us = l.find('_');
  if (us != std::string::npos) {
    lo = l.substr(us + 1);
    l = l.substr(0, us);
  }
  bool packed = l == "TND";
  Tensor qq = packed ? *q : tobnsd(*q, l, n);
  int64_t B = packed ? (int64_t)(*aq).size() : qq.size(0), D = qq.size(-1);
  auto kvlen = [&](int64_t b) -> int64_t {
    if (!ak || (*ak).empty()) return -1;
    auto a = *ak;
    if (packed && !table) return a[b] - (b ? a[b - 1] : 0);
    return a.size() == 1 ? a[0] : a[b];
  };
  auto cache = [&](TL c, int64_t b) -> Tensor {  // -> [1,nk,S,D]
    if (table) {
      auto& x = c.at(0);
      auto len = kvlen(b);
      TORCH_CHECK(len >= 0, "paged attention needs actual_seq_lengths_kv");
      auto blk = table->select(0, b).to(at::kLong).slice(0, 0, (len + bs - 1) / bs);
      auto y = x.index_select(0, blk);  // [nb,bs,H] or [nb,nk,bs,D]
      y = y.dim() == 3 ? y.reshape({-1, nk, y.size(2) / nk}).transpose(0, 1)
                       : y.transpose(0, 1).reshape({nk, -1, D});
      return y.slice(1, 0, len).unsqueeze(0);
    }
    if (packed) {
      int64_t e = (*ak)[b], s = b ? (*ak)[b - 1] : 0;
      return tnd(c.at(0), s, e);
    }
    Tensor y = c.size() > 1 ? tobnsd(c.at(b), l, nk) : tobnsd(c.at(0), l, nk).slice(0, b, b + 1);
    auto len = kvlen(b);
    return len >= 0 ? y.slice(2, 0, len) : y;
  };
  std::vector<Tensor> outs, lses;
  for (int64_t b = 0; b < B; b++) {
    int64_t s0 = packed && b ? (*aq)[b - 1] : 0;
    Tensor x = packed ? tnd(qq, s0, (*aq)[b]) : qq.slice(0, b, b + 1);
    Tensor m = mask.orundef();
    if (m.defined() && m.dim() >= 3 && m.size(0) == B && B > 1) m = m.slice(0, b, b + 1);
    if (m.defined() && m.dim() == 3) m = m.unsqueeze(1);
    Tensor k = cache(kl, b), v = cache(vl, b);
    int64_t sp = sparse;
    if (x.size(2) == 1 && (sp == 2 || sp == 3)) sp = 3;
    Tensor ps = pse.orundef();
    if (ps.defined() && ps.size(0) == B && B > 1) ps = ps.slice(0, b, b + 1);
    auto r = attend(x, k, v, {m, ps, scale, pre, next, sp, {}});
    outs.push_back(packed ? r.o[0].transpose(0, 1) : r.o);
    if (want_lse) lses.push_back(packed ? (r.mx + r.sum.log())[0].transpose(0, 1) : r.mx + r.sum.log());
  }
  auto all = at::cat(outs, 0);
  put(o, packed ? all : frombnsd(all, lo));
  if (want_lse && lse) put(lse, at::cat(lses, 0));
}
OP(aclnnFusedInferAttentionScoreV2, T, q, TL, k, TL, v, T, pse, T, mask, IA, aq, IA, ak, T, d1, T, q1, T, d2,
   T, q2, T, qo2, T, as, T, ao, T, table, T, qp, T, kp, T, kas, T, kao, T, vas, T, vao, T, ksp, T, vsp, IA,
   asp, int64_t, n, double, scale, int64_t, pre, int64_t, next, CP, l, int64_t, nk, int64_t, sparse, int64_t,
   inner, int64_t, bs, int64_t, am, bool, lf, int64_t, kam, int64_t, vam, O, o, O, lse) {
  TORCH_CHECK(!as && !kas && !d1 && !q2, "quantised inference attention not simulated");
  fia(q, k, v, pse, mask, aq, ak, table, n, scale, pre, next, l, nk, sparse, bs, lf, o, lse);
}
OP(aclnnFusedInferAttentionScoreV3, T, q, TL, k, TL, v, T, pse, T, mask, IA, aq, IA, ak, T, d1, T, q1, T, d2,
   T, q2, T, qo2, T, as, T, ao, T, table, T, qp, T, kp, T, kas, T, kao, T, vas, T, vao, T, ksp, T, vsp, IA,
   asp, T, qr, T, kr, T, kra, int64_t, n, double, scale, int64_t, pre, int64_t, next, CP, l, int64_t, nk,
   int64_t, sparse, int64_t, inner, int64_t, bs, int64_t, am, bool, lf, int64_t, kam, int64_t, vam, O, o, O,
   lse) {
  TORCH_CHECK(!as && !kas && !d1 && !q2 && !qr, "quantised / MLA inference attention not simulated");
  fia(q, k, v, pse, mask, aq, ak, table, n, scale, pre, next, l, nk, sparse, bs, lf, o, lse);
}
OP(aclnnPromptFlashAttentionV3, T, q, T, k, T, v, T, pse, T, mask, IA, aq, IA, ak, T, d1, T, q1, T, d2, T, q2,
   T, qo2, int64_t, n, double, scale, int64_t, pre, int64_t, next, CP, l, int64_t, nk, int64_t, sparse,
   int64_t, inner, O, o) {
  aclTensorList kk, vv;
  kk.v = {k.p};
  vv.v = {v.p};
  fia(q, TL{&kk}, TL{&vv}, pse, mask, aq, ak, T{}, n, scale, pre, next, l, nk, sparse, 0, false, o, O{});
}
OP(aclnnIncreFlashAttentionV4, T, q, TL, k, TL, v, T, pse, T, mask, IA, ak, T, d1, T, q1, T, d2, T, q2, T,
   qo2, T, as, T, ao, T, table, T, kp, int64_t, n, double, scale, CP, l, int64_t, nk, int64_t, bs, int64_t,
   inner, O, o) {
  fia(q, k, v, pse, mask, IA{}, ak, table, n, scale, 1 << 30, 1 << 30, l, nk, 0, bs, false, o, O{});
}
OP(aclnnScaledMaskedSoftmax, T, x, T, m, double, s, bool, tri, O, o) {
  put(o, at::softmax((fp32(*x) * s).masked_fill(m->to(at::kBool), -10000.0), -1));
}
