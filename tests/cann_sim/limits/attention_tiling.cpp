// Which tiling of FusedInferAttentionScore takes a call on A2 and A3: each has checks of its own.
//
// ops-transformer, attention/fused_infer_attention_score/op_host: TilingFusedInferAttentionScore, IsUsingFAI and
// IsUsingIFA in fused_infer_attention_score_tiling.cpp; RouteToFia in arch32 (8.5.0, 9.0.0) and arch22 (9.1.0)
// /fused_infer_attention_score_tiling_v3.cpp. Releases before 8.5.0 are not public: simulated as 8.5.0.
#include "attention.h"

namespace sim {
namespace {

constexpr int64_t kMostOfSplitFuse = 256, kMostOfBlocks = 512;

bool is_one_of_two(int64_t d) { return d == 64 || d == 128; }

/// IsUsingFAI: head sizes and blocks.
bool is_sized_for_split_fuse(const Inference& a) {
  auto d = a.head_size();
  if (d > kMostOfSplitFuse || a.value_head_size() != d) return false;
  if (!a.table) return true;
  auto axes = a.key.at(0).dim();
  if (axes == 3) return a.block_size % 16 == 0 && a.block_size <= kMostOfBlocks;
  return axes == 5 && release_is("9.1.0") && !is_one_of_two(d) && a.block_size <= kMostOfBlocks;
}

bool fits_split_fuse(const Inference& a) {
  if (a.layout != "TND" || a.q_rope || a.has_integers()) return false;
  bool is_multi_head = a.heads == a.kv_head_count(), is_precise = a.inner_precise == 0;
  if (!release_is("9.0.0")) {
    if (a.sinks || (a.sparse != 0 && a.sparse != 3)) return false;
    bool is_half = a.query->scalar_type() == at::kHalf;
    if (is_multi_head && !(is_half && a.inner_precise == 1 && !a.mask && !a.table)) return false;
  } else {
    if (a.sinks && a.head_size() == 64 && a.sinks->scalar_type() == at::kBFloat16) return false;
    if (a.sparse != 0 && a.sparse != 3 && a.sparse != 4) return false;
    bool is_fast_bf16 = a.query->scalar_type() == at::kBFloat16 && a.inner_precise == 1;
    if (is_multi_head && (is_fast_bf16 || (a.sparse == 0 && a.mask))) return false;
  }
  return (is_multi_head || is_precise) && is_sized_for_split_fuse(a);
}

bool is_plain_layout(const Inference& a) {
  return a.layout == "BSH" || a.layout == "BSND" || a.layout == "BNSD";
}

/// CheckGqaConstrain of 8.5.0.
bool is_fused_in_8_5(const Inference& a) {
  if (a.q_rope || a.value_head_size() != a.head_size()) return true;
  if (!is_plain_layout(a) && a.layout != "BNSD_BSND" && a.layout != "TND") return true;
  if (a.key.at(0).dim() == 5) return true;
  return is_one_of_two(a.head_size()) && !a.bias && !a.q_padding && !a.kv_padding && a.key.at(0).numel() > 0;
}

bool goes_to_fused(const Inference& a) {
  if (a.has_integers() || is_310p()) return false;
  if (!release_is("9.0.0")) return is_fused_in_8_5(a);
  // Where the older tiling is faster.
  bool is_legacy = !a.q_rope && a.q_len() == 1 && is_plain_layout(a) && a.head_size() == 256 &&
                   a.value_head_size() == 256 && a.heads == a.kv_head_count() && !a.table;
  return !is_legacy;
}

}  // namespace

Tiling tiling_of(const Inference& a) {
  if (a.is_of_prompts) return Tiling::prompt;
  if (is_950()) return Tiling::fused;
  // CheckSpecConditions: of a paged cache, 8.5.0 prefers split_fuse only for blocks of 128.
  bool fits = fits_split_fuse(a), is_preferred = !a.table || release_is("9.0.0") || a.block_size == 128;
  if (fits && is_preferred) return Tiling::split_fuse;
  if (goes_to_fused(a)) return Tiling::fused;
  if (fits) return Tiling::split_fuse;
  bool is_one = !a.packed() && a.q_len() == 1;
  bool is_latent = a.packed() ? a.head_size() == 512 : a.q_rope && a.head_size() == 512 && a.q_len() <= 16;
  return is_one || is_latent ? Tiling::incremental : Tiling::prompt;
}

}  // namespace sim
