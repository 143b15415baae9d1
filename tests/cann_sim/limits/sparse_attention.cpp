// What block-sparse attention rejects. Source: ops-transformer, attention/rain_fusion_attention/docs.
#include "quantized.h"

using namespace sim;

LIMITS(aclnnRainFusionAttention, T, query, T, key, T, value, T, select, T, select_count, IA, block_shape, T,
       mask, IA, lengths, IA, kv_lengths, T, block_table, CP, q_layout, CP, kv_layout, int64_t, kv_heads,
       int64_t, mask_type, double, scale, int64_t, inner_precise, int64_t, block_size, O, out, O, lse) {
  for (auto& [t, name] : Tensors{{query, "query"}, {key, "key"}, {value, "value"}}) {
    require_given(t, name);
    require_dtype(t, name, kSixteenBits);
    require_same_dtype(t, name, query, "query");
  }
  require_all_given({{select, "selectIdx"}, {select_count, "selectNumIdx"}, {out, "attentionOut"}});
  require_dtype(select, "selectIdx", {at::kLong});
  require_dtype(select_count, "selectNumIdx", {at::kLong});
  require_axes(select, "selectIdx", 3, 3);
  require_shape(select_count, "selectNumIdx", {select->size(0), select->size(1)});
  for (auto& [layout, t, name] : {std::tuple<CP, T, const char*>(q_layout, query, "qInputLayout"),
                                  std::tuple<CP, T, const char*>(kv_layout, key, "kvInputLayout")}) {
    const std::string l = layout ? layout : "";
    require(l == "TND" || l == "BNSD", name, " '", l, "': TND or BNSD");
    require(t->dim() == (l == "TND" ? 3 : 4), name, " ", l, " needs ", l == "TND" ? 3 : 4,
            " axes, there are ", t->dim());
  }
  require(block_shape && (*block_shape).size() >= 2 && (*block_shape)[0] > 0 && (*block_shape)[1] > 0,
          "blockShape needs two positive values");
  require(lengths && kv_lengths, "actualSeqLengths and actualSeqLengthsKv are needed with TND and BNSD");
  require(!mask && mask_type == 0, "attenMask is not supported: null and maskType 0");
  require(!block_table, "blockTable is not supported");
  require(inner_precise == 0 || (inner_precise == 1 && query->scalar_type() == at::kHalf), "innerPrecise ",
          inner_precise, " with ", query->scalar_type(), ": 0, with Half also 1");
  const int64_t heads = query->size(1);
  require(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads, ", kv_heads,
          " key heads: no multiple");
  const int64_t g = heads / kv_heads;
  require(g < 128 && 128 % g == 0, "query heads per key head: ", g, ", it must divide 128 and be below it");
  require(select->size(1) == heads, "selectIdx is for ", select->size(1), " heads, query has ", heads);
  int64_t blocks = 0;
  for (int64_t n : *lengths) blocks += (n + (*block_shape)[0] - 1) / (*block_shape)[0];
  require(select->size(0) == blocks, "selectIdx is for ", select->size(0), " query blocks, there are ",
          blocks);
  require_same_dtype(out, "attentionOut", query, "query");
  require_shape(out, "attentionOut", query->sizes());
  require_dtype(lse, "softmaxLse", {kFloat32});
}
