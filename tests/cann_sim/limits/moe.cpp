// What the routing operators reject. Sources: ops-transformer, moe/*/docs/*.md, and the tiling under moe/*/op_host.
#include "quantized.h"

using namespace sim;

// ---- choice of experts -----------------------------------------------------------------------------------------
static void softmax_top_k(const TensorHandle& x, const TensorHandle& finished, int64_t k,
                          const TensorHandle& y, const TensorHandle& expert_idx) {
  require_given(x, "x");
  require_given(y, "yOut");
  require_given(expert_idx, "expertIdxOut");
  require_dtype(x, "x", kFloats);
  require_axes(x, "x", 2, 3);
  require_same_dtype(y, "yOut", x, "x");
  require_dtype(expert_idx, "expertIdxOut", {kInt32});
  require_dtype(finished, "finished", {at::kBool});
  require_shape(finished, "finished", rows_of(x));
  require(k > 0 && k <= x->size(-1), "k is ", k, " of ", x->size(-1), " experts");
  require(k <= 1024, "k is ", k, ", at most 1024");
  auto shape = rows_of(x);
  shape.push_back(k);
  require_shape(y, "yOut", shape);
  require_shape(expert_idx, "expertIdxOut", shape);
}
LIMITS(aclnnMoeGatingTopKSoftmaxV2, T, x, T, finished, int64_t, k, int64_t, renorm, bool, with_softmax, O, y,
       O, expert_idx, O, softmax) {
  softmax_top_k(x, finished, k, y, expert_idx);
  require(renorm == 0 || renorm == 1, "renorm ", renorm, ": 0 or 1");
  if (!with_softmax || renorm) return;
  require_given(softmax, "softmaxResultOut");
  require_dtype(softmax, "softmaxResultOut", {kFloat32});
  require_shape(softmax, "softmaxResultOut", x->sizes());
}
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
LIMITS(aclnnMoeInitRoutingV3, T, x, T, expert_idx, T, scale, T, offset, int64_t, active, int64_t, capacity,
       int64_t, experts, int64_t, drop_pad, int64_t, count_type, bool, count_flag, int64_t, quant_mode, IA,
       range, int64_t, row_idx_type, O, expanded, O, row_idx, O, counts, O, expanded_scale) {
  require_given(x, "x");
  require_given(expert_idx, "expertIdx");
  require_given(expanded, "expandedXOut");
  require_given(row_idx, "expandedRowIdxOut");
  require_given(counts, "expertTokensCountOrCumsumOut");
  require_given(expanded_scale, "expandedScaleOut");
  require_dtype(x, "x", {at::kHalf, at::kBFloat16, kFloat32, kInt8});
  require_axes(x, "x", 2, 2);
  require_dtype(expert_idx, "expertIdx", {kInt32});
  require_axes(expert_idx, "expertIdx", 2, 2);
  require(expert_idx->size(0) == x->size(0), "x has ", x->size(0), " rows, expertIdx ", expert_idx->size(0));
  const int64_t choices = expert_idx->numel();
  require(active == choices, "activeNum is ", active, ", it must be rows * k = ", choices);
  require(drop_pad == 0, "dropPadMode ", drop_pad, ": only 0 is supported");
  require(count_type == 1 || count_type == 2, "expertTokensNumType ", count_type, ": 1 (count) or 2 (pairs)");
  require(count_flag, "expertTokensNumFlag must be true");
  require(experts >= 0 && experts <= (count_type == 2 ? 5120 : 10240), "expertNum is ", experts);
  require(quant_mode == 1 || quant_mode == -1, "quantMode ", quant_mode, ": -1 (none) or 1 (dynamic)");
  require(row_idx_type == 0 || row_idx_type == 1, "rowIdxType ", row_idx_type, ": 0 or 1");
  require(range && (*range).size() == 2, "activeExpertRange needs two values");
  const int64_t first = (*range)[0], last = (*range)[1];
  require(first >= 0 && last >= first && last <= experts, "activeExpertRange [", first, ", ", last, ") of ",
          experts, " experts");
  // Of quantMode -1 and 1 no offset is read: moe_init_routing_v3_tiling.cpp, 8.5.0 to 9.1.0.
  require_dtype(offset, "offset", {kFloat32});
  require_dtype(scale, "scale", {kFloat32});
  if (quant_mode == 1) {
    require(x->scalar_type() != kInt8, "int8 x cannot be quantized");
    require_dtype(expanded, "expandedXOut", {kInt8});
    require_shape(scale, "scale", {last - first, x->size(1)});
  } else {
    require_same_dtype(expanded, "expandedXOut", x, "x");
    require_shape(scale, "scale", {x->size(0)});
  }
  require_shape(expanded, "expandedXOut", {choices, x->size(1)});
  require_dtype(row_idx, "expandedRowIdxOut", {kInt32});
  require_shape(row_idx, "expandedRowIdxOut", {choices});
  require_dtype(counts, "expertTokensCountOrCumsumOut", {at::kLong});
  require_dtype(expanded_scale, "expandedScaleOut", {kFloat32});
}
LIMITS(aclnnMoeFinalizeRoutingV2, T, expanded, T, row_idx, T, x1, T, x2, T, bias, T, scales, T, expert_idx,
       int64_t, mode, O, out) {
  require_given(expanded, "expandedX");
  require_given(row_idx, "expandedRowIdx");
  require_given(out, "out");
  require_dtype(expanded, "expandedX", kFloats);
  require_dtype(row_idx, "expandedRowIdx", {kInt32});
  require_same_dtype(out, "out", expanded, "expandedX");
  require_same_dtype(x1, "x1", expanded, "expandedX");
  require_same_dtype(x2, "x2", expanded, "expandedX");
  require_same_dtype(bias, "bias", expanded, "expandedX");
  require_shape(x1, "x1", out->sizes());
  require_shape(x2, "x2", out->sizes());
  require(!x2 || x1, "x2 needs x1");
  require(!bias || expert_idx, "bias needs expertIdx");
  require(!bias || bias->size(0) >= expert_idx->size(1), "bias of fewer experts than a token has");
  require_dtype(expert_idx, "expertIdx", {kInt32});
  require(mode >= 0 && mode <= 3, "dropPadMode ", mode, ": 0 to 3");
  require(mode % 2 == 1 ? expanded->dim() == 3 : expanded->dim() == 2, "expandedX has ", expanded->dim(),
          " axes with dropPadMode ", mode, ": 2 with 0 and 2, 3 with 1 and 3");
  const int64_t k = scales ? scales->size(-1) : 1;
  require(row_idx->numel() == out->size(0) * k, "expandedRowIdx has ", row_idx->numel(),
          " values, needed: rows ", out->size(0), " * k ", k);
  if (scales) {
    const bool mixed =
        expanded->scalar_type() == at::kBFloat16 && scales->scalar_type() == kFloat32 && !is_310p();
    require(mixed || scales->scalar_type() == expanded->scalar_type(), "scales are ", scales->scalar_type(),
            " with ", expanded->scalar_type(), " expandedX: equal, or Float with BFloat16");
    require_shape(scales, "scales", {out->size(0), k});
  }
  if (!is_310p()) return;
  require_dtype(expanded, "expandedX (310P)", {at::kHalf, kFloat32});
  require(out->size(-1) % 32 == 0, "on 310P the last axis must be a multiple of 32, it is ", out->size(-1));
  require(!x1 && !x2 && !bias && !expert_idx, "310P takes no x1, x2, bias and expertIdx");
  require(mode == 2, "dropPadMode ", mode, ": 310P takes 2 only");
}
