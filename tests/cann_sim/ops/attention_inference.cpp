// Attention for inference: FusedInferAttentionScore V2 to V5.
// Ragged lengths, paged caches, packed layouts; each sequence is computed by itself.
#include "attention.h"

using namespace sim;

using at::Tensor;

namespace {

int64_t entry(IA lengths, int64_t b) {
  auto all = *lengths;
  return all[all.size() == 1 ? 0 : static_cast<size_t>(b)];
}

/// [begin, end) of sequence `b` when lengths are sums over the sequences up to it.
std::pair<int64_t, int64_t> span(IA sums, int64_t b) {
  auto all = *sums;
  auto k = static_cast<size_t>(b);
  return {k ? all[k - 1] : 0, all[k]};
}

/// [B, N, S, D], or [N, T, D] of a packed layout: a view, so what is written to it is written to the tensor.
Tensor heads_first(const Tensor& x, const std::string& layout, int64_t heads) {
  if (layout == "NTD") return x;
  if (layout == "TND" || layout == "NBSD") return x.transpose(0, 1);
  return to_bnsd(x, layout, heads);
}

/// Length of the keys of sequence `b`.
int64_t kv_length(const Inference& a, int64_t b) {
  bool given = a.kv_lengths && !(*a.kv_lengths).empty();
  if (a.packed() && !a.table) {
    auto part = span(a.kv_lengths, b);
    return part.second - part.first;
  }
  if (given) return entry(a.kv_lengths, b);
  TORCH_CHECK(!a.table, "a paged cache needs actualSeqLengthsKv");
  return a.key.size() > 1 ? a.key.at(static_cast<size_t>(b)).size(a.in_layout() == "BNSD" ? 2 : 1)
                          : a.kv_len();
}

/// Keys or values of sequence `b` out of the blocks of a cache, [1, N, length, D]. Caches: [blocks, size, N * D],
/// [blocks, N, size, D] or FRACTAL_NZ [blocks, N, D / 16, size, 16].
Tensor from_blocks(const Inference& a, const Tensor& cache, int64_t b, int64_t length) {
  auto count = (length + a.block_size - 1) / a.block_size;
  TORCH_CHECK(count <= a.table->size(1), "sequence ", b, " of ", length, " tokens needs ", count,
              " blocks, its row of the block table has ", a.table->size(1));
  auto ids = (*a.table)[b].slice(0, 0, count).to(at::kLong);
  TORCH_CHECK(!count || (ids.min().item<int64_t>() >= 0 && ids.max().item<int64_t>() < cache.size(0)),
              "sequence ", b, ": a block id is not in the cache of ", cache.size(0),
              " blocks (hardware does not check and reads elsewhere)");
  auto blocks = cache.index_select(0, ids);
  auto heads = a.kv_head_count();
  if (blocks.dim() == 3) {
    blocks = blocks.reshape({count * a.block_size, heads, blocks.size(2) / heads}).transpose(0, 1);
  } else if (blocks.dim() == 4) {
    blocks = blocks.transpose(0, 1).reshape({heads, count * a.block_size, -1});
  } else {
    blocks = blocks.permute({1, 0, 3, 2, 4}).reshape({heads, count * a.block_size, -1});
  }
  return blocks.narrow(1, 0, length).unsqueeze(0);
}

/// Right-aligned sequences ("left padding"): where the valid part of an axis begins.
int64_t begin_of(T padding, bool lengths_given, int64_t axis, int64_t length) {
  if (!padding || !lengths_given) return 0;
  return axis - std::max<int64_t>((*padding).flatten()[0].item<int64_t>(), 0) - length;
}

/// Keys or values of sequence `b`, [1, N, length, D].
Tensor keys_of(const Inference& a, const Tensor& x, int64_t b) {
  auto length = kv_length(a, b);
  if (a.table) return from_blocks(a, x, b, length);
  auto all = heads_first(x, a.in_layout(), a.kv_head_count());
  if (a.packed()) return all.narrow(1, span(a.kv_lengths, b).first, length).unsqueeze(0);
  auto one = all.slice(0, a.key.size() > 1 ? 0 : b).slice(0, 0, 1);  // a list has a tensor for each sequence
  return one.narrow(2, begin_of(a.kv_padding, bool(a.kv_lengths), one.size(2), length), length);
}

/// Those keys or values dequantized where they are integers, and rounded to the dtype of the query: what is
/// documented of the arithmetic is no more than that they are.
Tensor values_of(const Inference& a, const Tensor& x, T scale, int64_t b) {
  auto rows = keys_of(a, x, b);
  if (!scale) return rows;
  const int64_t axis = a.in_layout() == "BNSD" ? 2 : 1;
  auto length = kv_length(a, b), begin = begin_of(a.kv_padding, bool(a.kv_lengths), x.size(axis), length);
  auto factors =
      (*scale).reshape({a.batch(), -1, x.size(axis), 1}).slice(0, b, b + 1).narrow(2, begin, length);
  return rounded(fp32(rows) * factors, a.query->scalar_type());
}

/// Rows of sequence `b`: where they begin on the axis of tokens, and how many there are.
std::pair<int64_t, int64_t> rows_of(const Inference& a, int64_t b) {
  if (a.packed()) {
    auto part = span(a.q_lengths, b);
    return {part.first, part.second - part.first};
  }
  bool given = a.q_lengths && !(*a.q_lengths).empty() && !a.one_row();
  auto rows = given ? entry(a.q_lengths, b) : a.q_len();
  return {a.one_row() ? 0 : begin_of(a.q_padding, given, a.q_len(), rows), rows};
}

/// Those rows of a tensor of heads_first, [1, N, rows, D].
Tensor pick(const Inference& a, const Tensor& x, int64_t b) {
  auto [begin, rows] = rows_of(a, b);
  return (a.packed() ? x.unsqueeze(0) : x.slice(0, b, b + 1)).narrow(2, begin, rows);
}

/// The part of the mask for sequence `b`, [1, 1, rows, columns] or undefined.
Tensor mask_of(const Inference& a, int64_t b, int64_t sparse) {
  Tensor mask = a.mask.orundef();
  if (!mask.defined() || sparse >= 2) return mask;
  if (a.one_row() && mask.dim() == 2) mask = mask.unsqueeze(1);  // (B, KV_S)
  if (mask.dim() == 2) return mask.unsqueeze(0).unsqueeze(0);
  if (mask.dim() == 3) mask = mask.unsqueeze(1);
  return mask.size(0) > 1 ? mask.slice(0, b, b + 1) : mask;
}

Attention problem(const Inference& a, int64_t b) {
  auto in = a.in_layout();
  auto which = static_cast<size_t>(a.key.size() > 1 ? b : 0);
  // One query row ignores sparseMode, preTokens and nextTokens: only a mask hides.
  auto sparse = a.one_row() ? 1 : a.sparse;
  Attention one;
  one.query = pick(a, heads_first(*a.query, in, a.heads), b);
  one.key = values_of(a, a.key.at(which), a.key_scale, b);
  one.value = values_of(a, a.value.at(which), a.value_scale, b);
  if (a.q_rope) {  // multi-head latent attention: the rotated part of the head comes apart
    one.query = at::cat({one.query, pick(a, heads_first(*a.q_rope, in, a.heads), b)}, -1);
    one.key = at::cat({one.key, keys_of(a, *a.k_rope, b)}, -1);
  }
  auto rows = one.query.size(2), columns = one.key.size(2);
  one.hidden = hidden_of(sparse, mask_of(a, b, sparse), a.pre, a.next, rows, columns);
  if (a.bias) {
    one.bias = a.bias->size(0) > 1 ? a.bias->slice(0, b, b + 1) : *a.bias;
    one.bias = one.bias.slice(2, 0, rows).slice(3, 0, columns);
  }
  one.scale = a.scale;
  one.hidden_adds = a.hidden_adds;
  one.sinks = a.sinks.orundef();
  // Bit 1 of innerPrecise asks for it; modes 2 to 4 tell by themselves where a row attends to nothing.
  one.repair = (a.inner_precise & 2) || sparse >= 2;
  return one;
}

}  // namespace

void sim::infer(const Inference& a) {
  // Rows past the length of their sequence: zeros, and infinity in place of a log-sum-exp.
  a.out->zero_();
  if (a.lse) a.lse->fill_(a.want_lse ? std::numeric_limits<float>::infinity() : 0.0);
  auto out = heads_first(*a.out, a.out_layout(), a.heads);
  for (int64_t b = 0; b < a.batch(); b++) {
    if (!rows_of(a, b).second || !kv_length(a, b)) continue;
    auto r = attend(problem(a, b));
    pick(a, out, b).copy_(r.out);
    if (a.want_lse)
      pick(a, a.packed() ? a.lse->transpose(0, 1) : *a.lse, b).copy_(r.maximum + at::log(r.sum));
  }
}

OP(aclnnFusedInferAttentionScoreV2, FIA_ARGUMENTS_V2) {
  FIA_COLLECT_V2();
  infer(a);
}
OP(aclnnFusedInferAttentionScoreV3, FIA_ARGUMENTS_V3) {
  FIA_COLLECT_V3();
  infer(a);
}
OP(aclnnFusedInferAttentionScoreV4, FIA_ARGUMENTS_V4) {
  FIA_COLLECT_V4();
  infer(a);
}
OP(aclnnFusedInferAttentionScoreV5, FIA_ARGUMENTS_V5) {
  FIA_COLLECT_V4();
  infer(a);
}
