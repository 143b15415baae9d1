// The arithmetic of the attention operators, and the arguments of the inference family.
#pragma once
#include "fused.h"

namespace sim {

/// Query [B, N, Sq, D], key [B, Nkv, Skv, D], value [B, Nkv, Skv, Dv]; N is a multiple of Nkv.
struct Attention {
  at::Tensor query, key, value;
  at::Tensor hidden;  // bool, broadcast to [B, N, Sq, Skv]: not attended; undefined: all attended
  at::Tensor bias;    // broadcast to [B, N, Sq, Skv]; undefined: none
  bool bias_is_scaled = false;
  double scale = 1.0;
  at::Tensor sinks;          // [N] logits that take a part of the softmax and give nothing; undefined: none
  at::Tensor drop;           // what multiplies the probabilities; undefined: none
  bool repair = false;       // rows that attend to nothing give zeros
  double hidden_adds = 0.0;  // what a hidden score gets on top; 0: it is replaced
};

struct Attended {
  at::Tensor out;            // [B, N, Sq, Dv] float32
  at::Tensor probabilities;  // [B, N, Sq, Skv] float32
  at::Tensor maximum, sum;   // [B, N, Sq, 1] of the softmax
};

/// float32 scores and softmax; the exponentials are rounded to the dtype of the query before they meet the values (the
/// cube unit multiplies 16-bit operands, the sum stays float32), and the result is not rounded.
Attended attend(const Attention& a);

/// What sparseMode, preTokens and nextTokens hide of Sq x Skv; undefined: nothing. `mask` (1 = hidden) is read in modes
/// 0 and 1; modes 2, 3 and 4 follow from the shape, and their fixed 2048 x 2048 mask is checked for being one.
at::Tensor hidden_of(int64_t sparse, const at::Tensor& mask, int64_t pre, int64_t next, int64_t q_len,
                     int64_t kv_len);

/// To [B, N, S, D] from BNSD, BSND, BSH, SBH, and back (also to NBSD).
at::Tensor to_bnsd(const at::Tensor& x, const std::string& layout, int64_t heads);
at::Tensor from_bnsd(const at::Tensor& x, const std::string& layout);

/// Arguments of FusedInferAttentionScore; what a version lacks is null. innerPrecise 1 (fast) is computed as 0 (precise): the documents do not say where it rounds.
struct Inference {
  T query;
  TL key, value;
  T bias, mask;
  IA q_lengths, kv_lengths;
  T table, q_padding, kv_padding, q_rope, k_rope, sinks;
  std::vector<T> quantization;  // scales and offsets that must be null
  T key_scale, value_scale;     // of keys and values that are integers
  int64_t key_mode = 0, value_mode = 0;
  T key_prefix;
  int64_t heads = 0;
  double scale = 1.0;
  int64_t pre = INT32_MAX, next = INT32_MAX;
  std::string layout;
  int64_t kv_heads = 0, sparse = 0, inner_precise = 0, block_size = 0;
  bool want_lse = false;
  double hidden_adds = 0.0;    // as of Attention
  bool is_of_prompts = false;  // PromptFlashAttention, which has one tiling
  O out, lse;

  std::string in_layout() const { return layout.substr(0, layout.find('_')); }
  std::string out_layout() const {
    auto at = layout.find('_');
    return at == std::string::npos ? layout : layout.substr(at + 1);
  }
  bool has_integers() const { return key_scale || value_scale; }
  bool packed() const { return in_layout() == "TND" || in_layout() == "NTD"; }
  int64_t kv_head_count() const { return kv_heads ? kv_heads : heads; }
  int64_t head_size() const { return in_layout() == "BSH" ? query->size(2) / heads : query->size(-1); }
  /// Of a cache [blocks, size, N * D] and of BSH the head is in the last axis with the others.
  int64_t value_head_size() const {
    auto& v = value.at(0);
    if (table && v.dim() == 5) return v.size(2) * 16;
    bool is_merged = table ? v.dim() == 3 : in_layout() == "BSH";
    return is_merged ? v.size(-1) / kv_head_count() : v.size(-1);
  }
  int64_t batch() const { return packed() ? static_cast<int64_t>((*q_lengths).size()) : query->size(0); }
  /// Length of the query axis; of packed layouts the tokens of all sequences.
  int64_t q_len() const {
    auto l = in_layout();
    return query->size(l == "TND" ? 0 : l == "BNSD" ? 2 : 1);
  }
  int64_t kv_len() const { return key.at(0).size(in_layout() == "BNSD" ? 2 : 1); }
  /// "sparseMode, preTokens and nextTokens are without effect" for one query row outside the packed layouts.
  bool one_row() const {
    return !packed() && q_len() == 1 && !q_rope && key.at(0).sizes() == value.at(0).sizes();
  }
};

/// The result, written to `out` and `lse`.
void infer(const Inference& a);

}  // namespace sim

// The argument lists, the same for OP and LIMITS. Names: ascend.md section 3.4 and the documents of ops-transformer.
#define FIA_TENSORS_V2                                                                                       \
  T, query, TL, key, TL, value, T, bias, T, mask, IA, q_lengths, IA, kv_lengths, T, dequant1, T, quant1, T,  \
      dequant2, T, quant2, T, quant_offset2, T, antiquant_scale, T, antiquant_offset, T, table, T,           \
      q_padding, T, kv_padding, T, key_scale, T, key_offset, T, value_scale, T, value_offset, T, key_prefix, \
      T, value_prefix, IA, prefix_length
#define FIA_TENSORS_V3 FIA_TENSORS_V2, T, q_rope, T, k_rope, T, k_rope_scale
#define FIA_TENSORS_V4 FIA_TENSORS_V3, T, q_scale, T, sinks
#define FIA_TENSORS_V5 FIA_TENSORS_V4, IA, q_start, IA, kv_start
#define FIA_ATTRIBUTES                                                                                \
  int64_t, heads, double, scale, int64_t, pre, int64_t, next, CP, layout, int64_t, kv_heads, int64_t, \
      sparse, int64_t, inner_precise, int64_t, block_size, int64_t, antiquant_mode, bool, want_lse
#define FIA_ARGUMENTS_V2 \
  FIA_TENSORS_V2, FIA_ATTRIBUTES, int64_t, key_mode, int64_t, value_mode, O, out, O, lse
#define FIA_ARGUMENTS_V3 \
  FIA_TENSORS_V3, FIA_ATTRIBUTES, int64_t, key_mode, int64_t, value_mode, O, out, O, lse
#define FIA_ARGUMENTS_V4 \
  FIA_TENSORS_V4, FIA_ATTRIBUTES, int64_t, key_mode, int64_t, value_mode, int64_t, query_mode, O, out, O, lse
#define FIA_ARGUMENTS_V5                                                                                \
  FIA_TENSORS_V5, FIA_ATTRIBUTES, int64_t, key_mode, int64_t, value_mode, int64_t, query_mode, int64_t, \
      pse_type, O, out, O, lse

// Fills an Inference `a` from the arguments in scope.
#define FIA_COLLECT_V2()                                                                                  \
  sim::Inference a;                                                                                       \
  a.query = query, a.key = key, a.value = value, a.bias = bias, a.mask = mask;                            \
  a.q_lengths = q_lengths, a.kv_lengths = kv_lengths;                                                     \
  a.table = table, a.q_padding = q_padding, a.kv_padding = kv_padding;                                    \
  a.quantization = {dequant1,        quant1,           dequant2,   quant2,      quant_offset2,            \
                    antiquant_scale, antiquant_offset, key_offset, value_offset};                         \
  a.heads = heads, a.scale = scale, a.pre = pre, a.next = next, a.layout = layout ? layout : "BSH";       \
  a.kv_heads = kv_heads, a.sparse = sparse, a.inner_precise = inner_precise, a.block_size = block_size;   \
  a.want_lse = want_lse, a.out = out, a.lse = lse;                                                        \
  a.key_scale = key_scale, a.value_scale = value_scale, a.key_mode = key_mode, a.value_mode = value_mode; \
  a.key_prefix = key_prefix
#define FIA_COLLECT_V3()                  \
  FIA_COLLECT_V2();                       \
  a.quantization.push_back(k_rope_scale); \
  a.q_rope = q_rope, a.k_rope = k_rope
#define FIA_COLLECT_V4()             \
  FIA_COLLECT_V3();                  \
  a.quantization.push_back(q_scale); \
  a.sinks = sinks

#define PFA_ARGUMENTS                                                                                        \
  T, query, T, key, T, value, T, bias, T, mask, IA, q_lengths, IA, kv_lengths, T, dequant1, T, quant1, T,    \
      dequant2, T, quant2, T, quant_offset2, int64_t, heads, double, scale, int64_t, pre, int64_t, next, CP, \
      layout, int64_t, kv_heads, int64_t, sparse, int64_t, inner_precise, O, out
#define IFA_ARGUMENTS                                                                                      \
  T, query, TL, key, TL, value, T, bias, T, mask, IA, kv_lengths, T, dequant1, T, quant1, T, dequant2, T,  \
      quant2, T, quant_offset2, T, antiquant_scale, T, antiquant_offset, T, table, T, kv_padding, int64_t, \
      heads, double, scale, CP, layout, int64_t, kv_heads, int64_t, block_size, int64_t, inner_precise, O, \
      out
#define PHASE_COLLECT()                                                                      \
  sim::Inference a;                                                                          \
  a.query = query, a.bias = bias, a.mask = mask, a.kv_lengths = kv_lengths, a.heads = heads; \
  a.scale = scale, a.layout = layout ? layout : "BSH", a.kv_heads = kv_heads;                \
  a.inner_precise = inner_precise, a.out = out;                                              \
  a.quantization = {dequant1, quant1, dequant2, quant2, quant_offset2}
// On a 310P a mask adds -10000 (AttenMaskTransND2NZ of prompt_flash_attention_s1s2_bns1_x310_base.h).
#define PFA_COLLECT()                                                                             \
  PHASE_COLLECT();                                                                                \
  aclTensorList keys_, values_;                                                                   \
  if (key) keys_.v = {key.p}, a.key.p = &keys_;                                                   \
  if (value) values_.v = {value.p}, a.value.p = &values_;                                         \
  a.q_lengths = q_lengths, a.pre = pre, a.next = next, a.sparse = sparse, a.is_of_prompts = true; \
  if (soc() == Soc::ascend310p) a.hidden_adds = -1e4
#define IFA_COLLECT()                                                               \
  PHASE_COLLECT();                                                                  \
  a.key = key, a.value = value, a.table = table, a.kv_padding = kv_padding;         \
  a.quantization.insert(a.quantization.end(), {antiquant_scale, antiquant_offset}); \
  a.block_size = block_size
