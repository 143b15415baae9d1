// What dispatch and combine of tokens over ranks reject. Source: ops-transformer,
// mc2/moe_distribute_{dispatch,combine}{,_v2}/docs. Shared-expert ranks and a TP domain are not simulated and refused.
#include "../ops/collective.h"
#include "quantized.h"

using namespace sim;

struct ExpertDomain {
  CP group;
  int64_t ranks, rank, experts, tp_ranks, shared_ranks, global_bs;
};
static void experts_over_ranks(const ExpertDomain& d, const TensorHandle& expert_ids,
                               const TensorHandle& active, int64_t tokens, int64_t hidden) {
  require(d.group && *d.group, "groupEp is empty: pass the name HcclGetCommName gives");
  auto [rank, size] = rank_and_size(d.group);
  require(d.ranks == size, "epWorldSize is ", d.ranks, ", the group has ", size, " ranks");
  require(d.rank == rank, "epRankId is ", d.rank, ", this is rank ", rank);
  require(d.ranks >= 2 && d.ranks <= 768, "epWorldSize ", d.ranks, ": 2 to 768");
  require(d.tp_ranks <= 1, "tpWorldSize ", d.tp_ranks, ": a TP domain is not supported");
  require(d.shared_ranks == 0, "sharedExpertRankNum ", d.shared_ranks,
          ": ranks of shared experts are not simulated");
  require(d.experts > 0 && d.experts % d.ranks == 0, "moeExpertNum ", d.experts, " must be divisible by ",
          d.ranks, " ranks");
  require_given(expert_ids, "expertIds");
  require_dtype(expert_ids, "expertIds", {kInt32});
  require_axes(expert_ids, "expertIds", 2, 2);
  require(expert_ids->size(0) == tokens, "expertIds has ", expert_ids->size(0), " rows for ", tokens,
          " tokens");
  require_dtype(active, "xActiveMask", {at::kBool});
  require_shape(active, "xActiveMask", {tokens});
  const bool a3 = soc() == Soc::ascend910c;
  const int64_t most = a3 ? 512 : 256;
  require(tokens > 0 && tokens <= most, "Bs is ", tokens, ", at most ", most);
  require(hidden % 32 == 0, "H must be divisible by 32, it is ", hidden);
  require(hidden > 0 && (a3 ? hidden >= 1024 && hidden <= 8192 : hidden <= 7168), "H is ", hidden,
          a3 ? ": 1024 to 8192" : ", at most 7168");
  require(d.global_bs == 0 || (d.global_bs % d.ranks == 0 && d.global_bs / d.ranks >= tokens), "globalBs is ",
          d.global_bs, ": 0, or the largest Bs of a rank times the ", d.ranks, " ranks");
}
static int64_t received_rows(const ExpertDomain& d, int64_t tokens, int64_t k) {
  const int64_t all = d.global_bs ? d.global_bs : tokens * d.ranks;
  return all * std::min(d.experts / d.ranks, k);
}

static void dispatch(const ExpertDomain& d, const TensorHandle& x, const TensorHandle& expert_ids,
                     const TensorHandle& scales, const TensorHandle& active,
                     const TensorHandle& expert_scales, int64_t quant_mode, int64_t nums_type,
                     const TensorHandle& expanded, const TensorHandle& row_scales, const TensorHandle& assist,
                     const TensorHandle& token_nums, const TensorHandle& ep_recv) {
  require_given(x, "x");
  require_dtype(x, "x", kSixteenBits);
  require_axes(x, "x", 2, 2);
  experts_over_ranks(d, expert_ids, active, x->size(0), x->size(1));
  require_given(expanded, "expandXOut");
  require_given(assist, "assistInfoForCombineOut");
  require_given(token_nums, "expertTokenNumsOut");
  require_given(ep_recv, "epRecvCountsOut");
  require(quant_mode == 0 || quant_mode == 2, "quantMode ", quant_mode, ": 0 (none) or 2 (dynamic)");
  require(nums_type == 0 || nums_type == 1, "expertTokenNumsType ", nums_type,
          ": 0 (prefix sums) or 1 (counts)");
  const int64_t rows = received_rows(d, x->size(0), expert_ids->size(1));
  require(expanded->dim() == 2 && expanded->size(0) >= rows && expanded->size(1) == x->size(1),
          "expandXOut has shape ", expanded->sizes(), ", needed: at least ", rows, " rows of ", x->size(1));
  if (quant_mode == 2) {
    require_dtype(expanded, "expandXOut with quantMode 2", {kInt8});
    require_given(row_scales, "dynamicScalesOut");
    require_dtype(row_scales, "dynamicScalesOut", {kFloat32});
    require_shape(scales, "scales", {d.experts, x->size(1)});
  } else {
    require_same_dtype(expanded, "expandXOut", x, "x");
    require(!scales, "scales need quantMode 2");
  }
  require_dtype(scales, "scales", {kFloat32});
  require_dtype(expert_scales, "expertScales", {kFloat32});
  require_shape(expert_scales, "expertScales", expert_ids->sizes());
  require_dtype(assist, "assistInfoForCombineOut", {kInt32});
  require_dtype(token_nums, "expertTokenNumsOut", {at::kLong});
  require_shape(token_nums, "expertTokenNumsOut", {d.experts / d.ranks});
  require_dtype(ep_recv, "epRecvCountsOut", {kInt32});
}
LIMITS(aclnnMoeDistributeDispatch, T, x, T, expert_ids, T, scales, T, active, T, expert_scales, CP, group_ep,
       int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size, int64_t, tp_rank,
       int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t, quant_mode, int64_t,
       global_bs, int64_t, nums_type, O, expanded, O, row_scales, O, expand_idx, O, token_nums, O, ep_recv, O,
       tp_recv, O, expand_scales) {
  dispatch({group_ep, ep_size, ep_rank, experts, tp_size, shared_ranks, global_bs}, x, expert_ids, scales,
           active, expert_scales, quant_mode, nums_type, expanded, row_scales, expand_idx, token_nums,
           ep_recv);
}
LIMITS(aclnnMoeDistributeDispatchV2, T, x, T, expert_ids, T, scales, T, active, T, expert_scales, CP,
       group_ep, int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size,
       int64_t, tp_rank, int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t,
       quant_mode, int64_t, global_bs, int64_t, nums_type, CP, comm_alg, O, expanded, O, row_scales, O,
       assist, O, token_nums, O, ep_recv, O, tp_recv, O, expand_scales) {
  dispatch({group_ep, ep_size, ep_rank, experts, tp_size, shared_ranks, global_bs}, x, expert_ids, scales,
           active, expert_scales, quant_mode, nums_type, expanded, row_scales, assist, token_nums, ep_recv);
}

static void combine(const ExpertDomain& d, const TensorHandle& expanded, const TensorHandle& expert_ids,
                    const TensorHandle& assist, const TensorHandle& ep_counts,
                    const TensorHandle& expert_scales, const TensorHandle& active, const TensorHandle& shared,
                    int64_t out_dtype, int64_t comm_quant, const TensorHandle& out) {
  require_given(expanded, "expandX");
  require_given(out, "xOut");
  require_given(assist, "assistInfoForCombine");
  require_given(ep_counts, "epSendCounts");
  require_given(expert_scales, "expertScales");
  require_dtype(expanded, "expandX", kSixteenBits);
  require_same_dtype(out, "xOut", expanded, "expandX");
  require_axes(out, "xOut", 2, 2);
  experts_over_ranks(d, expert_ids, active, out->size(0), out->size(1));
  const int64_t rows = received_rows(d, out->size(0), expert_ids->size(1));
  require(expanded->dim() == 2 && expanded->size(0) >= rows && expanded->size(1) == out->size(1),
          "expandX has shape ", expanded->sizes(), ", needed: at least ", rows, " rows of ", out->size(1));
  require_dtype(expert_scales, "expertScales", {kFloat32});
  require_shape(expert_scales, "expertScales", expert_ids->sizes());
  require_same_dtype(shared, "sharedExpertX", expanded, "expandX");
  require_shape(shared, "sharedExpertX", out->sizes());
  require(out_dtype == 0, "outDtype ", out_dtype, ": 0");
  require(comm_quant == 0, "commQuantMode ", comm_quant, ": 0 is simulated");
}
LIMITS(aclnnMoeDistributeCombine, T, expanded, T, expert_ids, T, expand_idx, T, ep_counts, T, expert_scales,
       T, tp_counts, T, active, T, activation_scale, T, weight_scale, T, group_list, T, expand_scales, CP,
       group_ep, int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size,
       int64_t, tp_rank, int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t,
       global_bs, int64_t, out_dtype, int64_t, comm_quant, int64_t, list_type, O, out) {
  combine({group_ep, ep_size, ep_rank, experts, tp_size, shared_ranks, global_bs}, expanded, expert_ids,
          expand_idx, ep_counts, expert_scales, active, T{}, out_dtype, comm_quant, out);
}
LIMITS(aclnnMoeDistributeCombineV2, T, expanded, T, expert_ids, T, assist, T, ep_counts, T, expert_scales, T,
       tp_counts, T, active, T, activation_scale, T, weight_scale, T, group_list, T, expand_scales, T,
       shared_x, CP, group_ep, int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t,
       tp_size, int64_t, tp_rank, int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks,
       int64_t, global_bs, int64_t, out_dtype, int64_t, comm_quant, int64_t, list_type, CP, comm_alg, O,
       out) {
  combine({group_ep, ep_size, ep_rank, experts, tp_size, shared_ranks, global_bs}, expanded, expert_ids,
          assist, ep_counts, expert_scales, active, shared_x, out_dtype, comm_quant, out);
}
