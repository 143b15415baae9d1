// Routing of tokens to experts, and back.
// Formulas: CANN operator documentation (ops-transformer, moe/*/docs/*.md).
#include "quantize.h"

using namespace sim;
using at::Tensor;

// ---- choice of experts -----------------------------------------------------------------------------------------
// The k largest of each row, the lower index first among equals.
static std::pair<Tensor, Tensor> largest(const Tensor& x, int64_t k) {
  auto order = std::get<1>(at::sort(x, /*stable=*/true, -1, /*descending=*/true)).slice(-1, 0, k);
  return {x.gather(-1, order), order};
}
// A finished row routes to expert number `experts`, which does not exist.
static Tensor without_finished(const Tensor& experts_of_row, const TensorHandle& finished, int64_t experts) {
  return finished ? experts_of_row.masked_fill(finished->to(at::kBool).unsqueeze(-1), experts)
                  : experts_of_row;
}

OP(aclnnMoeGatingTopKSoftmaxV2, T, x, T, finished, int64_t, k, int64_t, renorm, bool, with_softmax, O, y, O,
   expert_idx, O, softmax) {
  auto scores = renorm ? fp32(*x) : at::softmax(fp32(*x), -1);
  auto [values, experts] = largest(scores, k);
  put(y, renorm ? at::softmax(values, -1) : values);
  put(expert_idx, without_finished(experts, finished, x->size(-1)));
  if (with_softmax && !renorm) put(softmax, scores);
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

// Only choices inside [first, last) of the active experts take part; they come first, in expert order.
// row_idx: 0 gather (place of each choice, -1 outside), 1 scatter (choice in each place, the rest untouched).
OP(aclnnMoeInitRoutingV3, T, x, T, expert_idx, T, scale, T, offset, int64_t, active, int64_t, capacity,
   int64_t, experts, int64_t, drop_pad, int64_t, count_type, bool, count_flag, int64_t, quant_mode, IA, range,
   int64_t, row_idx_type, O, expanded, O, row_idx, O, counts, O, expanded_scale) {
  const int64_t first = range && (*range).size() == 2 ? (*range)[0] : 0;
  const int64_t last = range && (*range).size() == 2 ? (*range)[1] : experts;
  auto flat = expert_idx->reshape(-1).to(at::kLong);
  auto inside = flat.ge(first).logical_and(flat.lt(last));
  auto r =
      sorted_by_expert(at::where(inside, flat, at::full_like(flat, std::numeric_limits<int32_t>::max())));
  const int64_t available = inside.sum().item<int64_t>(), k = expert_idx->size(-1);
  auto order = r.order.slice(0, 0, available), token = order.floor_divide(k);
  auto rows = x->index_select(0, token);
  if (quant_mode == 1) {
    auto v = fp32(rows);
    if (scale) v = v * fp32(*scale).index_select(0, r.experts.slice(0, 0, available) - first);
    auto s = v.abs().amax(-1, true) / 127;
    expanded->slice(0, 0, available).copy_(quantize(v / s));
    expanded_scale->slice(0, 0, available).copy_(s.squeeze(-1));
  } else {
    expanded->slice(0, 0, available).copy_(rows);
    if (scale) expanded_scale->slice(0, 0, available).copy_(scale->index_select(0, token));
  }
  if (row_idx_type == 0) {
    put(row_idx, at::where(inside, r.place, at::full_like(r.place, -1)));
  } else {
    row_idx->slice(0, 0, available).copy_(order);
  }
  if (!count_flag) return;
  auto count = tokens_per_expert(r.experts.slice(0, 0, available) - first, last - first);
  if (count_type == 2) {  // pairs (expert, tokens) of the experts that have tokens, then zeros
    auto used = at::nonzero(count).squeeze(-1);
    counts->zero_();
    counts->slice(0, 0, used.numel()).copy_(at::stack({used + first, count.index_select(0, used)}, 1));
  } else {
    put(counts, count_type == 0 ? count.cumsum(0) : count);
  }
}

// out = x1 + x2 + sum over k of scale * (expandedX[row] + bias[expert]); rows are laid out by choice (dropPadMode
// 0, 1: row i + k * rows) or by token (2, 3: row i * K + k); a row of -1 (dropped) contributes nothing.
OP(aclnnMoeFinalizeRoutingV2, T, expanded, T, row_idx, T, x1, T, x2, T, bias, T, scales, T, expert_idx,
   int64_t, mode, O, out) {
  const int64_t rows = out->size(0), k = row_idx->numel() / std::max<int64_t>(rows, 1);
  auto index = mode < 2 ? row_idx->reshape({k, rows}).t() : row_idx->reshape({rows, k});
  auto dropped = index.lt(0).unsqueeze(-1);  // not read: whatever stands there does not count
  auto flat = fp32(*expanded).reshape({-1, out->size(-1)});
  auto part = flat.index_select(0, index.clamp_min(0).reshape(-1).to(at::kLong)).reshape({rows, k, -1});
  if (bias) {
    part = part + fp32(*bias).index_select(0, expert_idx->reshape(-1).to(at::kLong)).reshape({rows, k, -1});
  }
  if (scales) part = part * fp32(*scales).unsqueeze(-1);
  auto sum = part.masked_fill(dropped, 0).sum(1);
  if (x1) sum = sum + fp32(*x1);
  if (x2) sum = sum + fp32(*x2);
  put(out, sum);
}
