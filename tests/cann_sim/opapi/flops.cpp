// FLOPs of matrix products and attention, and the shape of an attention.
#include <cstring>
#include <map>

#include "cost.h"

namespace sim {
namespace {

using Arguments = std::vector<Argument>;

const at::Tensor& tensor(const Arguments& a, size_t k) { return a.at(k).tensors.at(0)->i->t; }
bool given(const Arguments& a, size_t k) { return k < a.size() && a[k].given && !a[k].tensors.empty(); }

size_t first_of_kind(const Arguments& a, const char* kind) {
  for (size_t k = 0; k < a.size(); k++) {
    if (!strcmp(a[k].kind, kind)) return k;
  }
  return a.size();
}

/// Where an inference attention has its arguments: in the same order in every version.
struct Places {
  size_t heads, layout, kv_heads, sparse, pre, block_size, table, query_lengths, key_lengths;
};
constexpr size_t kNowhere = 1000;

bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

bool is_incremental(const std::string& name) { return starts(name, "aclnnIncreFlashAttention"); }

bool is_inference(const std::string& name) {
  return starts(name, "aclnnFusedInferAttentionScore") || starts(name, "aclnnPromptFlashAttention") ||
         is_incremental(name);
}

Places places_of(const std::string& name, const Arguments& a) {
  size_t h = first_of_kind(a, "int64");
  if (is_incremental(name)) return {h, h + 2, h + 3, kNowhere, kNowhere, h + 4, 13, kNowhere, 5};
  return {h, h + 4, h + 5, h + 6, h + 2, h + 8, 14, 5, 6};
}

int64_t integer(const Arguments& a, size_t k, int64_t otherwise) {
  return k < a.size() && !a[k].integers.empty() ? a[k].integers[0] : otherwise;
}

/// "BNSD_BSND" is the layout of the input and of the output.
std::string input_layout(const Arguments& a, size_t k) { return a.at(k).text.substr(0, a[k].text.find('_')); }

struct Sizes {
  int64_t batch, queries, keys, dim, value_dim;
};

Sizes sizes_of(const Arguments& a, const std::string& layout, int64_t heads, int64_t kv_heads) {
  const auto &q = tensor(a, 0), &k = tensor(a, 1), &v = tensor(a, 2);
  if (layout == "BNSD") return {q.size(0), q.size(2), k.size(-2), q.size(3), v.size(-1)};
  if (layout == "BSND") return {q.size(0), q.size(1), k.size(1), q.size(3), v.size(-1)};
  if (layout == "BSH") return {q.size(0), q.size(1), k.size(1), q.size(2) / heads, v.size(-1) / kv_heads};
  if (layout == "SBH") return {q.size(1), q.size(0), k.size(0), q.size(2) / heads, v.size(-1) / kv_heads};
  return {0, q.size(0), k.size(0), q.size(-1), v.size(-1)};  // TND
}

/// The lengths of the sequences: given as they are, or as running totals.
std::vector<int64_t> lengths_of(const Arguments& a, size_t k, int64_t batch, int64_t otherwise, bool totals) {
  std::vector<int64_t> lengths = k < a.size() && a[k].given ? a[k].integers : std::vector<int64_t>();
  if (lengths.empty()) return std::vector<int64_t>(batch, otherwise);
  if (totals) {
    for (size_t i = lengths.size(); i-- > 1;) lengths[i] -= lengths[i - 1];
  }
  if (lengths.size() == 1 && !totals) lengths.assign(batch, lengths[0]);
  return lengths;
}

AttentionShape inference_shape(const std::string& name, const Arguments& a) {
  auto p = places_of(name, a);
  AttentionShape shape;
  shape.heads = integer(a, p.heads, 1);
  int64_t kv_heads = integer(a, p.kv_heads, 0);
  shape.sparse = integer(a, p.sparse, 0);
  shape.pre = integer(a, p.pre, INT32_MAX);
  shape.next = integer(a, p.pre + 1, INT32_MAX);
  auto layout = input_layout(a, p.layout);
  bool packed = layout == "TND", paged = given(a, p.table);
  auto sizes = sizes_of(a, layout, shape.heads, kv_heads ? kv_heads : shape.heads);
  int64_t dim = layout == "BSH" ? tensor(a, 0).size(2) / shape.heads : tensor(a, 0).size(-1);
  shape.dims = static_cast<double>(dim) + (paged || packed ? dim : sizes.value_dim);
  int64_t batch = packed ? a[p.query_lengths].integers.size() : sizes.batch;
  auto queries = lengths_of(a, p.query_lengths, batch, sizes.queries, packed);
  auto keys = lengths_of(a, p.key_lengths, batch, paged ? 0 : sizes.keys, packed && !paged);
  for (int64_t b = 0; b < batch; b++) {
    // Without a packed layout a single query ignores the mode, and so the window.
    bool window = shape.sparse == 4 && (packed || queries[b] > 1);
    int64_t first = window ? std::max<int64_t>(0, keys[b] - queries[b] - shape.pre) : 0;
    shape.sequences.push_back({queries[b], keys[b], first});
  }
  return shape;
}

AttentionShape training_shape(const std::string& name, const Arguments& a) {
  AttentionShape shape;
  if (name.find("VarLen") != std::string::npos) return shape;
  bool gradient = name.find("Grad") != std::string::npos;
  size_t layout = first_of_kind(a, "string"), h = first_of_kind(a, "int64");
  shape.pre = integer(a, h, INT32_MAX);
  shape.next = integer(a, h + 1, INT32_MAX);
  shape.heads = integer(a, h + 2, 1);
  shape.sparse = integer(a, layout + 2, 0);
  auto text = a.at(layout).text;
  int64_t kv_heads = shape.heads;
  if (text == "BSH" || text == "SBH") kv_heads = tensor(a, 1).size(2) / (tensor(a, 0).size(2) / shape.heads);
  auto sizes = sizes_of(a, text, shape.heads, kv_heads);
  shape.dims = static_cast<double>(sizes.dim + sizes.value_dim) * (gradient ? 2.5 : 1);
  shape.sequences.assign(sizes.batch, {sizes.queries, sizes.keys, 0});
  return shape;
}

/// Pairs of a query and a key that the mode lets see each other.
double visible_pairs(const AttentionShape& shape, const Sequence& s) {
  double pairs = 0;
  for (int64_t i = 0; i < s.queries; i++) {
    int64_t low = 0, high = s.keys;  // [low, high)
    int64_t at = shape.sparse == 2 ? i : i + s.keys - s.queries;
    if (shape.sparse == 2 || (shape.sparse == 3 && s.queries > 0)) high = std::min(s.keys, at + 1);
    if (shape.sparse == 4 && s.first_key > 0) low = std::max<int64_t>(0, at - shape.pre);
    if (shape.sparse == 4) high = std::min<int64_t>(s.keys, at + shape.next + 1);
    pairs += static_cast<double>(std::max<int64_t>(0, high - low));
  }
  return pairs;
}

/// The first operand of a matrix product, and the argument that says whether it is transposed (none: -1).
struct Product {
  size_t left, out;
  int transposed;
};
const std::map<std::string, Product>& products() {
  static const std::map<std::string, Product> all = {
      {"aclnnMm", {0, 2, -1}},
      {"aclnnMatmul", {0, 2, -1}},
      {"aclnnMatmulWeightNz", {0, 2, -1}},
      {"aclnnBatchMatMul", {0, 2, -1}},
      {"aclnnMv", {0, 2, -1}},
      {"aclnnDot", {0, 2, -1}},
      {"aclnnAddmm", {1, 5, -1}},
      {"aclnnAddmmWeightNz", {1, 5, -1}},
      {"aclnnBaddbmm", {1, 5, -1}},
      {"aclnnInplaceAddmm", {1, 0, -1}},
      {"aclnnWeightQuantBatchMatmulV2", {0, 8, -1}},
      {"aclnnWeightQuantBatchMatmulV3", {0, 9, -1}},
      {"aclnnQuantMatmulV4", {0, 8, 6}},
      {"aclnnQuantMatmulV5", {0, 12, 9}},
      {"aclnnMatmulAllReduce", {0, 7, -1}},
      {"aclnnGroupedMatmulV4", {0, 16, -1}},
  };
  return all;
}

}  // namespace

AttentionShape attention_shape(const std::string& name, const Arguments& a) {
  if (is_inference(name)) return inference_shape(name, a);
  if (starts(name, "aclnnFlashAttentionScore")) return training_shape(name, a);
  return {};
}

std::vector<at::Tensor> attention_rows(const std::string& name, const Arguments& a, size_t which) {
  const auto& tensors = a.at(which).tensors;
  if (!is_inference(name)) return {tensors.at(0)->i->t};
  auto p = places_of(name, a);
  auto shape = inference_shape(name, a);
  auto layout = input_layout(a, p.layout);
  std::vector<at::Tensor> rows;
  int64_t packed_start = 0;
  for (size_t b = 0; b < shape.sequences.size(); b++) {
    int64_t first = shape.sequences[b].first_key, end = shape.sequences[b].keys;
    if (given(a, p.table)) {
      int64_t block = integer(a, p.block_size, 1);
      const auto& cache = tensors.at(0)->i->t;
      int64_t axis = cache.dim() == 3 ? 0 : cache.dim() == 4 ? 1 : 2;  // of the rows, in a block
      auto table = tensor(a, p.table).select(0, static_cast<int64_t>(b)).to(at::kLong);
      for (int64_t k = first / block; k * block < end; k++) {
        auto one = cache.select(0, table[k].item<int64_t>());
        rows.push_back(
            one.slice(axis, std::max<int64_t>(0, first - k * block), std::min(block, end - k * block)));
      }
    } else if (layout == "TND") {
      rows.push_back(tensors.at(0)->i->t.slice(0, packed_start + first, packed_start + end));
      packed_start += end;
    } else {
      const auto& one =
          tensors.size() > 1 ? tensors.at(b)->i->t[0] : tensors.at(0)->i->t[static_cast<int64_t>(b)];
      rows.push_back(one.slice(layout == "BNSD" ? 1 : 0, first, end));
    }
  }
  return rows;
}

uint64_t flops_of(const std::string& name, const Arguments& a) {
  auto attention = attention_shape(name, a);
  if (attention.heads) {
    double pairs = 0;
    for (const auto& s : attention.sequences) pairs += visible_pairs(attention, s);
    return static_cast<uint64_t>(2 * pairs * attention.dims * static_cast<double>(attention.heads));
  }
  auto found = products().find(name);
  if (found != products().end()) {
    const auto& p = found->second;
    bool transposed = p.transposed >= 0 && a[p.transposed].integers.at(0) != 0;
    uint64_t flops = 0;
    const auto &lefts = a[p.left].tensors, &outs = a[p.out].tensors;
    for (size_t k = 0; k < outs.size(); k++) {
      if (!outs[k] || !outs[k]->i->t.defined()) continue;
      const auto& left = lefts.at(std::min(k, lefts.size() - 1))->i->t;
      flops += 2 * outs[k]->i->t.numel() * left.size(transposed ? -2 : -1);
    }
    return flops;
  }
  if (name == "aclnnConvolution") {
    const auto& w = tensor(a, 1);
    return 2 * tensor(a, 9).numel() * (w.numel() / w.size(0));
  }
  return 0;
}

}  // namespace sim
