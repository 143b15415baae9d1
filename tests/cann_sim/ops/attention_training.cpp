// Attention for training, which torch's scaled_dot_product_attention runs on: FlashAttentionScore V1 to V4, its
// gradient, and the packed form.
#include "attention.h"

using namespace sim;

using at::Tensor;

namespace {

/// What the versions of FlashAttentionScore share.
struct Training {
  T query, key, value, bias, drop, mask, sinks;
  double scale, keep;
  int64_t pre, next, heads;
  std::string layout;
  int64_t inner_precise, sparse, bias_type;
};

int64_t kv_heads(const Training& a) {
  bool merged = a.layout == "BSH" || a.layout == "SBH";
  return merged ? a.key->size(2) / (a.query->size(2) / a.heads) : 0;
}

/// The device's dropout mask is one bit an element; multipliers 0 and 1 / keep, or undefined.
Tensor multipliers(T drop, double keep, at::IntArrayRef shape) {
  if (keep >= 1.0 || !drop) return Tensor();
  int64_t count = 1;
  for (auto n : shape) count *= n;
  TORCH_CHECK(drop->numel() * 8 >= count, "the dropout mask has ", drop->numel() * 8, " bits of ", count);
  auto result = at::empty({count}, at::kFloat);
  auto* to = result.data_ptr<float>();
  auto* from = static_cast<const uint8_t*>(drop->data_ptr());
  for (int64_t i = 0; i < count; i++) to[i] = static_cast<float>((from[i / 8] >> (i % 8) & 1) / keep);
  return result.reshape(shape);
}

Attention problem(const Training& a) {
  Attention one;
  one.query = to_bnsd(*a.query, a.layout, a.heads);
  one.key = to_bnsd(*a.key, a.layout, kv_heads(a));
  one.value = to_bnsd(*a.value, a.layout, kv_heads(a));
  auto rows = one.query.size(2), columns = one.key.size(2);
  // "Without a mask, sparseMode, preTokens and nextTokens are without effect: everything is computed".
  if (a.mask) one.hidden = hidden_of(a.sparse, *a.mask, a.pre, a.next, rows, columns);
  one.bias = a.bias.orundef();
  one.bias_is_scaled = a.bias_type == 1;  // 1: add, then multiply by scale; 0: multiply, then add
  one.scale = a.scale;
  one.sinks = a.sinks.orundef();
  one.drop = multipliers(a.drop, a.keep, {one.query.size(0), one.query.size(1), rows, columns});
  one.repair = a.inner_precise == 2 || a.sparse >= 2;
  return one;
}

void forward(const Training& a, O maximum, O sum, O out) {
  auto r = attend(problem(a));
  put(out, from_bnsd(r.out, a.layout));
  if (maximum) put(maximum, r.maximum.expand({-1, -1, -1, 8}));
  if (sum) put(sum, r.sum.expand({-1, -1, -1, 8}));
}

}  // namespace

OP(aclnnFlashAttentionScore, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, IA, prefix,
   double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, heads, CP, layout, int64_t,
   inner_precise, int64_t, sparse, O, maximum, O, sum, O, softmax, O, out) {
  forward({query, key, value, bias, drop, mask, T{}, scale, keep, pre, next, heads, layout, inner_precise,
           sparse, 1},
          maximum, sum, out);
}
OP(aclnnFlashAttentionScoreV2, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, IA, prefix,
   IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, heads, CP,
   layout, int64_t, inner_precise, int64_t, sparse, int64_t, bias_type, O, maximum, O, sum, O, softmax, O,
   out) {
  forward({query, key, value, bias, drop, mask, T{}, scale, keep, pre, next, heads, layout, inner_precise,
           sparse, bias_type},
          maximum, sum, out);
}
OP(aclnnFlashAttentionScoreV3, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, T, sinks,
   IA, prefix, IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t,
   heads, CP, layout, int64_t, inner_precise, int64_t, sparse, int64_t, bias_type, O, maximum, O, sum, O,
   softmax, O, out) {
  forward({query, key, value, bias, drop, mask, sinks, scale, keep, pre, next, heads, layout, inner_precise,
           sparse, bias_type},
          maximum, sum, out);
}
OP(aclnnFlashAttentionScoreV4, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, T,
   query_rope, T, key_rope, T, q_scale, T, k_scale, T, v_scale, T, sinks, IA, prefix, IA, q_ends, IA, kv_ends,
   IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, heads, CP,
   layout, int64_t, inner_precise, int64_t, sparse, int64_t, out_dtype, int64_t, bias_type, CP,
   softmax_layout, int64_t, seed, int64_t, offset, O, maximum, O, sum, O, softmax, O, out) {
  forward({query, key, value, bias, drop, mask, sinks, scale, keep, pre, next, heads, layout, inner_precise,
           sparse, bias_type},
          maximum, sum, out);
}

OP(aclnnFlashAttentionScoreGrad, T, query, T, key, T, value, T, dy, T, bias, T, drop, T, padding, T, mask, T,
   maximum, T, sum, T, softmax, T, out, IA, prefix, double, scale, double, keep, int64_t, pre, int64_t, next,
   int64_t, heads, CP, layout, int64_t, inner_precise, int64_t, sparse, O, dquery, O, dkey, O, dvalue, O,
   dbias) {
  Training a{query, key, value, bias,  drop,   mask,          T{},    scale,
             keep,  pre, next,  heads, layout, inner_precise, sparse, 1};
  auto one = problem(a);
  auto r = attend(one);
  auto kv = one.key.size(1), group = one.query.size(1) / kv;
  auto key32 = fp32(one.key).repeat_interleave(group, 1),
       value32 = fp32(one.value).repeat_interleave(group, 1);
  auto dy32 = fp32(to_bnsd(*dy, a.layout, heads));
  auto dp = at::matmul(dy32, value32.transpose(-1, -2));
  auto kept = r.probabilities;
  if (one.drop.defined()) {
    dp = dp * one.drop;
    kept = kept * one.drop;
  }
  auto ds = r.probabilities * (dp - at::sum(dp * r.probabilities, {-1}, true)) * scale;
  auto grouped = [&](const Tensor& x) {
    return x.reshape({x.size(0), kv, group, x.size(2), x.size(3)}).sum(2);
  };
  put(dquery, from_bnsd(at::matmul(ds, key32), a.layout));
  put(dkey, from_bnsd(grouped(at::matmul(ds.transpose(-1, -2), fp32(one.query))), a.layout));
  put(dvalue, from_bnsd(grouped(at::matmul(kept.transpose(-1, -2), dy32)), a.layout));
}

/// Sequences one after another [T, N, D]; lengths are sums over the sequences up to each.
OP(aclnnFlashAttentionVarLenScore, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, IA,
   prefix, IA, q_ends, IA, kv_ends, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, heads,
   CP, layout, int64_t, inner_precise, int64_t, sparse, O, maximum, O, sum, O, softmax, O, out) {
  int64_t q_begin = 0, kv_begin = 0;
  for (size_t i = 0; i < (*q_ends).size(); i++) {
    auto q_end = (*q_ends)[i], kv_end = (*kv_ends)[i];
    if (q_end > q_begin) {
      auto part = [](const Tensor& x, int64_t begin, int64_t end) {
        return x.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
      };
      Attention one;
      one.query = part(*query, q_begin, q_end);
      one.key = part(*key, kv_begin, kv_end);
      one.value = part(*value, kv_begin, kv_end);
      if (mask) one.hidden = hidden_of(sparse, *mask, pre, next, q_end - q_begin, kv_end - kv_begin);
      one.scale = scale;
      one.repair = inner_precise == 2 || sparse >= 2;
      auto r = attend(one);
      out->slice(0, q_begin, q_end).copy_(r.out[0].transpose(0, 1));
      maximum->slice(0, q_begin, q_end).copy_(r.maximum[0].transpose(0, 1).expand({-1, -1, 8}));
      sum->slice(0, q_begin, q_end).copy_(r.sum[0].transpose(0, 1).expand({-1, -1, 8}));
    }
    q_begin = q_end;
    kv_begin = kv_end;
  }
}

OP(aclnnScaledMaskedSoftmax, T, x, T, mask, double, scale, bool, triangular, O, out) {
  put(out, at::softmax((fp32(*x) * scale).masked_fill(mask->to(at::kBool), -10000.0), -1));
}
