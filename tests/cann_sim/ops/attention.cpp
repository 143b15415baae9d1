// Attention arithmetic. Sources: the attention documents and kernels of ops-transformer (read at c29bc10).
#include "attention.h"

namespace sim {

using at::Tensor;

namespace {

// What the kernels put in place of a hidden score: exp of it is 0 beside any other score, and a row of nothing else
// becomes the mean of all values, which is what hardware gives where no row is repaired.
constexpr float kHidden = -1e12f;
constexpr int64_t kMaskSide = 2048;

/// The mask of modes 2, 3 and 4 is the strict upper triangle; three of its rows tell.
void check_fixed_mask(const Tensor& mask) {
  auto square = mask.reshape({kMaskSide, kMaskSide});
  auto column = at::arange(kMaskSide);
  for (int64_t row : {int64_t{0}, kMaskSide / 2 - 1, kMaskSide - 1}) {
    TORCH_CHECK(at::equal(square[row].to(at::kBool), column.gt(row)), "row ", row,
                " of the attention mask is not that of a 2048 x 2048 strict upper triangle (1 = hidden)");
  }
}

}  // namespace

Tensor hidden_of(int64_t sparse, const Tensor& mask, int64_t pre, int64_t next, int64_t q_len,
                 int64_t kv_len) {
  auto row = at::arange(q_len).unsqueeze(1), column = at::arange(kv_len).unsqueeze(0);
  if (sparse >= 2 && mask.defined()) check_fixed_mask(mask);
  switch (sparse) {
    case 0:
    case 1: {
      if (!mask.defined()) return Tensor();  // pre and next are without effect
      auto hidden = mask.to(at::kBool).slice(-2, 0, q_len).slice(-1, 0, kv_len);
      if (sparse == 1) return hidden;
      if (next < kv_len) hidden = hidden.logical_or(column > row + next);
      if (pre < q_len) hidden = hidden.logical_or(column < row - pre);
      return hidden;
    }
    case 2:
      return column > row;
    case 3:
      return column > row + (kv_len - q_len);
    case 4: {
      auto diagonal = row + (kv_len - q_len);
      return (column > diagonal + next).logical_or(column < diagonal - pre);
    }
    default:
      TORCH_CHECK(false, "sparseMode ", sparse, " is not simulated");
  }
}

Attended attend(const Attention& a) {
  auto batch = a.query.size(0), heads = a.query.size(1), q_len = a.query.size(2), kv_heads = a.key.size(1);
  auto kv_len = a.key.size(2), group = heads / kv_heads;
  // Query heads of one key head side by side: keys and values are never repeated.
  auto query = fp32(a.query).reshape({batch, kv_heads, group * q_len, -1});
  auto scores = at::matmul(query, fp32(a.key).transpose(-1, -2)).view({batch, heads, q_len, kv_len});
  if (a.bias.defined() && a.bias_is_scaled) scores = scores + fp32(a.bias);
  scores = scores * a.scale;
  if (a.bias.defined() && !a.bias_is_scaled) scores = scores + fp32(a.bias);
  if (a.hidden.defined()) {
    scores = a.hidden_adds != 0.0 ? scores + a.hidden * a.hidden_adds : scores.masked_fill(a.hidden, kHidden);
  }

  Attended r;
  r.maximum = at::amax(scores, {-1}, true);
  Tensor sinks;
  if (a.sinks.defined()) {
    sinks = fp32(a.sinks).view({1, heads, 1, 1});
    r.maximum = at::maximum(r.maximum, sinks);
  }
  auto parts = at::exp(scores - r.maximum);
  r.sum = at::sum(parts, {-1}, true);
  if (sinks.defined()) r.sum = r.sum + at::exp(sinks - r.maximum);
  r.probabilities = parts / r.sum;
  auto weights = a.drop.defined() ? parts * a.drop : parts;
  auto values =
      at::matmul(rounded(weights, a.query.scalar_type()).reshape({batch, kv_heads, group * q_len, kv_len}),
                 fp32(a.value));
  r.out = values.view({batch, heads, q_len, -1}) / r.sum;
  if (a.repair && a.hidden.defined()) {
    auto nothing = at::all(a.hidden, -1, true).expand({batch, heads, q_len, 1});
    r.out = r.out.masked_fill(nothing, 0.0);
    r.probabilities = r.probabilities.masked_fill(nothing, 0.0);
    r.sum = r.sum.masked_fill(nothing, std::numeric_limits<float>::infinity());  // marks an invalid row
  }
  return r;
}

Tensor to_bnsd(const Tensor& x, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  auto split = [&] { return x.reshape({x.size(0), x.size(1), heads, x.size(2) / heads}); };
  if (layout == "BSH") return split().transpose(1, 2);
  if (layout == "SBH") return split().permute({1, 2, 0, 3});
  TORCH_CHECK(false, "layout ", layout, " is not simulated");
}

Tensor from_bnsd(const Tensor& x, const std::string& layout) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "NBSD") return x.transpose(0, 1);
  if (layout == "BSH") return x.transpose(1, 2).flatten(2);
  if (layout == "SBH") return x.permute({2, 0, 1, 3}).flatten(2);
  TORCH_CHECK(false, "layout ", layout, " is not simulated");
}

}  // namespace sim
