// Matrix products of groups of rows (experts), quantized or not.
// Formulas: CANN operator documentation (ops-transformer, gmm/*/docs/*.md).
#include "quantize.h"

using namespace sim;
using at::Tensor;

// ---- groups ----------------------------------------------------------------------------------------------------
// Rows of each group, in order: list type 0 cumulative ends, 1 sizes, 2 pairs (group, size).
struct Group {
  int64_t index, start, end;
};
static std::vector<Group> groups_of(const Tensor& list, int64_t type) {
  std::vector<Group> groups;
  int64_t start = 0;
  for (int64_t i = 0; i < list.size(0); i++) {
    const int64_t index = type == 2 ? list[i][0].item<int64_t>() : i;
    const int64_t value = type == 2 ? list[i][1].item<int64_t>() : list[i].item<int64_t>();
    const int64_t end = type == 0 ? value : start + value;
    groups.push_back({index, start, end});
    start = end;
  }
  return groups;
}
static Tensor activated(const Tensor& y, int64_t type) {
  switch (type) {
    case 1:
      return at::relu(y);
    case 2:
      return at::gelu(y, "tanh");
    case 3:
      return at::gelu(y);
    case 4:
      return y * at::sigmoid(1.702 * y);
    case 5:
      return at::silu(y);
    default:
      return y;
  }
}

// ---- one group ---------------------------------------------------------------------------------------------------
struct Expert {
  Tensor weight, bias, scale, offset, antiquant_scale, antiquant_offset;
};
static Tensor as_rows(const Tensor& scale, int64_t k) {  // (N) or (G, N) -> broadcastable to (K, N)
  return scale.dim() == 2 && scale.size(0) > 1 ? fp32(scale).repeat_interleave(k / scale.size(0), 0)
                                               : fp32(scale);
}
static Tensor float_scale(const Tensor& scale) {
  return hardware_scale(scale) ? decode_scale(scale).first : fp32(scale);
}

static Tensor product(const Tensor& x, const Expert& e, const Tensor& token_scale, at::ScalarType out) {
  const bool x4 = x.scalar_type() == at::kInt, x8 = x.scalar_type() == at::kChar;
  auto w = integers(e.weight);
  if (!x4 && !x8) {  // 16-bit or float32 activations
    if (e.antiquant_scale.defined()) {
      auto dense = w.to(at::kFloat);
      if (e.antiquant_offset.defined()) dense = dense + as_rows(e.antiquant_offset, w.size(0));
      w = (dense * as_rows(e.antiquant_scale, w.size(0))).to(x.scalar_type());
    }
    auto y = at::matmul(fp32(x), fp32(w));
    return e.bias.defined() ? y + fp32(e.bias) : y;
  }
  auto tokens = token_scale.defined() ? fp32(token_scale).unsqueeze(-1) : Tensor();
  if (x8 && e.weight.scalar_type() == at::kInt) {
    // The cube unit multiplies (x - 8); the bias 8 * sum of weight * scale over k makes up for it.
    auto y = at::matmul(x.to(at::kFloat) - 8, w.to(at::kFloat) * as_rows(float_scale(e.scale), w.size(0)));
    if (e.offset.defined()) y = y + x.to(at::kFloat).sum(-1, true) * fp32(e.offset);
    return (y + fp32(e.bias)) * tokens;
  }
  if (x4) {
    auto y =
        at::matmul(integers(x).to(at::kFloat), w.to(at::kFloat) * as_rows(float_scale(e.scale), w.size(0)));
    return tokens.defined() ? y * tokens : y;
  }
  auto accumulator = integer_product(x, w);
  const bool integer_bias = e.bias.defined() && e.bias.scalar_type() == at::kInt;
  if (integer_bias) accumulator = accumulator + e.bias.to(at::kDouble);
  if (out == at::kInt) return accumulator;
  auto y = accumulator.to(at::kFloat) * float_scale(e.scale);
  if (tokens.defined()) y = y * tokens;
  if (e.bias.defined() && !integer_bias) y = y + fp32(e.bias);
  if (out != at::kChar) return y;
  return quantize(hardware_scale(e.scale) ? y + decode_scale(e.scale).second : y);
}

// ---- the operator ------------------------------------------------------------------------------------------------
struct GroupedMatmul {
  TensorListHandle x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, token_scale;
  T list;
  int64_t type, list_type, activation;
};
static Tensor element(const TensorListHandle& list, int64_t i) {
  return list && list.size() ? list.at(i) : Tensor();
}
// The i-th expert's operands: slice i of a stacked tensor, or the i-th of the list.
static Expert expert(const GroupedMatmul& m, int64_t i) {
  const bool stacked = m.weight.size() == 1 && m.type != -1 && values_of(m.weight, 0).dim() == 3;
  auto pick = [&](const TensorListHandle& list) {
    auto t = element(list, stacked ? 0 : i);
    return t.defined() && stacked ? t[i] : t;
  };
  auto weight = values_of(m.weight, stacked ? 0 : i);
  return {stacked ? weight[i] : weight, pick(m.bias), pick(m.scale), pick(m.offset), pick(m.antiquant_scale),
          pick(m.antiquant_offset)};
}

static void grouped_matmul(const GroupedMatmul& m, const TensorListHandle& out) {
  auto store = [&](Tensor y, const Tensor& value) { y.copy_(activated(value, m.activation)); };
  const auto dtype = out.at(0).scalar_type();
  if (!m.list) {  // one product for each tensor of the list
    int64_t row = 0;
    for (size_t i = 0; i < m.weight.size(); i++) {
      auto x = m.x.at(m.x.size() == 1 ? 0 : i);
      auto y = out.size() == 1 ? out.at(0).slice(0, row, row + x.size(0)) : out.at(i);
      store(y, product(x, expert(m, i), {}, dtype));
      row += x.size(0);
    }
    return;
  }
  for (auto g : groups_of(*m.list, m.list_type)) {
    if (m.type == 2) {  // groups of k: one product for each group, an empty one gives zeros
      auto x = m.x.at(0).slice(1, g.start, g.end), w = values_of(m.weight, 0).slice(0, g.start, g.end);
      store(out.at(0)[g.index], at::matmul(fp32(x), fp32(w)));
      continue;
    }
    if (g.start == g.end) continue;
    auto x = m.x.size() == 1 ? m.x.at(0).slice(0, g.start, g.end) : m.x.at(g.index);
    auto tokens = element(m.token_scale, 0);
    if (tokens.defined()) tokens = tokens.slice(0, g.start, g.end);
    store(out.at(0).slice(0, g.start, g.end), product(x, expert(m, g.index), tokens, dtype));
  }
}

OP(aclnnGroupedMatmulV4, TL, x, TL, weight, TL, bias, TL, scale, TL, offset, TL, aq_scale, TL, aq_offset, TL,
   token_scale, T, list, TL, act_in, TL, act_scale, TL, act_offset, int64_t, split, int64_t, type, int64_t,
   list_type, int64_t, activation, OL, out, OL, act_out, OL, scale_out) {
  grouped_matmul(
      {x, weight, bias, scale, offset, aq_scale, aq_offset, token_scale, list, type, list_type, activation},
      out);
}
