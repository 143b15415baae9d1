// What hardware rejects of FlashAttentionScore: documents of ops-transformer, attention/flash_attention_score/docs.
#include "checks.h"

using namespace sim;

namespace {

struct Shape {
  int64_t batch, heads, length, size;
};

Shape shape_of(const TensorHandle& x, const std::string& layout, int64_t heads) {
  auto s = x->sizes();
  if (layout == "BNSD") return {s[0], s[1], s[2], s[3]};
  if (layout == "BSND") return {s[0], s[2], s[1], s[3]};
  auto batch = layout == "BSH" ? s[0] : s[1], length = layout == "BSH" ? s[1] : s[0];
  return {batch, heads, length, heads ? s[2] / heads : 0};
}

void check(T query, T key, T value, T bias, T mask, T sinks, double keep, int64_t pre, int64_t next,
           int64_t heads, CP layout, int64_t inner_precise, int64_t sparse, int64_t bias_type, O maximum,
           O sum, O out) {
  require_all_given({{query, "query"},
                     {key, "key"},
                     {value, "value"},
                     {maximum, "softmaxMaxOut"},
                     {sum, "softmaxSumOut"},
                     {out, "attentionOutOut"}});
  if (!layout) throw NullError("inputLayout is null");
  std::string name = layout;
  bool merged = name == "BSH" || name == "SBH";
  require(merged || name == "BNSD" || name == "BSND", "inputLayout \"", name, "\": BSH, SBH, BSND or BNSD");
  require_float(query, "query");
  for (auto& [tensor, what] : Tensors{{key, "key"}, {value, "value"}, {out, "attentionOutOut"}}) {
    require_same_dtype(tensor, what, query, "query");
    require_axes(tensor, what, merged ? 3 : 4, merged ? 3 : 4);
  }
  require_axes(query, "query", merged ? 3 : 4, merged ? 3 : 4);
  require(heads >= 1 && heads <= 256, "headNum is ", heads, ", it must be 1 to 256");
  require(!merged || query->size(2) % heads == 0, "H ", query->size(2), " is no multiple of headNum ", heads);
  auto q = shape_of(query, name, heads);
  auto k = shape_of(key, name, merged ? std::max<int64_t>(key->size(2) / q.size, 1) : 0);
  auto v = shape_of(value, name, k.heads);
  require(q.heads == heads, "query has ", q.heads, " heads, headNum is ", heads);
  require(k.heads >= 1 && heads % k.heads == 0, "headNum ", heads, " is no multiple of the ", k.heads,
          " heads of key");
  require(q.batch == k.batch && k.batch == v.batch && k.heads == v.heads && k.length == v.length,
          "key has shape ", key->sizes(), ", value ", value->sizes(), ", query ", query->sizes());
  require(q.size == k.size && k.size >= v.size, "D of query, key and value is ", q.size, ", ", k.size, ", ",
          v.size, ": the first two must be equal, the third not greater");
  require(q.size >= 1 && q.size <= 768, "D is ", q.size, ", it must be 1 to 768");
  require(q.batch <= 2 << 20 && q.length <= 1 << 20 && k.length <= 1 << 20, "B is at most 2M, S at most 1M");
  require(keep > 0 && keep <= 1, "keepProb is ", keep, ", it must be more than 0 and at most 1");
  require(inner_precise >= 0 && inner_precise <= 2, "innerPrecise is ", inner_precise, ": 0 to 2");
  require(sparse >= 0 && sparse <= 6, "sparseMode is ", sparse, ": 0 to 6");
  require(sparse <= 4, "sparseMode ", sparse, " (prefix) is not simulated");
  require(sparse != 4 || !mask || pre + next >= 0, "the band of preTokens ", pre, " and nextTokens ", next,
          " is empty");
  require_dtype(mask, "attenMask", {at::kBool, at::kByte});
  if (mask) {
    auto s = mask->sizes();
    bool fixed = mask->numel() == 2048 * 2048 && s.size() >= 2 && s.back() == 2048;
    auto plain = [&] {
      if (s.size() == 2) return s[0] == q.length && s[1] == k.length;
      return s.size() == 4 && (s[0] == 1 || s[0] == q.batch) &&
             (s[1] == 1 || (s[1] == heads && s[0] == q.batch)) && s[2] == q.length && s[3] == k.length;
    };
    require(sparse >= 2 ? fixed : plain(), "attenMask has shape ", s,
            sparse >= 2 ? "; sparseMode 2, 3 and 4 take (2048, 2048)"
                        : "; supported: (Sq, Skv), (1, 1, Sq, Skv), (B, 1, Sq, Skv), (B, N, Sq, Skv)");
  }
  require(bias_type >= 0 && bias_type <= 3, "pseType is ", bias_type, ": 0 to 3");
  require(bias_type <= 1, "pseType ", bias_type, " (made inside) is not simulated");
  require_same_dtype(bias, "realShift", query, "query");
  if (bias) {
    auto s = bias->sizes();
    require(s.size() == 4 && (s[0] == 1 || s[0] == q.batch) && s[1] == heads &&
                (s[2] == q.length || (s[2] == 1 && s[0] == q.batch)) && s[3] == k.length,
            "realShift has shape ", s, "; simulated: (B or 1, N, Sq, Skv) and (B, N, 1, Skv)");
  }
  require_dtype(sinks, "sink", {at::kFloat});
  require_shape(sinks, "sink", {heads});
  for (auto& [tensor, what] : Tensors{{maximum, "softmaxMaxOut"}, {sum, "softmaxSumOut"}}) {
    require_dtype(tensor, what, {at::kFloat});
    require_shape(tensor, what, {q.batch, heads, q.length, 8});
  }
}

}  // namespace

LIMITS(aclnnFlashAttentionScore, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, IA,
       prefix, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t, heads, CP, layout, int64_t,
       inner_precise, int64_t, sparse, O, maximum, O, sum, O, softmax, O, out) {
  check(query, key, value, bias, mask, T{}, keep, pre, next, heads, layout, inner_precise, sparse, 1, maximum,
        sum, out);
}
LIMITS(aclnnFlashAttentionScoreV2, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, IA,
       prefix, IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t,
       heads, CP, layout, int64_t, inner_precise, int64_t, sparse, int64_t, bias_type, O, maximum, O, sum, O,
       softmax, O, out) {
  check(query, key, value, bias, mask, T{}, keep, pre, next, heads, layout, inner_precise, sparse, bias_type,
        maximum, sum, out);
}
LIMITS(aclnnFlashAttentionScoreV3, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, T,
       sinks, IA, prefix, IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next,
       int64_t, heads, CP, layout, int64_t, inner_precise, int64_t, sparse, int64_t, bias_type, O, maximum, O,
       sum, O, softmax, O, out) {
  check(query, key, value, bias, mask, sinks, keep, pre, next, heads, layout, inner_precise, sparse,
        bias_type, maximum, sum, out);
}
// Of V4 what V1 takes; outDtype (0 for Half, 1 for BFloat16) is of queries in 8 bits.
LIMITS(aclnnFlashAttentionScoreV4, T, query, T, key, T, value, T, bias, T, drop, T, padding, T, mask, T,
       query_rope, T, key_rope, T, q_scale, T, k_scale, T, v_scale, T, sinks, IA, prefix, IA, q_ends, IA,
       kv_ends, IA, q_start, IA, kv_start, double, scale, double, keep, int64_t, pre, int64_t, next, int64_t,
       heads, CP, layout, int64_t, inner_precise, int64_t, sparse, int64_t, out_dtype, int64_t, bias_type, CP,
       softmax_layout, int64_t, seed, int64_t, offset, O, maximum, O, sum, O, softmax, O, out) {
  require(!query_rope && !key_rope && !q_scale && !k_scale && !v_scale,
          "of V4, rotated parts and integers are not simulated");
  require((*q_ends).empty() && (*kv_ends).empty(), "of V4, packed tokens are not simulated");
  check(query, key, value, bias, mask, sinks, keep, pre, next, heads, layout, inner_precise, sparse,
        bias_type, maximum, sum, out);
}
