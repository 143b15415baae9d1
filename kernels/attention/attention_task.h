// A task of attention: its rows, its scratch memory, and the softmax over one block of keys. Part of
// attention_cpu_isa.cpp; compiled once an instruction set.
#pragma once

#include "attention/attention.h"
#include "attention/attention_pack.h"
#include "attention/attention_softmax.h"
#include "attention/attention_tile.h"
#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// A block of packed keys and one of values stay in the second-level cache with a chunk of logits.
constexpr int64_t kBlockKeys = 256;
constexpr int64_t kChunkRows = 64;
static_assert(kBlockKeys % kPanel == 0 && kPanel % kLanes == 0, "panels tile a block");

LB_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
LB_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Weights of up to kDirectKeys values as sums of bytes, unsigned on x86-64, with signs on aarch64: `unit` times (65536 [0] + 256 [1] + [2]).
struct WeightLimbs {
  uint8_t limbs[3][kDirectKeys];
  float unit;
};
static_assert(sizeof(WeightLimbs) % sizeof(float) == 0, "counted in floats");

// Bump allocation in the task's scratch memory; with no memory, measures.
struct Scratch {
  char* base;
  size_t used = 0;

  float* floats(int64_t n) {
    char* at = base + used;
    used += (static_cast<size_t>(n) * sizeof(float) + 63) / 64 * 64;
    return reinterpret_cast<float*>(at);
  }
};

// The rows of a task and where their state lives.
struct Task {
  int64_t batch, kv_head, first_head, heads, first_query, queries, rows;
  int64_t begin, end;  // keys this task walks
  // Softmax works on dot products as they are, and scales their differences: a positive factor keeps the
  // order. Not so where something else is done to the scaled ones.
  bool unscaled;
  // Whether a query holds NaN or infinity, which reaches its row through keys that the mask hides, too.
  bool has_nonfinite_query;

  float* queries_packed;  // [rows][query_stride] words
  float* keys_packed;
  float* values_packed;
  float *key_scales, *value_scales;  // of rows of integers: those of the block at hand, 0 behind it
  // [rows], beside them: what the packed queries are multiples of; 0 for one that cannot be, which is packed as it is.
  float* query_scales;
  WeightLimbs* limbs;  // [rows], beside them
  float* logits;       // [chunk][kBlockKeys]
  float* outputs;      // [rows][output_stride], unnormalised
  float* maximum;      // [rows]
  float* total;        // [rows]
  float* decay;        // [rows]
  int64_t query_stride, output_stride;
};

// Words of a packed query.
template <typename Words>
LB_INLINE int64_t query_words(const AttentionArgs& a) {
  const int64_t words = round_up(words_of<Words>(a.head_dim), kLanes);
#if defined(__ARM_FEATURE_DOTPROD)
  // Or two limbs of each value, each padded to a vector (attention_int8_neon.h).
  if (a.quantize_kv) return max_of(words, 2 * round_up(a.head_dim, kVecBytes) / 4);
#endif
  return words;
}

template <typename Words>
void lay_out(const AttentionArgs& a, Scratch& scratch, Task& t) {
  const int64_t rows = a.task_heads * a.task_queries;
  t.query_stride = query_words<Words>(a);
  t.output_stride = round_up(a.value_dim, kLanes);
  t.queries_packed = scratch.floats(rows * t.query_stride);
  t.outputs = scratch.floats(rows * t.output_stride);
  t.maximum = scratch.floats(rows);
  t.total = scratch.floats(rows);
  t.decay = scratch.floats(rows);
  t.logits = scratch.floats((a.direct ? rows : min_of(rows, kChunkRows)) * kBlockKeys);
  if (!a.direct) {
    // Two words of a column lie side by side where tiles are squares, if a key has but one value.
    const int64_t words = words_of<Words>(a.head_dim);
    t.keys_packed = scratch.floats(kBlockKeys * (kHasSquares ? max_of(words, 2) : words));
    t.values_packed = scratch.floats(words_of<Words>(kBlockKeys) * round_up(a.value_dim, kPanel));
  }
  if (a.quantize_kv) {
    t.key_scales = scratch.floats(kBlockKeys);
    t.value_scales = scratch.floats(kBlockKeys);
    t.query_scales = scratch.floats(rows);
    t.limbs = reinterpret_cast<WeightLimbs*>(
        scratch.floats(rows * static_cast<int64_t>(sizeof(WeightLimbs) / sizeof(float))));
  }
}

int64_t query_of(const Task& t, int64_t row) { return t.first_query + row % t.queries; }
int64_t head_of(const Task& t, int64_t row) { return t.first_head + row / t.queries; }

// Keys [first, last) that query i may see by causality and window.
LB_INLINE int64_t last_key(const AttentionArgs& a, int64_t query) {
  return a.is_causal ? max_of(0, query + a.kv_len - a.q_len + 1) : a.kv_len;
}
LB_INLINE int64_t first_key(const AttentionArgs& a, int64_t query) {
  return a.window > 0 ? max_of(0, query + a.kv_len - a.q_len + 1 - a.window) : 0;
}

MaskRow mask_row(const AttentionArgs& a, const Task& t, int64_t row, int64_t key) {
  const int64_t offset = t.batch * a.mask_strides[0] + head_of(t, row) * a.mask_strides[1] +
                         query_of(t, row) * a.mask_strides[2] + key * a.mask_strides[3];
  const int64_t size = a.mask_type == AttentionMask::boolean ? 1 : a.mask_type == AttentionMask::f32 ? 4 : 2;
  return {static_cast<const char*>(a.mask) + offset * size, a.mask_type, a.mask_strides[3]};
}

// Whether the bool mask shows some, all or none of the block of `n` keys at `key` to rows [begin, end).
Cover mask_cover(const AttentionArgs& a, const Task& t, int64_t begin, int64_t end, int64_t key, int64_t n) {
  if (a.mask_type == AttentionMask::none) return Cover::all;
  if (a.mask_type != AttentionMask::boolean) return Cover::some;
  bool any = false;
  bool all = true;
  for (int64_t row = begin; row < end && (all || !any); ++row) {
    const int64_t first = max_of(first_key(a, query_of(t, row)) - key, 0);
    const int64_t last = min_of(last_key(a, query_of(t, row)) - key, n);
    if (first >= last) continue;
    scan_bool_mask(mask_row(a, t, row, key + first).at<uint8_t>(0), a.mask_strides[3], last - first, any,
                   all);
  }
  if (!any) return t.has_nonfinite_query ? Cover::some : Cover::none;
  return all ? Cover::all : Cover::some;
}

// Softmax of one row of dot products with the n keys at `key`, of which [from, from + width) were computed.
template <typename Words, typename Stored>
LB_INLINE void softmax_row(const AttentionArgs& a, const Task& t, int64_t row, float* logits, int64_t key,
                           int64_t n, int64_t from, int64_t width, Cover cover) {
  const int64_t query = query_of(t, row);
  const int64_t begin = max_of(first_key(a, query) - key, from);
  const int64_t end = max_of(min_of(last_key(a, query) - key, n), begin);
  constexpr bool kScaled = is_int8<Stored>;
  if (begin < end) {
    if constexpr (kScaled) {
      const float scale = t.query_scales[row];
      multiply_by(logits, t.key_scales, scale == 0.0f ? 1.0f : scale, begin, end);
    }
    if (!t.unscaled) scale_logits(logits, begin, end, a.scaling, a.softcap);
    if (cover == Cover::some) apply_mask(logits, begin, end, mask_row(a, t, row, key));
  }
  t.decay[row] =
      softmax_step<Words, kScaled>(logits + from, min_of(begin - from, width), min_of(end - from, width),
                                   width, t.unscaled ? kLog2e * a.scaling : kLog2e, t.maximum[row],
                                   t.total[row], kScaled ? t.value_scales + from : nullptr);
}

// How many keys from `key` on, at most `n`, make a block: what joins the rows of one page to those of the next
// does so at whole vectors.
LB_INLINE int64_t block_keys(const AttentionArgs& a, int64_t key, int64_t n) {
  if (a.pages == nullptr) return n;
  const int64_t left = a.page_rows - key % a.page_rows;
  return left % kLanes != 0 || a.page_rows % kLanes != 0 ? min_of(left, n) : n;
}

// Calls f(first, rows, keys, values) for each stretch of the n keys at `key` whose rows lie evenly.
template <typename T, typename F>
LB_INLINE void each_stretch(const AttentionArgs& a, const T* keys, const T* values, int64_t key, int64_t n,
                            const F& f) {
  if (a.pages == nullptr) return f(0, n, keys + key * a.key_strides[2], values + key * a.value_strides[2]);
  for (int64_t first = 0; first < n;) {
    const int64_t row = (key + first) % a.page_rows;
    const int64_t page = a.pages[(key + first) / a.page_rows];
    const int64_t rows = min_of(a.page_rows - row, n - first);
    f(first, rows, keys + page * a.key_page_stride + row * a.key_strides[2],
      values + page * a.value_page_stride + row * a.value_strides[2]);
    first += rows;
  }
}

// What the n keys at `key`, and their values, are multiplied by, where they are rows of integers.
template <typename T>
LB_INLINE void read_scales(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                           int64_t n) {
  if constexpr (is_int8<T>) {
    const T* k = keys + key * a.key_strides[2] + a.head_dim;
    const T* v = values + key * a.value_strides[2] + a.value_dim;
    for (int64_t j = 0; j < n; ++j) {
      memcpy(t.key_scales + j, k + j * a.key_strides[2], sizeof(float));
      memcpy(t.value_scales + j, v + j * a.value_strides[2], sizeof(float));
    }
    for (int64_t j = n; j < round_up(n, kLanes); ++j) t.key_scales[j] = t.value_scales[j] = 0.0f;
  }
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
