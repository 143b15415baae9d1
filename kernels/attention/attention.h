// Scaled dot-product attention over grouped key/value heads, for prefill and for decode.
//
// Shapes: query [B, H, q_len, D], key [B, K, kv_len, D], value [B, K, kv_len, Dv] -> [B, q_len, H, Dv]. Query
// head h reads kv head h / (H / K). All in one dtype: float32, bfloat16 or float16.
//
//   logit[i][j] = cap(scaling * query[i] . key[j]) + mask[i][j]     cap(x) = softcap * tanh(x / softcap)
//   output[i]   = sum_j exp(logit[i][j]) * value[j] / (sum_j exp(logit[i][j]) + exp(sink[h][i]))
//
// A sink is an extra logit of a head, or of each of its queries, that has no value.
//
// Query i stands at position i + kv_len - q_len. Causal: it sees the keys at or before its position; with a
// window w > 0 only the last w of those. A bool mask hides keys where it is False, as -inf would. A row that
// sees no key gives 0. A row whose float mask is finite everywhere is an ordinary row, however low the mask.
//
// NaN and infinity: a row with a logit of NaN or +inf among those it sees is NaN (lse: NaN, or +inf where no logit is
// NaN), and one whose logits are all -inf gives 0. Keys it does not see do not matter, whatever they hold, unless a
// float mask hides them: NaN - inf is NaN. A value that is not finite makes NaN or infinity of the rows that see its
// key. Rows that do not see it may become NaN as well (0 * NaN) or not: values of blocks in which no row of a task sees
// a key are not read.
//
// attention_part, for keys that are a part of those a query sees: output in float32, and beside it
//
//   lse[i] = log(sum_j exp(logit[i][j])), -inf for a row that sees no key     [B, q_len, H], float32
//
// Rounding: dot products, softmax and sums in fp32. bfloat16 with the avx512_bf16, amx_bf16 and i8mm_bf16 kernels
// multiplies bf16 by bf16 (with the sums of linear.h) and rounds the unnormalized probabilities to bf16 before the
// product with the values; the denominator then sums the rounded ones. Everywhere else probabilities stay fp32. One
// rounding to the output's dtype.
// Of int8 keys and values (int8_attention/) the integers are multiplied, which are exact in bf16, too: a key's scale is
// multiplied into its dot product in fp32, a value's into its probability before that is rounded. For few rows
// (attention_int8.h) bf16 with AVX-512 VNNI, or the dot products of aarch64, rounds a query to 16 bits of its largest
// magnitude, probabilities to 24 bits (23 on aarch64) of the largest of a block of keys, and sums integers exactly.
//
// The keys are walked in blocks with an online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et
// al. 2022, arXiv:2205.14135), so that scratch memory does not depend on q_len * kv_len; grouped heads
// (Ainslie et al. 2023, arXiv:2305.13245) share each block of keys and values.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// Keys of a block read where it lies (AttentionArgs::direct): they stay in the first-level cache.
constexpr int64_t kDirectKeys = 128;
// Bytes of the float behind a row of integers.
constexpr int64_t kInt8ScaleBytes = 4;

enum class AttentionMask : int32_t { none, boolean, f32, bf16, f16 };

// One call as the torch-free loops see it. Strides are in elements; the last dimension of query, key, value
// and output is contiguous.
struct AttentionArgs {
  const void* query;
  const void* key;
  const void* value;
  const void* mask;
  const float* sinks;  // or null
  void* output;        // [B, q_len, H, Dv], contiguous
  float* lse;          // [B, q_len, H], or null; the output is then float32

  int64_t query_strides[3];  // batch, head, row
  int64_t key_strides[3];
  int64_t value_strides[3];
  int64_t mask_strides[4];  // batch, head, row, column; 0 where broadcast
  int64_t sink_strides[3];  // batch, head, row; 0 where shared

  // Keys and values in pages: those at position j lie in row j % page_rows of page pages[j / page_rows]. Null:
  // one row after the other.
  const int64_t* pages;
  int64_t page_rows, key_page_stride, value_page_stride;

  // Block-sparse: which blocks of block_keys keys the queries of a task, a block of task_queries, read. The list
  // of query block i of sequence b and head h, of a kv head where selected_heads are num_kv_heads, is row
  // (b * query blocks + i) * selected_heads + h: ascending, the first selected_counts[row] of most_selected.
  // Without counts: all keys. Lists of query heads need task_heads = 1; kv_splits is 1.
  const int64_t* selected;
  const int64_t* selected_counts;
  int64_t selected_heads, most_selected, block_keys;

  int64_t batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim;
  float scaling;
  float softcap;   // 0: none
  int64_t window;  // 0: none
  bool is_causal;
  DType dtype;  // of query and output, and of key and value but for rows of integers
  // Keys and values are rows of head_dim or value_dim int8 and, behind them at any alignment, the float that all
  // of them are multiplied by.
  bool quantize_kv;
  AttentionMask mask_type;

  // The plan. A tile of work holds task_heads query heads of one kv head, each with up to task_queries
  // consecutive queries; its keys are walked in kv_splits separate tasks, merged afterwards if several.
  int64_t task_queries;
  int64_t task_heads;
  int64_t kv_splits;
  // Not 0: splits begin at multiples of so many keys, however many keys or queries there are, counted from the query's
  // own of split_origins [B, q_len]: less than one split, the same for all queries of a task. Null: from 0.
  int64_t split_keys;
  const int64_t* split_origins;
  // Reads keys and values where they lie, for few rows; otherwise blocks of them are first packed.
  bool direct;
  // Where kv_splits > 1: for each task and row of a tile value_dim sums, their maximum logit and their total.
  float* partials;
  // Of few rows over pages in which a row of all kv heads is one piece: the call whose keys [next_begin, next_end) this
  // thread reads next. Its tasks ask for them, each for its share. Null: nothing is known of that.
  const AttentionArgs* next;
  int64_t next_begin, next_end;
};

struct AttentionKernels {
  // Bytes of scratch memory run() needs; a function of head sizes and plan, not of lengths.
  size_t (*scratch_bytes)(const AttentionArgs& args);
  // Does task `task` of tiles * kv_splits. `scratch` is aligned to 64 bytes.
  void (*run)(const AttentionArgs& args, int64_t task, void* scratch);
  // Merges the kv_splits partial results of tile `tile` into the output.
  void (*merge)(const AttentionArgs& args, int64_t tile);
};

LB_DECLARE_KERNELS(AttentionKernels, attention_kernels)

}  // namespace liteboost
