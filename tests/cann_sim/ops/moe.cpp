// Routing of tokens to experts, and back.
// Formulas: CANN operator documentation (ops-transformer, moe/*/docs/*.md).
#include "common.h"

using namespace sim;
using at::Tensor;

// ---- choice of experts -----------------------------------------------------------------------------------------
// The k largest of each row, the lower index first among equals.
static std::pair<Tensor, Tensor> largest(const Tensor& x, int64_t k) {
  auto order = std::get<1>(at::sort(x, /*stable=*/true, -1, /*descending=*/true)).slice(-1, 0, k);
  return {x.gather(-1, order), order};
}
// The bias chooses, it does not weigh: y comes from the scores without it. Only sigmoid scores are divided by
// their sum (op-plugin's test of npu_moe_gating_top_k).
OP(aclnnMoeGatingTopK, T, x, T, bias, int64_t, k, int64_t, k_group, int64_t, groups, int64_t, select_mode,
   int64_t, renorm, int64_t, norm_type, bool, out_flag, double, factor, double, eps, O, y, O, expert_idx, O,
   normed) {
  auto scores = norm_type == 1 ? at::sigmoid(fp32(*x)) : at::softmax(fp32(*x), -1);
  auto choice = bias ? scores + fp32(*bias) : scores;
  if (groups > 1 && k_group < groups) {
    auto grouped = choice.unflatten(-1, {groups, -1});
    auto strength = select_mode == 1 ? largest(grouped, 2).first.sum(-1) : grouped.amax(-1);
    auto closed = at::ones_like(strength, at::kBool).scatter(-1, largest(strength, k_group).second, 0);
    choice = grouped.masked_fill(closed.unsqueeze(-1), -std::numeric_limits<float>::infinity()).flatten(-2);
  }
  auto experts = largest(choice, k).second;
  auto weights = scores.gather(-1, experts);
  if (norm_type == 1) weights = weights / (weights.sum(-1, true) + eps);
  put(y, weights * factor);
  put(expert_idx, experts);
  if (out_flag) put(normed, scores);
}

// ---- tokens in the order of their experts ------------------------------------------------------------------------
// Stable sort of the flattened choices: order[i] is the choice (token * k + j) in place i, place[c] its inverse.
struct Routing {
  Tensor order, place, experts;
};
static Routing sorted_by_expert(const Tensor& expert_idx) {
  auto flat = expert_idx.reshape(-1).to(at::kLong);
  auto [experts, order] = at::sort(flat, /*stable=*/true, 0, false);
  auto place = at::empty_like(order).scatter(0, order, at::arange(order.numel()));
  return {order, place, experts};
}
static Tensor tokens_per_expert(const Tensor& experts, int64_t count) {
  return at::bincount(experts, {}, count).slice(0, 0, count);
}

// Drop/pad: every expert has `capacity` rows, missing ones are zeros, surplus tokens have row -1.
static void routing_with_capacity(const TensorHandle& x, const Tensor& expert_idx, int64_t capacity,
                                  int64_t experts, const TensorHandle& expanded,
                                  const TensorHandle& row_idx) {
  const int64_t k = expert_idx.size(-1);
  auto r = sorted_by_expert(expert_idx);
  auto rows = at::zeros({experts * capacity, x->size(-1)}, x->options());
  auto where = at::full({r.order.numel()}, -1, at::kLong);
  std::vector<int64_t> used(experts, 0);
  for (int64_t i = 0; i < r.order.numel(); i++) {
    const int64_t e = r.experts[i].item<int64_t>(), choice = r.order[i].item<int64_t>();
    if (used[e] == capacity) continue;
    const int64_t row = e * capacity + used[e]++;
    rows[row].copy_((*x)[choice / k]);
    where[choice] = row;
  }
  put(expanded, rows.reshape(expanded->sizes()));
  put(row_idx, where);
}
OP(aclnnMoeInitRoutingV2, T, x, T, expert_idx, int64_t, active, int64_t, capacity, int64_t, experts, int64_t,
   drop_pad, int64_t, count_flag, bool, before_flag, O, expanded, O, row_idx, O, counts, O, before) {
  const int64_t k = expert_idx->dim() == 2 ? expert_idx->size(1) : 1;
  auto r = sorted_by_expert(*expert_idx);
  if (drop_pad) {
    routing_with_capacity(x, expert_idx->reshape({-1, k}), capacity, experts, expanded, row_idx);
    if (before_flag) put(before, tokens_per_expert(r.experts, experts));
    return;
  }
  put(expanded, x->index_select(0, r.order.floor_divide(k)).slice(0, 0, expanded->size(0)));
  put(row_idx, r.place);
  if (!count_flag) return;
  auto count = tokens_per_expert(r.experts, experts);
  put(counts, count_flag == 1 ? count.cumsum(0) : count);
}
