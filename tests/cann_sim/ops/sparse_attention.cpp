// Attention over chosen blocks of keys.
// Formula: CANN operator documentation (ops-transformer, attention/rain_fusion_attention/docs).
#include "common.h"

using namespace sim;
using at::Tensor;

// The sequences of a packed (T, N, D) or padded (B, N, S, D) tensor, each as (N, S, D) in float32.
static std::vector<Tensor> sequences(const Tensor& x, const std::string& layout, const IA& lengths) {
  std::vector<Tensor> out;
  if (layout == "BNSD") {
    for (int64_t b = 0; b < x.size(0); b++) {
      out.push_back(fp32(x[b].slice(1, 0, lengths ? (*lengths)[b] : x.size(2))));
    }
    return out;
  }
  int64_t start = 0;
  for (int64_t length : *lengths) {
    out.push_back(fp32(x.slice(0, start, start + length)).transpose(0, 1));
    start += length;
  }
  return out;
}

// selectIdx (query blocks of all sequences, N, key blocks): the key blocks each query block of a head attends to,
// the first selectNumIdx of them valid. A block that chooses none gives zeros.
OP(aclnnRainFusionAttention, T, query, T, key, T, value, T, select, T, select_count, IA, block_shape, T, mask,
   IA, lengths, IA, kv_lengths, T, block_table, CP, q_layout, CP, kv_layout, int64_t, kv_heads, int64_t,
   mask_type, double, scale, int64_t, inner_precise, int64_t, block_size, O, out, O, lse) {
  const int64_t bx = (*block_shape)[0], by = (*block_shape)[1];
  auto qs = sequences(*query, q_layout, lengths), ks = sequences(*key, kv_layout, kv_lengths),
       vs = sequences(*value, kv_layout, kv_lengths);
  const bool packed = std::string(q_layout) == "TND";
  int64_t block = 0, row = 0;
  for (size_t b = 0; b < qs.size(); b++) {
    const int64_t heads = qs[b].size(0), length = qs[b].size(1);
    for (int64_t at = 0; at < length; at += bx, block++) {
      const int64_t end = std::min(at + bx, length);
      for (int64_t h = 0; h < heads; h++) {
        std::vector<Tensor> keys, values;
        for (int64_t j = 0; j < (*select_count)[block][h].item<int64_t>(); j++) {
          const int64_t chosen = (*select)[block][h][j].item<int64_t>();
          const int64_t group = heads / kv_heads;
          keys.push_back(ks[b][h / group].slice(0, chosen * by, (chosen + 1) * by));
          values.push_back(vs[b][h / group].slice(0, chosen * by, (chosen + 1) * by));
        }
        auto o = packed ? out->slice(0, row + at, row + end).select(1, h) : (*out)[b][h].slice(0, at, end);
        if (keys.empty()) {
          o.zero_();
          continue;
        }
        auto scores = at::matmul(qs[b][h].slice(0, at, end), at::cat(keys).t()) * scale;
        o.copy_(at::matmul(at::softmax(scores, -1), at::cat(values)));
        if (!lse || lse->numel() == 0) continue;
        auto sums = at::logsumexp(scores, {-1});
        auto l = packed ? lse->reshape({-1, heads}).slice(0, row + at, row + end).select(1, h)
                        : (*lse)[b][h].reshape(-1).slice(0, at, end);
        l.copy_(sums);
      }
    }
    row += length;
  }
}
