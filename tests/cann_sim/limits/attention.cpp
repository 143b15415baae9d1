// What hardware rejects of inference attention: documents of ops-transformer, attention/<name>/docs, and
// incre_flash_attention_tiling_check.cpp for the mask of one query row.
#include "../ops/attention.h"
#include "checks.h"

using namespace sim;

namespace {

constexpr int64_t kMaskSide = 2048;

bool one_of(const std::string& x, std::initializer_list<const char*> all) {
  for (auto* name : all) {
    if (x == name) return true;
  }
  return false;
}

int64_t longest(const Inference& a, IA lengths, bool cumulative) {
  int64_t most = 0, before = 0;
  auto all = *lengths;
  for (size_t b = 0; b < all.size() && (cumulative || static_cast<int64_t>(b) < a.batch()); b++) {
    most = std::max(most, all[b] - (cumulative ? before : 0));
    before = all[b];
  }
  return most;
}

/// Rows of the longest query; packed layouts have no axis that tells.
int64_t rows_of(const Inference& a) { return a.packed() ? longest(a, a.q_lengths, true) : a.q_len(); }

void check_given(const Inference& a) {
  require_all_given({{a.query, "query"}, {a.out, "attentionOut"}});
  if (!a.key || !a.value || !a.key.size() || !a.value.size())
    throw NullError("key or value is null or an empty list");
  for (auto* list : {&a.key, &a.value}) {
    for (auto* t : list->p->v) {
      if (!t) throw NullError("a tensor in key or value is null");
    }
  }
  for (auto& x : a.quantisation) require(!x, "quantised attention is not simulated");
  require(!a.key_prefix, "shared prefixes are not simulated");
}

void check_dtypes(const Inference& a, bool fp16_only) {
  if (fp16_only) {
    require_dtype(a.query, "query", {at::kHalf});
  } else {
    require_dtype(a.query, "query", {at::kHalf, at::kBFloat16});
  }
  T key{{a.key.p->v[0]}}, value{{a.value.p->v[0]}};
  require_same_dtype(key, "key", a.query, "query");
  require_same_dtype(value, "value", a.query, "query");
  require_same_dtype(a.out, "attentionOut", a.query, "query");
  require_same_dtype(a.bias, "pseShift", a.query, "query");
  require_same_dtype(a.q_rope, "queryRope", a.query, "query");
  require_same_dtype(a.k_rope, "keyRope", a.query, "query");
  require_dtype(a.mask, "attenMask", fp16_only ? Dtypes{at::kBool} : Dtypes{at::kBool, at::kChar, at::kByte});
  require_dtype(a.sinks, "learnableSink", {at::kHalf, at::kBFloat16});
  require_dtype(a.table, "blockTable", {at::kInt});
}

void check_contiguous(const Inference& a) {
  for (auto& [tensor, name] : Tensors{{a.query, "query"},
                                      {a.out, "attentionOut"},
                                      {a.bias, "pseShift"},
                                      {a.mask, "attenMask"},
                                      {a.table, "blockTable"},
                                      {a.q_rope, "queryRope"},
                                      {a.k_rope, "keyRope"},
                                      {a.sinks, "learnableSink"}}) {
    require_contiguous(tensor, name);
  }
  for (auto* t : a.key.p->v) require_contiguous(T{{t}}, "key");
  for (auto* t : a.value.p->v) require_contiguous(T{{t}}, "value");
}

void check_heads(const Inference& a) {
  auto in = a.in_layout();
  int64_t axes = in == "BSH" || a.packed() ? 3 : 4;
  require_axes(a.query, "query", axes, axes);
  require(a.heads >= 1 && a.heads <= 256, "numHeads is ", a.heads, ", it must be 1 to 256");
  auto kv = a.kv_head_count();
  require(kv >= 1 && a.heads % kv == 0, "numHeads ", a.heads, " is no multiple of numKeyValueHeads ", kv);
  require(a.heads / kv <= 64, "numHeads / numKeyValueHeads is ", a.heads / kv, ", at most 64 are supported");
  if (in == "BSH") {
    require(a.query->size(2) % a.heads == 0, "H ", a.query->size(2), " is no multiple of numHeads ", a.heads);
  } else {
    auto axis = in == "BNSD" ? 1 : in == "BSND" ? 2 : in == "TND" ? 1 : 0;
    require(a.query->size(axis) == a.heads, "query has ", a.query->size(axis), " heads, numHeads is ",
            a.heads);
  }
  auto d = a.head_size();
  require(d % 16 == 0 && d <= 512, "D is ", d, ", it must be a multiple of 16 and at most 512");
  require(a.batch() <= 65536, "B is ", a.batch(), ", at most 65536 are supported");
}

/// Keys and values that are not in blocks.
void check_keys(const Inference& a) {
  auto in = a.in_layout();
  bool list = a.key.size() > 1;
  require(a.key.size() == a.value.size(), "key and value are lists of ", a.key.size(), " and ",
          a.value.size());
  if (list) {
    require(!a.packed(), "packed layouts take no lists of keys");
    require(static_cast<int64_t>(a.key.size()) == a.batch() && a.batch() <= 256, "key is a list of ",
            a.key.size(), " tensors with B ", a.batch(), ": one for each sequence, at most 256");
  }
  auto kv = a.kv_head_count();
  for (size_t k = 0; k < a.key.size(); k++) {
    auto key = a.key.at(k).sizes(), value = a.value.at(k).sizes();
    require(key.size() == a.query->sizes().size() && value.size() == key.size(),
            "key or value has not the axes of layout ", in);
    require(key.slice(0, key.size() - 1) == value.slice(0, value.size() - 1), "key has shape ", key,
            ", value ", value);
    if (!a.packed()) {
      require(key[0] == (list ? 1 : a.batch()), "key has batch ", key[0], ", it must be ",
              list ? 1 : a.batch());
    }
    if (in == "BSH") {
      require(key[2] == kv * a.head_size(), "key has H ", key[2],
              ", it must be numKeyValueHeads * D = ", kv * a.head_size());
      continue;
    }
    auto axis = in == "BNSD" ? 1u : in == "BSND" ? 2u : in == "TND" ? 1u : 0u;
    require(key[axis] == kv, "key has ", key[axis], " heads, numKeyValueHeads is ", kv);
    require(key.back() == a.head_size(), "key has D ", key.back(), ", query ", a.head_size());
  }
}

/// A list of lengths: one for all, or one for each sequence; none longer than its axis.
void check_lengths(const Inference& a, IA lengths, const char* name, int64_t most) {
  if (!lengths || (*lengths).empty()) return;
  auto all = *lengths;
  require(all.size() == 1 || static_cast<int64_t>(all.size()) >= a.batch(), name, " has ", all.size(),
          " entries: 1 or at least B = ", a.batch());
  for (auto n : all) require(n >= 0 && (most < 0 || n <= most), name, " has ", n, ", it must be 0 to ", most);
}

void check_sums(IA sums, const char* name, int64_t total) {
  auto all = *sums;
  require(!all.empty(), name, " is empty: packed layouts need it");
  int64_t before = 0;
  for (auto n : all) {
    require(n >= before, name, " is ", all, ", it must be sums that do not fall");
    before = n;
  }
  require(before == total, name, " ends with ", before, ", there are ", total, " tokens");
}

void check_all_lengths(const Inference& a) {
  if (!a.packed()) {
    if (!a.one_row()) check_lengths(a, a.q_lengths, "actualSeqLengths", a.q_len());
    if (a.key.size() == 1) check_lengths(a, a.kv_lengths, "actualSeqLengthsKv", a.table ? -1 : a.kv_len());
    return;
  }
  auto tokens = a.in_layout() == "NTD" ? 1 : 0;
  if (!a.table) check_sums(a.kv_lengths, "actualSeqLengthsKv", a.key.at(0).size(tokens));
  require((*a.kv_lengths).size() == (*a.q_lengths).size(), "actualSeqLengths and actualSeqLengthsKv have ",
          (*a.q_lengths).size(), " and ", (*a.kv_lengths).size(), " entries");
}

void check_blocks(const Inference& a) {
  require(a.key.size() == 1, "a paged cache is one tensor, no list");
  require(!a.q_padding && !a.kv_padding, "a paged cache does not go with left padding");
  require(a.kv_lengths && !(*a.kv_lengths).empty(), "a paged cache needs actualSeqLengthsKv");
  auto size = a.block_size, d = a.head_size(), kv = a.kv_head_count();
  require(size > 0 && size % 16 == 0, "blockSize is ", size, ", it must be a positive multiple of 16");
  if (a.packed() || d == 64 || d == 128) {
    require(size <= 1024, "blockSize is ", size, ", at most 1024 here");
  } else if (rows_of(a) > 1) {
    require(size % 128 == 0 && size <= 1024, "blockSize is ", size, " with D ", d,
            " and more than one query row: a multiple of 128, at most 1024");
  } else {
    require(size <= 512, "blockSize is ", size, " with D ", d, " and one query row: at most 512");
  }
  require_axes(a.table, "blockTable", 2, 2);
  require(a.table->size(0) == a.batch(), "blockTable has ", a.table->size(0), " rows, B is ", a.batch());
  auto blocks_of = [&](int64_t length) { return (length + size - 1) / size; };
  auto most = blocks_of(longest(a, a.kv_lengths, false));
  require(a.table->size(1) >= most, "blockTable has ", a.table->size(1),
          " columns, the longest sequence has ", most, " blocks");
  auto& key = a.key.at(0);
  require(key.sizes() == a.value.at(0).sizes() || a.k_rope, "key and value caches differ in shape");
  int64_t needed = 0;
  for (int64_t b = 0; b < a.batch(); b++) {
    needed += blocks_of((*a.kv_lengths)[(*a.kv_lengths).size() == 1 ? 0 : static_cast<size_t>(b)]);
  }
  require(key.size(0) >= needed, "the cache has ", key.size(0), " blocks, the sequences have ", needed);
  auto count = key.size(0);
  if (key.dim() == 3) {
    require(key.size(2) <= 65535, "N * D of the cache is ", key.size(2),
            ", at most 65535 in [blocks, size, N * D]");
    require(key.size(1) == size && key.size(2) == kv * d, "the cache has shape ", key.sizes(),
            ", it must be [", count, ", ", size, ", ", kv * d, "]");
    require(!a.packed() || size <= 128, "blockSize is ", size,
            ": packed layouts take at most 128 in a cache [blocks, size, N * D]");
  } else if (key.dim() == 4) {
    require(key.size(1) == kv && key.size(2) == size && key.size(3) == d, "the cache has shape ", key.sizes(),
            ", it must be [", count, ", ", kv, ", ", size, ", ", d, "]");
  } else {
    require(key.dim() == 5 && key.size(1) == kv && key.size(2) == d / 16 && key.size(3) == size &&
                key.size(4) == 16,
            "the cache has shape ", key.sizes(), ", in FRACTAL_NZ it is [", count, ", ", kv, ", ", d / 16,
            ", ", size, ", 16]");
  }
}

/// Columns a mask or bias must have.
int64_t columns_of(const Inference& a) {
  if (a.table) return a.table->size(1) * a.block_size;
  if (a.kv_lengths && !(*a.kv_lengths).empty()) return longest(a, a.kv_lengths, a.packed());
  int64_t most = 0;
  for (size_t k = 0; k < a.key.size(); k++)
    most = std::max(most, a.key.at(k).size(a.in_layout() == "BNSD" ? 2 : 1));
  return most;
}

void check_fixed_mask(const Inference& a) {
  require(bool(a.mask), "sparseMode ", a.sparse, " needs the fixed mask of ", kMaskSide, " x ", kMaskSide);
  auto shape = a.mask->sizes();
  bool square = shape.size() >= 2 && shape.size() <= 4 && shape[shape.size() - 1] == kMaskSide &&
                shape[shape.size() - 2] == kMaskSide && a.mask->numel() == kMaskSide * kMaskSide;
  require(square, "sparseMode ", a.sparse, " needs a mask of (", kMaskSide, ", ", kMaskSide,
          "), it has shape ", shape);
}

void check_mask(const Inference& a) {
  require(a.sparse >= 0 && (a.sparse <= 4 || a.sparse == 9), "sparseMode is ", a.sparse, ": 0 to 4, or 9");
  require(a.sparse != 9, "sparseMode 9 (tree) is not simulated");
  auto columns = columns_of(a);
  if (a.one_row()) {
    // sparseMode is without effect: the mask, if any, is a row for each sequence.
    if (!a.mask) return;
    require_axes(a.mask, "attenMask", 2, 4);
    auto shape = a.mask->sizes();
    bool row = shape.size() == 2 || (shape[1] == 1 && (shape.size() == 3 || shape[2] == 1));
    require(row && shape[0] == a.batch() && shape.back() >= columns, "attenMask has shape ", shape,
            "; one query row takes (B, KV_S), (B, 1, KV_S) or (B, 1, 1, KV_S) with B ", a.batch(),
            " and KV_S at least ", columns, " (sparseMode is ignored)");
    return;
  }
  if (a.sparse >= 2) {
    check_fixed_mask(a);
    require(!a.packed() || a.sparse != 2, "packed layouts take sparseMode 0, 3 and 4");
    if (a.sparse == 4)
      require(a.pre + a.next >= 0, "the band of preTokens ", a.pre, " and nextTokens ", a.next, " is empty");
    return;
  }
  require(!a.packed() || (a.sparse == 0 && !a.mask),
          "packed layouts take sparseMode 0 without a mask, or 3 or 4 with the fixed one");
  require(a.sparse == 0 || a.mask, "sparseMode 1 needs the whole mask");
  if (!a.mask) return;
  require_axes(a.mask, "attenMask", 2, 4);
  auto shape = a.mask->sizes();
  auto rows = shape[shape.size() - 2];
  bool batch = shape.size() == 2 || shape[0] == 1 || shape[0] == a.batch();
  require(batch && (shape.size() != 4 || shape[1] == 1) && rows >= rows_of(a) && shape.back() >= columns,
          "attenMask has shape ", shape,
          "; supported: (Q_S, KV_S), (B or 1, Q_S, KV_S), (B or 1, 1, Q_S, KV_S) with B ", a.batch(),
          ", Q_S at least ", rows_of(a), " and KV_S at least ", columns);
}

void check_bias(const Inference& a) {
  if (!a.bias) return;
  require(!a.packed(), "packed layouts do not go with pseShift");
  require_axes(a.bias, "pseShift", 4, 4);
  auto s = a.bias->sizes();
  require((s[0] == 1 || s[0] == a.batch()) && s[1] == a.heads && s[2] >= a.q_len() && s[3] >= columns_of(a),
          "pseShift has shape ", s, ", it must be (B or 1, N, at least ", a.q_len(), ", at least ",
          columns_of(a), ")");
}

void check_packed(const Inference& a) {
  if (!a.packed()) return;
  require(a.q_lengths && !(*a.q_lengths).empty() && a.kv_lengths && !(*a.kv_lengths).empty(), "layout ",
          a.layout, " needs actualSeqLengths and actualSeqLengthsKv");
  check_sums(a.q_lengths, "actualSeqLengths", a.query->size(a.in_layout() == "NTD" ? 1 : 0));
  require(!a.q_padding && !a.kv_padding, "packed layouts do not go with left padding");
  auto d = a.head_size();
  bool grouped = a.heads != a.kv_head_count();
  bool usual = d == 64 || d == 128 || d == 192 || (d == 512 && a.q_rope);
  require(usual || (grouped && a.inner_precise == 0 && d <= 256), "layout ", a.layout, " with D ", d,
          ": 64, 128 or 192, and with fewer key heads and innerPrecise 0 up to 256");
  if (grouped)
    require(a.inner_precise == 0, "grouped heads in layout ", a.layout, " need innerPrecise 0, it is ",
            a.inner_precise);
  if (!grouped) {
    auto most = a.query->scalar_type() == at::kHalf ? 1 : 0;
    require(a.inner_precise <= most, "layout ", a.layout, " with ", a.query->scalar_type(),
            " takes innerPrecise up to ", most, ", it is ", a.inner_precise);
  }
}

void check_sinks(const Inference& a) {
  if (!a.sinks) return;
  require_same_dtype(a.sinks, "learnableSink", a.query, "query");
  require_shape(a.sinks, "learnableSink", {a.heads});
  auto d = a.out->size(-1);
  if (a.out_layout() == "BSH") d /= a.heads;
  require(d == 64 || d == 128, "learnableSink needs values of D 64 or 128, it is ", d);
  require(!a.bias && !a.q_padding && !a.kv_padding,
          "learnableSink does not go with pseShift nor left padding");
}

void check_rope(const Inference& a) {
  require(bool(a.q_rope) == bool(a.k_rope), "queryRope and keyRope go together");
  if (!a.q_rope) return;
  auto d = a.head_size();
  require(d == 512 || d == 128, "queryRope needs D 512 or 128, it is ", d);
  auto rope = a.in_layout() == "BSH" ? a.q_rope->size(2) / a.heads : a.q_rope->size(-1);
  require(rope == 64, "queryRope has D ", rope, ", it must be 64");
  if (d == 512) require(bool(a.table), "queryRope with D 512 needs a paged cache");
}

/// Shapes of the outputs by the output layout.
void check_outputs(const Inference& a) {
  auto out = a.out_layout();
  auto& value = a.value.at(0);
  auto kv = a.kv_head_count();
  // Of a cache [blocks, size, N * D] and of BSH the head is in the last axis with the others.
  bool merged = a.table ? value.dim() == 3 : a.in_layout() == "BSH";
  auto d = a.table && value.dim() == 5 ? value.size(2) * 16 : merged ? value.size(-1) / kv : value.size(-1);
  std::vector<int64_t> shape;
  if (a.packed()) {
    auto tokens = a.query->size(a.in_layout() == "NTD" ? 1 : 0);
    shape =
        out == "NTD" ? std::vector<int64_t>{a.heads, tokens, d} : std::vector<int64_t>{tokens, a.heads, d};
  } else if (out == "BSH") {
    shape = {a.batch(), a.q_len(), a.heads * d};
  } else if (out == "BSND") {
    shape = {a.batch(), a.q_len(), a.heads, d};
  } else if (out == "NBSD") {
    shape = {a.heads, a.batch(), a.q_len(), d};
  } else {
    shape = {a.batch(), a.heads, a.q_len(), d};
  }
  require_shape(a.out, "attentionOut", shape);
  if (!a.want_lse) return;
  require_given(a.lse, "softmaxLse");
  require_dtype(a.lse, "softmaxLse", {at::kFloat});
  if (a.packed()) return require_shape(a.lse, "softmaxLse", {shape[out == "NTD" ? 1 : 0], a.heads, 1});
  require_shape(a.lse, "softmaxLse", {a.batch(), a.heads, a.q_len(), 1});
}

void check(const Inference& a, bool fp16_only) {
  check_given(a);
  if (!a.query->numel()) return;
  check_dtypes(a, fp16_only);
  check_contiguous(a);
  require(a.inner_precise >= 0 && a.inner_precise <= 3, "innerPrecise is ", a.inner_precise, ": 0 to 3");
  if (a.packed()) {
    int64_t axes = 3;
    require_axes(a.query, "query", axes, axes);
    check_packed(a);
  }
  check_heads(a);
  if (a.one_row() && a.inner_precise >= 2) {
    auto d = a.head_size();
    require(d == 64 || d == 128, "one query row with D ", d, " takes innerPrecise 0 and 1");
  }
  if (a.table) {
    check_blocks(a);
  } else {
    check_keys(a);
  }
  check_all_lengths(a);
  check_mask(a);
  check_bias(a);
  check_sinks(a);
  check_rope(a);
  check_outputs(a);
}

void check_fused(const Inference& a) {
  require(one_of(a.layout, {"BSH", "BSND", "BNSD", "TND", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND",
                            "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"}),
          "inputLayout \"", a.layout, "\" is not supported");
  check(a, false);
}

}  // namespace

LIMITS(aclnnFusedInferAttentionScore, FIA_ARGUMENTS_V1) {
  FIA_COLLECT_V1("aclnnFusedInferAttentionScore");
  check_fused(a);
}
LIMITS(aclnnFusedInferAttentionScoreV2, FIA_ARGUMENTS_V2) {
  FIA_COLLECT_V2("aclnnFusedInferAttentionScoreV2");
  check_fused(a);
}
LIMITS(aclnnFusedInferAttentionScoreV3, FIA_ARGUMENTS_V3) {
  FIA_COLLECT_V3("aclnnFusedInferAttentionScoreV3");
  check_fused(a);
}
LIMITS(aclnnFusedInferAttentionScoreV4, FIA_ARGUMENTS_V4) {
  FIA_COLLECT_V4("aclnnFusedInferAttentionScoreV4");
  check_fused(a);
}

LIMITS(aclnnPromptFlashAttentionV3, PFA_ARGUMENTS_V3) {
  if (!key || !value) throw NullError("key or value is null");
  PFA_COLLECT_V3("aclnnPromptFlashAttentionV3");
  require(one_of(a.layout, {"BSH", "BSND", "BNSD", "BNSD_BSND"}), "inputLayout \"", a.layout,
          "\": BSH, BSND, BNSD and BNSD_BSND are simulated");
  check(a, is_310p());
  auto in = a.in_layout();
  auto d = a.head_size();
  require((in != "BSH" && in != "BSND") || a.heads * d < 65535, "N * D is ", a.heads * d,
          ", it must be less than 65535 in ", in);
  if (!is_310p()) return;
  require(a.batch() <= 128, "B is ", a.batch(), ", 310P takes 128");
  require(a.q_len() <= 65535 && a.kv_len() <= 65535, "310P takes sequences up to 65535");
  require(!a.bias, "310P has no pseShift");
  require(kv_heads == 0, "numKeyValueHeads is ", kv_heads, ", 310P takes 0 only");
  require(sparse == 0, "sparseMode is ", sparse, ", 310P takes 0 only");
  require(pre == INT32_MAX && (next == 0 || next == INT32_MAX),
          "310P takes preTokens 2147483647 and nextTokens 0 or ", "2147483647");
  require(!a.mask || (a.q_len() % 128 == 0 && a.kv_len() % 128 == 0 && a.q_len() == a.kv_len()),
          "310P takes a mask only with equal Q_S and KV_S, multiples of 128");
}

LIMITS(aclnnIncreFlashAttentionV4, IFA_ARGUMENTS_V4) {
  IFA_COLLECT_V4("aclnnIncreFlashAttentionV4");
  require(one_of(a.layout, {"BSH", "BSND", "BNSD"}), "inputLayout \"", a.layout, "\": BSH, BSND or BNSD");
  check_given(a);
  require(a.q_len() == 1, "query has ", a.q_len(), " rows, IncreFlashAttention takes one");
  check(a, is_310p());
  require(inner_precise == 0 || inner_precise == 1, "innerPrecise is ", inner_precise, ": 0 or 1");
  if (table) {
    require(block_size <= 512, "blockSize is ", block_size, ", at most 512");
    require(a.layout == "BNSD" || a.key.at(0).dim() == 3, "layout ", a.layout,
            " takes a cache [blocks, size, N * D] only");
  }
  if (!is_310p()) return;
  require(a.batch() <= 256, "B is ", a.batch(), ", 310P takes 256");
  require(kv_heads == 0, "numKeyValueHeads is ", kv_heads, ", 310P takes 0 only");
  require(table || a.kv_len() <= 65536, "310P takes keys up to 65536");
}
