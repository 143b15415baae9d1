// What the routing operators reject. Sources: ops-transformer, moe/*/docs/*.md.
#include "quantized.h"

using namespace sim;

// ---- choice of experts -----------------------------------------------------------------------------------------
LIMITS(aclnnMoeGatingTopK, T, x, T, bias, int64_t, k, int64_t, k_group, int64_t, groups, int64_t, select_mode,
       int64_t, renorm, int64_t, norm_type, bool, out_flag, double, factor, double, eps, O, y, O, expert_idx,
       O, normed) {
  require_all_given({{x, "x"}, {y, "yOut"}, {expert_idx, "expertIdxOut"}});
  require_dtype(x, "x", kFloats);
  require_same_dtype(y, "yOut", x, "x");
  require_dtype(expert_idx, "expertIdxOut", {kInt32});
  const int64_t experts = x->size(-1);
  require(experts <= 2048, experts, " experts, at most 2048");
  require_dtype(bias, "bias", kFloats);
  require_shape(bias, "bias", {experts});
  require(groups > 0 && experts % groups == 0, "groupCount ", groups, " must divide ", experts, " experts");
  const int64_t size = experts / groups;
  require(size > select_mode, "a group has ", size, " experts, more than groupSelectMode ", select_mode,
          " are needed");
  require((size + 31) / 32 * 32 * groups <= 2048, "groups of ", size, " experts, padded to 32, times ",
          groups, " exceed 2048");
  require(k_group >= 1 && k_group <= groups, "kGroup ", k_group, ": 1 to groupCount ", groups);
  require(k >= 1 && k <= size * k_group, "k is ", k, ": 1 to ", size * k_group,
          ", the experts of kGroup groups");
  // CheckOutShape in moe_gating_top_k_tiling.cpp, 8.5.0 to 9.1.0.
  auto chosen = rows_of(x);
  chosen.push_back(k);
  require_shape(y, "yOut", chosen);
  require_shape(expert_idx, "expertIdxOut", chosen);
  require(select_mode == 0 || select_mode == 1, "groupSelectMode ", select_mode, ": 0 or 1");
  require(renorm == 0, "renorm ", renorm, ": only 0 is supported");
  require(norm_type == 0 || norm_type == 1, "normType ", norm_type, ": 0 (softmax) or 1 (sigmoid)");
  if (out_flag) require_given(normed, "outOut");
  if (out_flag) require_dtype(normed, "outOut", {kFloat32});
}

// ---- order of experts, and back --------------------------------------------------------------------------------
LIMITS(aclnnMoeInitRoutingV2, T, x, T, expert_idx, int64_t, active, int64_t, capacity, int64_t, experts,
       int64_t, drop_pad, int64_t, count_flag, bool, before_flag, O, expanded, O, row_idx, O, counts, O,
       before) {
  require_all_given(
      {{x, "x"}, {expert_idx, "expertIdx"}, {expanded, "expandedXOut"}, {row_idx, "expandedRowIdxOut"}});
  require_dtype(x, "x", kFloats);
  require_axes(x, "x", 2, 2);
  require_dtype(expert_idx, "expertIdx", {kInt32});
  require_axes(expert_idx, "expertIdx", 2, 2);
  require(expert_idx->size(0) == x->size(0), "x has ", x->size(0), " rows, expertIdx ", expert_idx->size(0));
  require(active >= 0 && capacity >= 0 && experts >= 0,
          "activeNum, expertCapacity and expertNum must not be negative");
  require(drop_pad == 0 || (drop_pad == 1 && !is_310p()), "dropPadMode ", drop_pad, ": 0, not on 310P 1");
  require(count_flag >= 0 && count_flag <= 2, "expertTokensCountOrCumsumFlag ", count_flag, ": 0, 1 or 2");
  require_same_dtype(expanded, "expandedXOut", x, "x");
  require_dtype(row_idx, "expandedRowIdxOut", {kInt32});
  require_shape(row_idx, "expandedRowIdxOut", {expert_idx->numel()});
  if (drop_pad) {
    require(experts > 0 && capacity > 0 && capacity <= x->size(0),
            "dropPadMode 1 needs expertNum > 0 and expertCapacity "
            "in (0, rows], they are ",
            experts, " and ", capacity);
    require_shape(expanded, "expandedXOut", {experts, capacity, x->size(1)});
    if (before_flag) {
      require_given(before, "expertTokensBeforeCapacityOut");
      require_dtype(before, "expertTokensBeforeCapacityOut", {kInt32});
      require_shape(before, "expertTokensBeforeCapacityOut", {experts});
    }
    return;
  }
  const int64_t rows = active ? std::min(active, expert_idx->numel()) : expert_idx->numel();
  require_shape(expanded, "expandedXOut", {rows, x->size(1)});
  if (!count_flag) return;
  require(experts > 0, "expertNum must be positive to count tokens");
  require_given(counts, "expertTokensCountOrCumsumOut");
  require_dtype(counts, "expertTokensCountOrCumsumOut", {kInt32});
  require_shape(counts, "expertTokensCountOrCumsumOut", {experts});
}
