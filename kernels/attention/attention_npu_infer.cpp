// V3 and V4 (sinks) on 910B and 910C; a 950 has V5 alone (aclnnFusedInferAttentionScoreV5 of ops-transformer, 9.0.0), a
// 310P none.
#include "attention/attention_npu_infer.h"

namespace liteboost::npu {
namespace {

// clang-format off
const Operator<
    Tensor, Tensors, Tensors,                // query, key, value
    Tensor, Tensor, Integers, Integers,      // pseShift, attenMask, actualSeqLengths, actualSeqLengthsKv
    Tensor, Tensor, Tensor, Tensor, Tensor,  // deqScale1, quantScale1, deqScale2, quantScale2, quantOffset2
    Tensor, Tensor,                          // antiquantScale, antiquantOffset
    Tensor, Tensor, Tensor,                  // blockTable, queryPaddingSize, kvPaddingSize
    Tensor, Tensor, Tensor, Tensor,          // keyAntiquantScale, -Offset, valueAntiquantScale, -Offset
    Tensor, Tensor, Integers,                // keySharedPrefix, valueSharedPrefix, actualSharedPrefixLen
    Tensor, Tensor, Tensor,                  // queryRope, keyRope, keyRopeAntiquantScale
    int64_t, double, int64_t, int64_t,       // numHeads, scaleValue, preTokens, nextTokens
    Text, int64_t, int64_t, int64_t,         // inputLayout, numKeyValueHeads, sparseMode, innerPrecise
    int64_t, int64_t, bool,                  // blockSize, antiquantMode, softmaxLseFlag
    int64_t, int64_t,                        // keyAntiquantMode, valueAntiquantMode
    Tensor, Tensor>                          // attentionOut, softmaxLse
    kV3{"aclnnFusedInferAttentionScoreV3"};
const Operator<
    Tensor, Tensors, Tensors,
    Tensor, Tensor, Integers, Integers,
    Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
    Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Integers,
    Tensor, Tensor, Tensor,
    Tensor, Tensor,                          // dequantScaleQuery, learnableSink
    int64_t, double, int64_t, int64_t,
    Text, int64_t, int64_t, int64_t,
    int64_t, int64_t, bool,
    int64_t, int64_t, int64_t,               // ..., queryQuantMode
    Tensor, Tensor>
    kV4{"aclnnFusedInferAttentionScoreV4"};
const Operator<
    Tensor, Tensors, Tensors,
    Tensor, Tensor, Integers, Integers,
    Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
    Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Integers,
    Tensor, Tensor, Tensor,
    Tensor, Tensor, Integers, Integers,      // ..., qStartIdx, kvStartIdx
    int64_t, double, int64_t, int64_t,
    Text, int64_t, int64_t, int64_t,
    int64_t, int64_t, bool,
    int64_t, int64_t, int64_t, int64_t,      // ..., pseType
    Tensor, Tensor>
    kV5{"aclnnFusedInferAttentionScoreV5"};
// clang-format on

Integers lengths_of(const std::vector<int64_t>& lengths) {
  return lengths.empty() ? Integers() : Integers(lengths);
}

}  // namespace

Refusal inference_refusal(bool has_sinks) {
  const AnyOperator* needed = &kV3;
  if (soc() == Soc::a950) {
    needed = &kV5;
  } else if (has_sinks) {
    needed = &kV4;
  }
  return needed->available() ? kServed : "not in this CANN";
}

void infer(const Inference& c, const at::Tensor& out, const at::Tensor& lse, bool want_lse) {
  const at::Tensor none;
  const Integers queries = lengths_of(c.q_lengths), keys = lengths_of(c.kv_lengths);
  if (soc() == Soc::a950) {
    kV5(c.query, c.keys, c.values, c.shift, c.mask, queries, keys, none, none, none, none, none, none, none,
        c.block_table, none, c.positions_behind, c.key_scales, none, c.value_scales, none, none, none, {},
        c.query_rope, c.key_rope, none, none, c.sinks, {}, {}, c.heads, c.scaling, c.before, c.after,
        c.layout, c.kv_heads, c.mode, c.precise, c.page_rows, 0, want_lse, c.scaled_by, c.scaled_by, 0, 0,
        out, lse);
  } else if (c.sinks.defined()) {
    kV4(c.query, c.keys, c.values, c.shift, c.mask, queries, keys, none, none, none, none, none, none, none,
        c.block_table, none, c.positions_behind, c.key_scales, none, c.value_scales, none, none, none, {},
        c.query_rope, c.key_rope, none, none, c.sinks, c.heads, c.scaling, c.before, c.after, c.layout,
        c.kv_heads, c.mode, c.precise, c.page_rows, 0, want_lse, c.scaled_by, c.scaled_by, 0, out, lse);
  } else {
    kV3(c.query, c.keys, c.values, c.shift, c.mask, queries, keys, none, none, none, none, none, none, none,
        c.block_table, none, c.positions_behind, c.key_scales, none, c.value_scales, none, none, none, {},
        c.query_rope, c.key_rope, none, c.heads, c.scaling, c.before, c.after, c.layout, c.kv_heads, c.mode,
        c.precise, c.page_rows, 0, want_lse, c.scaled_by, c.scaled_by, out, lse);
  }
}

}  // namespace liteboost::npu
