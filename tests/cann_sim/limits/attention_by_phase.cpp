// What a 310P rejects of PromptFlashAttention and IncreFlashAttention, which it has in place of
// FusedInferAttentionScore, and what a 910B and 910C reject of PromptFlashAttention.
//
// ops-transformer, attention/, 8.5.0 to 9.1.0: GetBasicShape310P, CheckMaskType, CheckAttenMaskShape,
// SetTilingHeadNumRatio and the batch limit of prompt_flash_attention/op_host/prompt_flash_attention_tiling.cpp;
// CheckInputFormatAndLimits and ProcessAttenMask of incre_flash_attention/op_host/incre_flash_attention_tiling*.cpp;
// the configurations for ascend310p in *_def.cpp. Fewer key heads than query heads are in these tilings and kernels,
// though the documents allow numKeyValueHeads 0 only.
#include "attention.h"

using namespace sim;

namespace {

constexpr int64_t kLongest = 65536, kMostHeads = 256, kMostRatio = 64;

void check_tensors(const Inference& a) {
  require(is_310p(), "is not simulated but for a 310P");
  require_all_given({{a.query, "query"}, {a.out, "attentionOut"}});
  if (!a.key || !a.value || a.key.size() != 1 || a.value.size() != 1)
    throw NullError("key or value is null, or a list of more than one");
  T key{{a.key.p->v[0]}}, value{{a.value.p->v[0]}};
  for (auto& [tensor, name] :
       Tensors{{a.query, "query"}, {key, "key"}, {value, "value"}, {a.out, "attentionOut"}}) {
    require_given(tensor, name);
    require_dtype(tensor, name, {at::kHalf});
    require_contiguous(tensor, name);
    require_axes(tensor, name, 4, 4);
  }
  require_dtype(a.mask, "attenMask", {at::kBool});
  require_contiguous(a.mask, "attenMask");
  for (auto& x : a.quantization) require(!x, "quantized attention is not simulated here");
  require(!a.table && !a.kv_padding, "paged caches and left padding are not simulated here");
}

void check_sizes(const Inference& a) {
  const bool is_bnsd = a.in_layout() == "BNSD";
  const size_t head_axis = is_bnsd ? 1 : 2;
  require(a.heads >= 1 && a.heads <= kMostHeads, "numHeads is ", a.heads, ", it must be 1 to ", kMostHeads);
  auto kv = a.kv_head_count();
  require(kv >= 1 && a.heads % kv == 0, "numHeads ", a.heads, " is no multiple of numKeyValueHeads ", kv);
  auto query = a.query->sizes(), key = a.key.at(0).sizes(), value = a.value.at(0).sizes();
  require(query[head_axis] == a.heads && key[head_axis] == kv, "query has shape ", query, " and key ", key,
          " with ", a.heads, " and ", kv, " heads");
  require(key == value, "key has shape ", key, ", value ", value);
  require(key[0] == query[0] && key[3] == query[3], "query has shape ", query, ", key ", key);
  auto d = a.head_size();
  require(d % 16 == 0 && d <= 512, "D is ", d, ", it must be a multiple of 16 and at most 512");
  require(a.q_len() <= kLongest && a.kv_len() <= kLongest, "310P takes no more than ", kLongest,
          " positions, there are ", a.q_len(), " and ", a.kv_len());
  auto out = a.query->sizes().vec();
  if (a.out_layout() != a.in_layout()) std::swap(out[1], out[2]);
  require_shape(a.out, "attentionOut", out);
}

void check_kv_lengths(const Inference& a) {
  if (!a.kv_lengths || (*a.kv_lengths).empty()) return;
  auto all = *a.kv_lengths;
  require(all.size() == 1 || static_cast<int64_t>(all.size()) >= a.batch(), "there are ", all.size(),
          " lengths of keys: 1 or at least B = ", a.batch());
  for (auto n : all)
    require(n >= 0 && n <= a.kv_len(), "a length of keys is ", n, ", it must be 0 to ", a.kv_len());
}

void check_prompt_mask(const Inference& a) {
  auto queries = a.q_len(), keys = a.kv_len();
  require(a.pre >= queries, "preTokens is ", a.pre, ", 310P needs at least the ", queries, " queries");
  require(a.next == 0 || a.next >= keys, "nextTokens is ", a.next,
          ", 310P takes 0 and no less than the keys, ", keys);
  if (!a.mask) return;
  require(queries == keys && queries % 16 == 0,
          "310P takes attenMask for as many queries as keys, a multiple of 16; there are ", queries, " and ",
          keys);
  require_axes(a.mask, "attenMask", 2, 4);
  auto shape = a.mask->sizes();
  bool batch = shape.size() == 2 || shape[0] == 1 || shape[0] == a.batch();
  require(batch && (shape.size() != 4 || shape[1] == 1) && shape[shape.size() - 2] >= queries &&
              shape.back() >= keys && shape.back() % 32 == 0,
          "attenMask has shape ", shape, "; simulated: (B or 1, 1, at least ", queries, ", at least ", keys,
          " and a multiple of 32)");
}

void check_incremental_mask(const Inference& a) {
  if (!a.mask) return;
  require_axes(a.mask, "attenMask", 2, 4);
  bool is_short = a.kv_lengths && !(*a.kv_lengths).empty();
  auto columns = is_short ? longest(a, a.kv_lengths, false) : a.kv_len();
  auto shape = a.mask->sizes();
  require(shape[0] == a.batch() && shape.back() >= columns && a.mask->numel() == shape[0] * shape.back(),
          "attenMask has shape ", shape,
          "; one query row takes (B, KV_S), (B, 1, KV_S) or (B, 1, 1, KV_S) with B ", a.batch(),
          " and KV_S at least ", columns);
}

/// A 910B and 910C. ops-transformer, attention/prompt_flash_attention, 8.5.0 to 9.1.0: CheckTensorDataType,
/// AnalysisAxis, AnalysisInputShapeInfo (which pads D to a multiple of 16) and CheckResultOutShapePfa of op_api; B, N and
/// N * D of docs/aclnnPromptFlashAttentionV3.md. The tiling is that of FusedInferAttentionScore for prompts.
void check_on_910b(const Inference& a) {
  bool is_merged = a.layout == "BSH";
  require(is_merged || a.layout == "BSND" || a.layout == "BNSD" || a.layout == "BNSD_BSND", "inputLayout \"",
          a.layout, "\" is not simulated: BSH, BSND, BNSD and BNSD_BSND are");
  require_all_given({{a.query, "query"}, {a.out, "attentionOut"}});
  if (!a.key || !a.value) throw NullError("key or value is null");
  if (!a.out->numel()) return;
  T key{{a.key.p->v[0]}}, value{{a.value.p->v[0]}};
  for (auto& x : a.quantization) require(!x, "quantized attention is not simulated here");
  require_dtype(a.query, "query", {at::kHalf, at::kBFloat16});
  for (auto& [x, name] :
       Tensors{{key, "key"}, {value, "value"}, {a.bias, "pseShift"}, {a.out, "attentionOut"}}) {
    require_same_dtype(x, name, a.query, "query");
  }
  require_dtype(a.mask, "attenMask", {at::kBool, at::kChar, at::kByte});
  for (auto& [x, name] : Tensors{{a.query, "query"}, {key, "key"}, {value, "value"}}) {
    require_axes(x, name, is_merged ? 3 : 4, is_merged ? 3 : 4);
  }
  require(key->numel() > 0, "no keys are not simulated here");
  require(a.inner_precise >= 0 && a.inner_precise <= 3, "innerPrecise is ", a.inner_precise, ": 0 to 3");
  require(a.heads >= 1 && a.heads <= kMostHeads, "numHeads is ", a.heads, ", it must be 1 to ", kMostHeads);
  require(!is_merged || a.query->size(2) % a.heads == 0, "H is no multiple of numHeads ", a.heads);
  auto kv = a.kv_head_count();
  require(kv >= 1 && a.heads % kv == 0, "numHeads ", a.heads, " is no multiple of numKeyValueHeads ", kv);
  require(a.heads / kv <= kMostRatio, "numHeads / numKeyValueHeads is at most ", kMostRatio);
  auto d = a.head_size();
  require(d >= 1 && d <= 512, "D is ", d, ", it must be 1 to 512");
  require(a.value_head_size() == d, "values of another D than keys are not simulated here");
  require(a.layout[1] != 'S' || a.heads * d < 65535, "N * D is ", a.heads * d,
          ", BSH and BSND take less than 65535");
  int64_t most = d % 16 ? 128 : 65536;
  require(a.batch() <= most, "B is ", a.batch(), ", with D ", d, " at most ", most, " are taken");
  check_keys(a);
  check_mask(a);
  check_bias(a);
  auto out = a.query->sizes().vec();
  if (a.out_layout() != a.in_layout()) std::swap(out[1], out[2]);
  require_shape(a.out, "attentionOut", out);
}

}  // namespace

LIMITS(aclnnPromptFlashAttentionV3, PFA_ARGUMENTS) {
  PFA_COLLECT();
  if (!is_310p()) return check_on_910b(a);
  require(a.layout == "BNSD" || a.layout == "BSND" || a.layout == "BNSD_BSND", "inputLayout \"", a.layout,
          "\": BNSD, BSND and BNSD_BSND are simulated");
  check_tensors(a);
  check_sizes(a);
  require(!a.bias, "310P takes no pseShift");
  require(a.batch() <= 128, "B is ", a.batch(), ", 310P takes at most 128");
  require(a.heads / a.kv_head_count() <= kMostRatio, "numHeads / numKeyValueHeads is at most ", kMostRatio);
  // Of rows of 16 in these layouts the tiling takes what it is given for FRACTAL_NZ.
  require(a.head_size() != 16 || a.layout == "BNSD_BSND", "D 16 needs inputLayout BNSD_BSND");
  require(a.inner_precise == 0 || a.inner_precise == 1, "innerPrecise is ", a.inner_precise,
          ": 0 and 1 are simulated");
  require(a.sparse == 0, "sparseMode is ", a.sparse, ", 310P takes 0");
  require(!a.q_lengths, "actualSeqLengths is not simulated here");
  check_kv_lengths(a);
  check_prompt_mask(a);
}

LIMITS(aclnnIncreFlashAttentionV4, IFA_ARGUMENTS) {
  IFA_COLLECT();
  require(a.layout == "BNSD" || a.layout == "BSND", "inputLayout \"", a.layout,
          "\": BNSD and BSND are simulated");
  check_tensors(a);
  check_sizes(a);
  require(a.q_len() == 1, "query has ", a.q_len(), " rows, it must be one");
  require(!a.bias, "pseShift is not simulated here");
  require(a.batch() <= 256, "B is ", a.batch(), ", 310P takes at most 256");
  require(a.inner_precise == 0 || a.inner_precise == 1, "innerPrecise is ", a.inner_precise,
          ", it must be 0 or 1");
  auto ratio = a.heads / a.kv_head_count();
  require(ratio == 1 || (ratio <= 32 && a.head_size() <= 128), "numHeads / numKeyValueHeads is ", ratio,
          " and D ", a.head_size(), ": 310P takes at most 32 and 128 where key heads are fewer");
  require(ratio == 1 || a.layout == "BNSD", "310P takes fewer key heads in BNSD only");
  check_kv_lengths(a);
  check_incremental_mask(a);
}
