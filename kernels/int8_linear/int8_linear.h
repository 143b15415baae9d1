// Linear layers whose weights are integers of 8 bits and whose activations are rounded to 8 bits on the way in.
//
// linear_w8a8(x, weight, scales, bias) = (q @ weight^T) * scales * s[:, None] + bias,  q = round(x / s)
//
//   x       [..., K]    float32, bfloat16 or float16; any strides; K at most kInt8Columns
//   weight  [N, K]      int8
//   scales  [N]         float32, bfloat16 or float16, whatever x is
//   bias    [N] or none, of x's dtype
//   result  [..., N]    contiguous; x.dtype
//   s       one for each row of x: its largest magnitude, or 2^-100 if that is more, over 127
//
// Rounding, all of it the same on every instruction set, number of rows and number of threads: x is multiplied by
// 127 / largest in fp32 and rounded to the nearest integer, ties to even; products of integers are summed exactly;
// the sum is rounded to fp32, times the scale, times s, plus the bias, each rounded to fp32; then one rounding to
// x.dtype. A row of x that holds NaN or infinity gives NaN.
//
// Few rows (with AVX-512 up to 64, in tiles of registers) read the weight as it lies. For more, panels of it are
// interleaved, so that one load serves as many outputs as a register has lanes: that is a hundredth of the product's
// work, and nothing of it is kept. Where the CPU has tiles (amx_bf16), they multiply both, and up to 128 rows read the
// weight as it lies. One thread of a busy Sapphire Rapids, microseconds with vectors (avx512_bf16, before there were
// tiles of registers) and with tiles of AMX, weight [3072, 1024]:
//
//          rows   4     8     16    32    48    64    512
//     vectors     310   440   575   761   927   1167  11831
//     tiles       317   342   338   359   452   517   2335
//
// Two threads of a Zen 5, weights from memory, panels and tiles of registers:
//
//          rows   9     12    16    24    32    48    64
//     panels      157   161   179   197   235   274   332
//     tiles       93    90    77    100   141   225   288
//
// Up to four rows read the weight in the order of memory. Two threads of a Zen 4, weights from memory, weight [3072, 1024],
// four rows of weight beside each other and one behind the other:
//
//          rows    1     2     3     4
//     beside       229   260   244   255
//     behind       127   159   161   152
//
// _linears_w8a8 is linear_w8a8 for each of several weights with one x, the same bits: x is rounded once, and threads share
// out the outputs of all as if they were those of one weight.
//
// Source: Dettmers et al. 2022, arXiv:2208.07339 (per-row and per-column absmax). No backward: an input that
// requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// So many products of 127 by 128 fit 32 bits.
constexpr int64_t kInt8Columns = 131072;

struct Int8LinearArgs {
  const void* x;         // [rows, k], contiguous
  const int8_t* weight;  // [n, k], contiguous
  const float* scales;   // [n]
  const void* bias;      // [n] or null
  void* out;             // [rows, n], contiguous
  int32_t* words;        // [rows, words(k)]: x as `quantize` writes it, aligned to 64
  float* row_scales;     // [rows]
  int32_t* row_offsets;  // [rows]: what the sums of a row are too large by
  int32_t* packed;       // x as `pack_some` writes it, aligned to 64, or null
  int64_t rows, n, k;
};

// Panels of the weight, each interleaved to words(k) * panel_columns words, one behind the other, aligned to 64.
struct Int8Panels {
  int64_t first, count;
  const int32_t* packed;
};

// Torch-free loops. `dtype` is that of x, bias and out.
struct Int8LinearKernels {
  // Words of 32 bits that a row of x takes.
  int64_t (*words)(int64_t k);
  // Rows [begin, end) of x to words, row_scales and row_offsets.
  void (*quantize)(DType dtype, const Int8LinearArgs& args, int64_t begin, int64_t end);
  // The most rows for which `few` is faster than `panels`.
  int64_t most_few_rows;
  // The most rows that `few` takes packed, 0 where it packs none. How many words that takes, and the packing.
  int64_t most_packed_rows;
  int64_t (*some_words)(int64_t rows, int64_t k);
  void (*pack_some)(const Int8LinearArgs& args, int32_t* packed);
  // out[:, begin:end], the weight read as it lies.
  void (*few)(DType dtype, const Int8LinearArgs& args, int64_t begin, int64_t end);
  // Outputs in a panel, panels that are best taken together, and rows that `panels` wants at least.
  int64_t panel_columns, most_panels, least_rows;
  // Panel `panel` of the weight interleaved.
  void (*pack)(const Int8LinearArgs& args, int64_t panel, int32_t* packed);
  // out[begin:end, those of the panels].
  void (*panels)(DType dtype, const Int8LinearArgs& args, const Int8Panels& panels, int64_t begin,
                 int64_t end);
};

LB_DECLARE_KERNELS(Int8LinearKernels, int8_linear_kernels)

}  // namespace liteboost
