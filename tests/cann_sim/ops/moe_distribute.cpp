// Tokens to the ranks of their experts, and back (expert parallelism).
// Source: ops-transformer, mc2/moe_distribute_{dispatch,combine}{,_v2}/docs. The layout of what dispatch tells combine
// (assistInfoForCombine, epRecvCounts) is each implementation's own: here combine works the routing out again from every
// rank's expert ids, so the assist information is left at zero.
#include "collective.h"
#include "quantize.h"

using namespace sim;
using at::Tensor;

namespace {

struct Domain {
  const char* group;
  int64_t ranks, rank, experts, most_tokens;  // most_tokens: of one rank
  int64_t local() const { return experts / ranks; }
};
Domain domain(const char* group, int64_t ranks, int64_t rank, int64_t experts, int64_t global_bs,
              int64_t bs) {
  return {group, ranks, rank, experts, global_bs ? global_bs / ranks : bs};
}

/// Expert ids of every rank (ranks, most_tokens, k); -1 where there is no token, or it is not active.
Tensor all_expert_ids(const Domain& d, const Tensor& expert_ids, const TensorHandle& active) {
  auto mine = at::full({d.most_tokens, expert_ids.size(1)}, -1, at::kLong);
  auto ids = expert_ids.to(at::kLong);
  if (active) ids = ids.masked_fill(active->to(at::kBool).unsqueeze(-1).logical_not(), -1);
  mine.slice(0, 0, ids.size(0)).copy_(ids);
  return at::stack(all_gather(d.group, mine));
}

/// A row that a rank receives: choice `k` of token `token` of rank `from`.
struct Row {
  int64_t expert, from, token, k;
};
/// The rows of `rank` in order: by expert, then by the rank they come from, then by token.
std::vector<Row> rows_of(const Domain& d, const Tensor& ids, int64_t rank) {
  std::vector<Row> rows;
  auto* id = ids.const_data_ptr<int64_t>();
  const int64_t tokens = ids.size(1), k = ids.size(2);
  for (int64_t e = rank * d.local(); e < (rank + 1) * d.local(); e++) {
    for (int64_t from = 0; from < d.ranks; from++) {
      for (int64_t c = 0; c < tokens * k; c++) {
        if (id[from * tokens * k + c] == e) rows.push_back({e, from, c / k, c % k});
      }
    }
  }
  return rows;
}

/// Dynamic quantization with an expert's smoothing factors: int8, and max / 127.
std::pair<Tensor, Tensor> quantized_row(const Tensor& x, const TensorHandle& scales, int64_t expert) {
  auto v = fp32(x);
  if (scales) v = v * fp32((*scales)[expert]);
  auto s = v.abs().amax() / 127;
  return {quantize(v / s), s};
}

void dispatch(const Domain& d, const TensorHandle& x, const TensorHandle& expert_ids,
              const TensorHandle& scales, const TensorHandle& active, const TensorHandle& expert_scales,
              int64_t quant_mode, int64_t nums_type, const TensorHandle& expanded,
              const TensorHandle& row_scales, const TensorHandle& assist, const TensorHandle& token_nums,
              const TensorHandle& recv_counts, const TensorHandle& expand_scales) {
  auto ids = all_expert_ids(d, *expert_ids, active);
  auto padded = at::zeros({d.most_tokens, x->size(1)}, x->options());
  padded.slice(0, 0, x->size(0)).copy_(*x);
  auto tokens = all_gather(d.group, padded);
  std::vector<Tensor> weights;
  if (expert_scales) {
    auto mine = at::zeros({d.most_tokens, ids.size(2)}, at::kFloat);
    mine.slice(0, 0, x->size(0)).copy_(*expert_scales);
    weights = all_gather(d.group, mine);
  }
  auto rows = rows_of(d, ids, d.rank);
  TORCH_CHECK(static_cast<int64_t>(rows.size()) <= expanded->size(0), "expandXOut has ", expanded->size(0),
              " rows, ", rows.size(), " are received");
  auto received = at::zeros({d.local(), d.ranks}, at::kLong);
  for (size_t r = 0; r < rows.size(); r++) {
    auto token = tokens[rows[r].from][rows[r].token];
    const int64_t row = static_cast<int64_t>(r);
    if (quant_mode == 2) {
      auto [q, s] = quantized_row(token, scales, rows[r].expert);
      (*expanded)[row].copy_(q);
      (*row_scales)[row].copy_(s);
    } else {
      (*expanded)[row].copy_(token);
    }
    if (expert_scales && expand_scales && expand_scales->numel() > row) {
      (*expand_scales)[row].copy_(weights[rows[r].from][rows[r].token][rows[r].k]);
    }
    received[rows[r].expert - d.rank * d.local()][rows[r].from] += 1;
  }
  auto per_expert = received.sum(1);
  put(token_nums, nums_type == 0 ? per_expert.cumsum(0) : per_expert);
  auto counts = received.flatten().cumsum(0);  // of each (expert, rank), accumulated
  recv_counts->reshape(-1)
      .slice(0, 0, std::min(counts.numel(), recv_counts->numel()))
      .copy_(counts.slice(0, 0, recv_counts->numel()));
  assist->zero_();
}

/// xOut = sum over k of expert scale * the expert's row, added in float32 (+ sharedExpertX).
void combine(const Domain& d, const TensorHandle& expanded, const TensorHandle& expert_ids,
             const TensorHandle& expert_scales, const TensorHandle& active, const TensorHandle& shared,
             const TensorHandle& out) {
  auto ids = all_expert_ids(d, *expert_ids, active);
  auto parts = all_gather(d.group, *expanded);
  auto sum = shared ? fp32(*shared).clone() : at::zeros(out->sizes(), at::kFloat);
  auto weights = fp32(*expert_scales);
  for (int64_t rank = 0; rank < d.ranks; rank++) {
    auto rows = rows_of(d, ids, rank);
    for (size_t r = 0; r < rows.size(); r++) {
      if (rows[r].from != d.rank) continue;
      sum[rows[r].token] += fp32(parts[rank][static_cast<int64_t>(r)]) * weights[rows[r].token][rows[r].k];
    }
  }
  put(out, sum);
}

}  // namespace

OP(aclnnMoeDistributeDispatch, T, x, T, expert_ids, T, scales, T, active, T, expert_scales, CP, group_ep,
   int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size, int64_t, tp_rank,
   int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t, quant_mode, int64_t,
   global_bs, int64_t, nums_type, O, expanded, O, row_scales, O, expand_idx, O, token_nums, O, ep_recv, O,
   tp_recv, O, expand_scales) {
  auto d = domain(group_ep, ep_size, ep_rank, experts, global_bs, x->size(0));
  dispatch(d, x, expert_ids, scales, active, expert_scales, quant_mode, nums_type, expanded, row_scales,
           expand_idx, token_nums, ep_recv, expand_scales);
}
OP(aclnnMoeDistributeDispatchV2, T, x, T, expert_ids, T, scales, T, active, T, expert_scales, CP, group_ep,
   int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size, int64_t, tp_rank,
   int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t, quant_mode, int64_t,
   global_bs, int64_t, nums_type, CP, comm_alg, O, expanded, O, row_scales, O, assist, O, token_nums, O,
   ep_recv, O, tp_recv, O, expand_scales) {
  auto d = domain(group_ep, ep_size, ep_rank, experts, global_bs, x->size(0));
  dispatch(d, x, expert_ids, scales, active, expert_scales, quant_mode, nums_type, expanded, row_scales,
           assist, token_nums, ep_recv, expand_scales);
}
OP(aclnnMoeDistributeCombine, T, expanded, T, expert_ids, T, expand_idx, T, ep_counts, T, expert_scales, T,
   tp_counts, T, active, T, activation_scale, T, weight_scale, T, group_list, T, expand_scales, CP, group_ep,
   int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size, int64_t, tp_rank,
   int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t, global_bs, int64_t,
   out_dtype, int64_t, comm_quant, int64_t, list_type, O, out) {
  auto d = domain(group_ep, ep_size, ep_rank, experts, global_bs, expert_ids->size(0));
  combine(d, expanded, expert_ids, expert_scales, active, T{}, out);
}
OP(aclnnMoeDistributeCombineV2, T, expanded, T, expert_ids, T, assist, T, ep_counts, T, expert_scales, T,
   tp_counts, T, active, T, activation_scale, T, weight_scale, T, group_list, T, expand_scales, T, shared_x,
   CP, group_ep, int64_t, ep_size, int64_t, ep_rank, int64_t, experts, CP, group_tp, int64_t, tp_size,
   int64_t, tp_rank, int64_t, shard_type, int64_t, shared_experts, int64_t, shared_ranks, int64_t, global_bs,
   int64_t, out_dtype, int64_t, comm_quant, int64_t, list_type, CP, comm_alg, O, out) {
  auto d = domain(group_ep, ep_size, ep_rank, experts, global_bs, expert_ids->size(0));
  combine(d, expanded, expert_ids, expert_scales, active, shared_x, out);
}
