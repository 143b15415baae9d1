// Masks, biases and sinks of inference attention: ops-transformer, attention/*/op_host, by tiling
// (attention_tiling.cpp). fused: FiaTilingCheck::CheckAttentionMask in
// fused_infer_attention_score_tiling_check_consistency.cpp and CheckFeatureLearnableSink in ..._check_feature.cpp;
// incremental: IFATiling::ProcessAttenMask in incre_flash_attention_tiling_check.cpp; prompt:
// prompt_flash_attention_tiling.cpp. 8.5.0, 9.0.0 and 9.1.0 agree but for sinks.
#include "attention.h"

namespace sim {
namespace {

constexpr int64_t kMaskSide = 2048;

/// Columns a mask or bias must have: those of the keys' axis, however many count. Only what the incremental tiling takes
/// may be as short as the longest sequence.
int64_t columns_of(const Inference& a) {
  if (a.table) return a.table->size(1) * a.block_size;
  if (a.packed() && a.kv_lengths && !(*a.kv_lengths).empty()) return longest(a, a.kv_lengths, true);
  int64_t most = 0;
  for (size_t k = 0; k < a.key.size(); k++)
    most = std::max(most, a.key.at(k).size(a.in_layout() == "BNSD" ? 2 : 1));
  return most;
}

void check_fixed_mask(const Inference& a) {
  require(bool(a.mask), "sparseMode ", a.sparse, " needs the fixed mask of ", kMaskSide, " x ", kMaskSide);
  auto shape = a.mask->sizes();
  bool square = shape.size() >= 2 && shape.size() <= 4 && shape[shape.size() - 1] == kMaskSide &&
                shape[shape.size() - 2] == kMaskSide && a.mask->numel() == kMaskSide * kMaskSide;
  require(square, "sparseMode ", a.sparse, " needs a mask of (", kMaskSide, ", ", kMaskSide,
          "), it has shape ", shape);
}

/// A row of the mask for each sequence; a sparseMode without a mask is without effect.
void check_row(const Inference& a) {
  if (!a.mask) return;
  if (a.sparse >= 3) return check_fixed_mask(a);
  require_axes(a.mask, "attenMask", 2, 4);
  bool is_short = !a.table && a.kv_lengths && !(*a.kv_lengths).empty();
  auto columns = is_short ? longest(a, a.kv_lengths, false) : columns_of(a);
  auto shape = a.mask->sizes();
  bool row = shape.size() == 2 || (shape[1] == 1 && (shape.size() == 3 || shape[2] == 1));
  require(row && shape[0] == a.batch() && shape.back() >= columns, "attenMask has shape ", shape,
          "; one query row takes (B, KV_S), (B, 1, KV_S) or (B, 1, 1, KV_S) with B ", a.batch(),
          " and KV_S at least ", columns);
}

}  // namespace

void check_mask(const Inference& a) {
  require(a.sparse >= 0 && (a.sparse <= 4 || a.sparse == 9), "sparseMode is ", a.sparse, ": 0 to 4, or 9");
  require(a.sparse != 9, "sparseMode 9 (tree) is not simulated");
  if (a.one_row() && tiling_of(a) == Tiling::incremental) return check_row(a);
  auto columns = columns_of(a);
  require(!a.one_row() || a.sparse < 2, "one query row with sparseMode ", a.sparse, " is not simulated");
  if (a.sparse >= 2) {
    check_fixed_mask(a);
    require(!a.packed() || a.sparse != 2, "packed layouts take sparseMode 0, 3 and 4");
    if (a.sparse == 4)
      require(a.pre + a.next >= 0, "the band of preTokens ", a.pre, " and nextTokens ", a.next, " is empty");
    return;
  }
  require(!a.packed() || (a.sparse == 0 && !a.mask),
          "packed layouts take sparseMode 0 without a mask, or 3 or 4 with the fixed one");
  require(a.sparse == 0 || a.mask, "sparseMode 1 needs the whole mask");
  if (!a.mask) return;
  require_axes(a.mask, "attenMask", is_950() ? 3 : 2, 4);  // CheckIFAMask2DShape
  auto shape = a.mask->sizes();
  // CheckFeatureMask in fused_infer_attention_score_tiling_check_feature.cpp, 8.5.0 to 9.1.0.
  if (tiling_of(a) == Tiling::fused && shape.size() == 2) {
    require(!a.q_rope && a.value_head_size() == a.head_size(), "attenMask has shape ", shape,
            ": with rotated parts, or values of another size than keys, it needs 3 or 4 axes");
    require(a.layout == a.in_layout() || a.layout == "BNSD_BSND", "attenMask has shape ", shape,
            ": with layout ", a.layout, " it needs 3 or 4 axes");
  }
  auto rows = shape[shape.size() - 2];
  // Two axes of one query row are those of the sequences and the keys.
  bool rows_are_sequences = a.one_row() && shape.size() == 2;
  bool batch = shape.size() == 2 || shape[0] == 1 || shape[0] == a.batch();
  if (rows_are_sequences) batch = rows == a.batch();
  require(batch && (shape.size() != 4 || shape[1] == 1) && rows >= rows_of(a) && shape.back() >= columns,
          "attenMask has shape ", shape,
          "; supported: (Q_S, KV_S), (B or 1, Q_S, KV_S), (B or 1, 1, Q_S, KV_S) with B ", a.batch(),
          ", Q_S at least ", rows_of(a), " and KV_S at least ", columns);
}

void check_bias(const Inference& a) {
  if (!a.bias) return;
  require(!a.packed(), "packed layouts do not go with pseShift");
  require_axes(a.bias, "pseShift", 4, 4);
  auto s = a.bias->sizes();
  require((s[0] == 1 || s[0] == a.batch()) && s[1] == a.heads && s[2] >= a.q_len() && s[3] >= columns_of(a),
          "pseShift has shape ", s, ", it must be (B or 1, N, at least ", a.q_len(), ", at least ",
          columns_of(a), ")");
}

void check_sinks(const Inference& a) {
  if (!a.sinks) return;
  if (is_950()) {  // CheckSinkDtypeSupport and CheckAxisSupport of learnable_sink_checker.cpp
    require_same_dtype(a.sinks, "learnableSink", a.query, "query");
    auto d = a.head_size(), value = a.value_head_size();
    require((d == 64 || d == 128 || d == 192) && (value == 64 || value == 128),
            "learnableSink needs D 64, 128 or 192 and values of 64 or 128, they are ", d, " and ", value);
    require(a.inner_precise == 0, "learnableSink needs innerPrecise 0, it is ", a.inner_precise);
  } else if (release_is("9.0.0")) {
    require_dtype(a.sinks, "learnableSink", {at::kBFloat16});
  } else {
    require_same_dtype(a.sinks, "learnableSink", a.query, "query");
    auto d = a.value_head_size();
    require(d == 64 || d == 128, "learnableSink needs values of D 64 or 128, it is ", d);
  }
  require_shape(a.sinks, "learnableSink", {a.heads});
  require(!a.bias && !a.q_padding && !a.kv_padding,
          "learnableSink does not go with pseShift nor left padding");
}

}  // namespace sim
