// What hardware rejects of inference attention: documents of ops-transformer, attention/<name>/docs; for a 950 that of
// aclnnFusedInferAttentionScoreV5 (9.1.0) and op_host/checkers of fused_infer_attention_score.
// Heads, dtypes and outputs here; keys, lengths and blocks in attention_keys.cpp, masks in attention_mask.cpp.
#include "attention.h"

using namespace sim;

namespace {

bool one_of(const std::string& x, std::initializer_list<const char*> all) {
  for (auto* name : all) {
    if (x == name) return true;
  }
  return false;
}

void check_given(const Inference& a) {
  require_all_given({{a.query, "query"}, {a.out, "attentionOut"}});
  if (!a.key || !a.value || !a.key.size() || !a.value.size())
    throw NullError("key or value is null or an empty list");
  for (auto* list : {&a.key, &a.value}) {
    for (auto* t : list->p->v) {
      if (!t) throw NullError("a tensor in key or value is null");
    }
  }
  for (auto& x : a.quantization)
    require(!x, "of quantized attention, scales of keys and values are simulated");
  require(!a.key_prefix, "shared prefixes are not simulated");
}

void check_dtypes(const Inference& a) {
  require_dtype(a.query, "query", {at::kHalf, at::kBFloat16});
  T key{{a.key.p->v[0]}}, value{{a.value.p->v[0]}};
  if (a.has_integers()) {
    require_dtype(key, "key", {at::kChar});
    require_dtype(value, "value", {at::kChar});
  } else {
    require_same_dtype(key, "key", a.query, "query");
    require_same_dtype(value, "value", a.query, "query");
  }
  require_same_dtype(a.out, "attentionOut", a.query, "query");
  require_same_dtype(a.bias, "pseShift", a.query, "query");
  require_same_dtype(a.q_rope, "queryRope", a.query, "query");
  require_same_dtype(a.k_rope, "keyRope", a.query, "query");
  require_dtype(a.mask, "attenMask", {at::kBool, at::kChar, at::kByte});
  require_dtype(a.sinks, "learnableSink", {at::kHalf, at::kBFloat16});
  require_dtype(a.table, "blockTable", {at::kInt});
}

void check_contiguous(const Inference& a) {
  for (auto& [tensor, name] : Tensors{{a.query, "query"},
                                      {a.out, "attentionOut"},
                                      {a.bias, "pseShift"},
                                      {a.mask, "attenMask"},
                                      {a.table, "blockTable"},
                                      {a.q_rope, "queryRope"},
                                      {a.k_rope, "keyRope"},
                                      {a.key_scale, "keyAntiquantScale"},
                                      {a.value_scale, "valueAntiquantScale"},
                                      {a.sinks, "learnableSink"}}) {
    require_contiguous(tensor, name);
  }
  for (auto* t : a.key.p->v) require_contiguous(T{{t}}, "key");
  for (auto* t : a.value.p->v) require_contiguous(T{{t}}, "value");
}

void check_heads(const Inference& a) {
  auto in = a.in_layout();
  int64_t axes = in == "BSH" || a.packed() ? 3 : 4;
  require_axes(a.query, "query", axes, axes);
  auto kv = a.kv_head_count();
  require(kv >= 1 && a.heads % kv == 0, "numHeads ", a.heads, " is no multiple of numKeyValueHeads ", kv);
  // Of latent attention (keys of 512 and their rotated part) 128 heads may share one:
  // test_fused_infer_attention_score_tiling.csv and tiling_check_feature.cpp of 9.1.0.
  const int64_t most = a.q_rope && a.head_size() == 512 ? 128 : 64;
  require(a.heads / kv <= most, "numHeads / numKeyValueHeads is ", a.heads / kv, ", at most ", most,
          " are supported");
  if (in == "BSH") {
    require(a.query->size(2) % a.heads == 0, "H ", a.query->size(2), " is no multiple of numHeads ", a.heads);
  } else {
    auto axis = in == "BNSD" ? 1 : in == "BSND" ? 2 : in == "TND" ? 1 : 0;
    require(a.query->size(axis) == a.heads, "query has ", a.query->size(axis), " heads, numHeads is ",
            a.heads);
  }
  auto d = a.head_size();
  // CheckFeatureHeadDim in fused_infer_attention_score_tiling_check_feature.cpp (9.0.0, 9.1.0): what was the incremental
  // tiling's (isLegacyIfa) is not asked for a multiple.
  bool any =
      a.one_row() && !a.table && tiling_of(a) == Tiling::fused && one_of(a.layout, {"BSH", "BSND", "BNSD"});
  require((any || d % 16 == 0) && d <= 512, "D is ", d, ", it must be a multiple of 16 and at most 512");
  require(a.batch() <= 65536, "B is ", a.batch(), ", at most 65536 are supported");
}

/// CheckFeatureHeadDim of fused_infer_attention_score_tiling_check_feature.cpp (8.5.0), CheckFeatureLayout and
/// CheckFeaturePse there (9.0.0, 9.1.0).
void check_values(const Inference& a) {
  auto d = a.head_size(), value = a.value_head_size();
  if (a.q_rope || value == d) return;
  if (is_950() && d != 192) {  // CheckAxis and CheckQKVDDifferent of the checkers
    require(d <= 128 && value <= 128, "D is ", d, " and that of values ", value,
            ": others than 128 beside 192 are at most 128");
    require(a.layout == "BNSD" || a.layout == "BSND" || a.layout == "BSH" || a.layout == "TND",
            "inputLayout \"", a.layout, "\" does not go with values of another D than keys");
    return require(a.sparse == 0 || a.sparse == 2 || a.sparse == 3, "sparseMode ", a.sparse,
                   " does not go with values of another D than keys");
  }
  require(d == 192 && value == 128, "D is ", d, " and that of values ", value,
          ": other than keys it must be 128 beside 192");
  require(!a.bias, "pseShift does not go with values of another D than keys");
  require(a.key.size() == 1, "a list of keys does not go with values of another D than keys");
}

void check_rope(const Inference& a) {
  require(bool(a.q_rope) == bool(a.k_rope), "queryRope and keyRope go together");
  if (!a.q_rope) return;
  auto d = a.head_size();
  require(d == 512 || d == 128, "queryRope needs D 512 or 128, it is ", d);
  auto rope = a.in_layout() == "BSH" ? a.q_rope->size(2) / a.heads : a.q_rope->size(-1);
  require(rope == 64, "queryRope has D ", rope, ", it must be 64");
  // CheckInputLayoutMla of fused_infer_attention_score_tiling.cpp (8.5.0, 9.0.0), of TND; others take plain keys
  // (test_fused_infer_attention_score_tiling.csv of 9.1.0).
  require(d != 512 || !a.packed() || bool(a.table),
          "queryRope with D 512 in packed tokens needs a paged cache");
}

/// Shapes of the outputs by the output layout.
void check_outputs(const Inference& a) {
  auto out = a.out_layout();
  auto d = a.value_head_size();
  std::vector<int64_t> shape;
  if (a.packed()) {
    auto tokens = a.query->size(a.in_layout() == "NTD" ? 1 : 0);
    shape =
        out == "NTD" ? std::vector<int64_t>{a.heads, tokens, d} : std::vector<int64_t>{tokens, a.heads, d};
  } else if (out == "BSH") {
    shape = {a.batch(), a.q_len(), a.heads * d};
  } else if (out == "BSND") {
    shape = {a.batch(), a.q_len(), a.heads, d};
  } else if (out == "NBSD") {
    shape = {a.heads, a.batch(), a.q_len(), d};
  } else {
    shape = {a.batch(), a.heads, a.q_len(), d};
  }
  require_shape(a.out, "attentionOut", shape);
  if (!a.want_lse) return;
  require_given(a.lse, "softmaxLse");
  require_dtype(a.lse, "softmaxLse", {at::kFloat});
  if (a.packed()) return require_shape(a.lse, "softmaxLse", {shape[out == "NTD" ? 1 : 0], a.heads, 1});
  require_shape(a.lse, "softmaxLse", {a.batch(), a.heads, a.q_len(), 1});
}

/// GetEmptyTensorFlag and FiaTilingCheck::Process in fused_infer_attention_score_tiling_{info_parser,check}.cpp, 9.0.0
/// and 9.1.0: without keys the query's heads are looked at, and the result is 0.
bool has_no_keys(const Inference& a) {
  if (!release_is("9.0.0") || tiling_of(a) != Tiling::fused) return false;
  for (auto* list : {&a.key, &a.value}) {
    for (size_t k = 0; k < list->size(); k++) {
      if (list->at(k).numel()) return false;
    }
  }
  return true;
}

void check(const Inference& a) {
  require(one_of(a.layout, {"BSH", "BSND", "BNSD", "TND", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND",
                            "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"}),
          "inputLayout \"", a.layout, "\" is not supported");
  check_given(a);
  if (!a.query->numel()) return;
  check_dtypes(a);
  check_contiguous(a);
  require(a.inner_precise >= 0 && a.inner_precise <= 3, "innerPrecise is ", a.inner_precise, ": 0 to 3");
  require(a.heads >= 1 && a.heads <= 256, "numHeads is ", a.heads, ", it must be 1 to 256");
  if (a.packed()) check_packed(a);
  check_heads(a);
  if (has_no_keys(a)) return check_outputs(a);
  // IFATiling::InputAttrsPreProcess in incre_flash_attention_tiling.cpp; fused takes 0 to 3 of one row, too.
  require(tiling_of(a) != Tiling::incremental || a.inner_precise <= 1, "innerPrecise is ", a.inner_precise,
          "; one query row with D ", a.head_size(), " or with integers takes 0 and 1");
  check_keys(a);
  check_values(a);
  check_mask(a);
  check_bias(a);
  check_sinks(a);
  check_integers(a);
  check_rope(a);
  check_outputs(a);
}

}  // namespace

LIMITS(aclnnFusedInferAttentionScoreV2, FIA_ARGUMENTS_V2) {
  FIA_COLLECT_V2();
  check(a);
}
LIMITS(aclnnFusedInferAttentionScoreV3, FIA_ARGUMENTS_V3) {
  FIA_COLLECT_V3();
  check(a);
}
LIMITS(aclnnFusedInferAttentionScoreV4, FIA_ARGUMENTS_V4) {
  FIA_COLLECT_V4();
  check(a);
}
LIMITS(aclnnFusedInferAttentionScoreV5, FIA_ARGUMENTS_V5) {
  FIA_COLLECT_V4();
  require(!q_start && !kv_start && pse_type == 0, "qStartIdx, kvStartIdx and pseType are for training");
  check(a);
}
