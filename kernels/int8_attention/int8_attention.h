// Attention over keys and values kept as integers of 8 bits, and how they become such.
//
// A row of head_dim values, the key or value of one token and head, is kept as head_dim int8 and, behind them, the
// four bytes of a float: value[i] = integer[i] * scale. One tensor int8 [B, K, len, head_dim + 4] holds all that
// there is to know, so whatever moves, cuts or reorders rows (crop, beam search, windows) need not know of scales,
// and a row comes from memory in one piece. The scale lies at any alignment.
//
// quantize_kv(x): per row, as linear_w8a8 rounds its inputs (int8_linear/):
//
//   top = max(|x|, 2^-100); scale = top / 127; integer[i] = round(x[i] * (127 / top))     in fp32, to nearest even
//
// so that each value is off by at most scale / 2. A row with NaN or infinity has scale NaN and is NaN throughout.
// The same bits on every instruction set.
//
// int8_attention: attention.h with key and value such rows; nothing is dequantized in memory. Rounding: the dot
// products of query and integers in fp32 (bf16 products, exact, with the avx512_bf16 and i8mm_bf16 kernels), times the key's
// scale, then as there. A probability is multiplied by the value's scale in fp32 before the product with the integers; with
// those two kernels this product is rounded to bf16. The denominator sums the probabilities as they were.
//
// An NPU reads integers and scales from memory of their own (int8_attention_npu.h).
//
// A scale for each token and head: Dettmers et al. 2022, arXiv:2208.07339 (per-row absmax), on the cache of keys and
// values, Sheng et al. 2023, arXiv:2303.06865.
#pragma once

#include <stdint.h>

#include "attention/attention.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

struct Int8RowsArgs {
  const void* x;
  int64_t stride;  // elements from one row to the next; those of a row are adjacent
  int64_t cols;
  int8_t* out;  // [rows][cols + 4]
};

struct Int8RowsKernels {
  void (*quantize)(DType dtype, const Int8RowsArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(Int8RowsKernels, quantize_kv_kernels)

}  // namespace liteboost
