// Keys, lengths, blocks and packed layouts of inference attention.
#include "attention.h"

namespace sim {

int64_t longest(const Inference& a, IA lengths, bool cumulative) {
  int64_t most = 0, before = 0;
  auto all = *lengths;
  for (size_t b = 0; b < all.size() && (cumulative || static_cast<int64_t>(b) < a.batch()); b++) {
    most = std::max(most, all[b] - (cumulative ? before : 0));
    before = all[b];
  }
  return most;
}

int64_t rows_of(const Inference& a) { return a.packed() ? longest(a, a.q_lengths, true) : a.q_len(); }

namespace {

/// Keys and values that are not in blocks.
void check_plain_keys(const Inference& a) {
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

/// Head sizes of packed layouts by tiling: CheckFeatureLayout of fused_infer_attention_score_tiling_check_feature.cpp
/// (9.0.0, 9.1.0), CheckFeatureHeadDim there (8.5.0), IsUsingFAI for split_fuse.
void check_packed_heads(const Inference& a) {
  auto d = a.head_size();
  if (a.q_rope || tiling_of(a) == Tiling::split_fuse || (is_950() && a.layout == "TND")) return;
  bool usual = d == 64 || d == 128 || (d == 192 && a.layout == "TND");
  require(usual, "layout ", a.layout, " with D ", d, ", sparseMode ", a.sparse, " and innerPrecise ",
          a.inner_precise, ": 64 or 128, or 192 of TND; others of at most 256 with ",
          release_is("9.0.0") ? "sparseMode 0, 3 or 4" : "sparseMode 0 or 3 and fewer key heads",
          " and innerPrecise 0");
}

}  // namespace

void check_packed(const Inference& a) {
  require_axes(a.query, "query", 3, 3);
  require(a.q_lengths && !(*a.q_lengths).empty() && a.kv_lengths && !(*a.kv_lengths).empty(), "layout ",
          a.layout, " needs actualSeqLengths and actualSeqLengthsKv");
  check_sums(a.q_lengths, "actualSeqLengths", a.query->size(a.in_layout() == "NTD" ? 1 : 0));
  require(!a.q_padding && !a.kv_padding, "packed layouts do not go with left padding");
  check_packed_heads(a);
}

void check_keys(const Inference& a) {
  if (a.table) {
    check_blocks(a);
  } else {
    check_plain_keys(a);
  }
  check_all_lengths(a);
}

}  // namespace sim
