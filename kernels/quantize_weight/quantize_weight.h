// Weights rounded to integers of 8 or 4 bits, each output or group of columns by the scale of least squared error
// among a few.
//
// quantize_w8(weight, scale_dtype) -> (integers, scales)
//   weight       [out_features, in_features], float32, bfloat16 or float16. Rows with a stride of their own are read in
//                place; other views are copied first.
//   scale_dtype  float32, bfloat16 or float16
//   integers     [out_features, in_features], int8, -127 to 127
//   scales       [out_features], of scale_dtype
//
// quantize_w4(weight, group_size, symmetric, scale_dtype) -> (packed, scales, zero_points)
//   group_size   columns that share a scale: a multiple of 32 that divides in_features
//   symmetric    whether 8 stands for zero in every group
//   packed       [out_features, in_features / 2], uint8, packing 1: 16 bytes hold 32 columns as eight little-endian words,
//                nibble j of word i being column 8 * j + i
//   scales       [out_features, in_features / group_size], of scale_dtype
//   zero_points  like scales, uint8: the integers that stand for zero
//
// A candidate is where the largest magnitude of a group comes to lie: 127, 130 and 134 of 8 bits, 7 to 9 in steps of a
// half of 4, with the sign that takes it to -8; without symmetry the share of the group's range, with zero, that 15
// spans: 1, 0.95, 0.9 and 0.85. Of each, integers are the quotients by it in fp32, rounded to even, clamped; their scale
// is that of least squares, rounded to scale_dtype. The candidate whose squared error is least gives scale and zero
// point; integers are then rounded again, by that scale. Sums are in fp64, where products are exact.
//
// A group of zeros has scale 1 and, without symmetry, zero point 8: kernels multiply integers less 8, so that its products are
// zeros without rounding. The scale is NaN, and the integers stand for zero, where a group holds what is no number
// or infinite, or where no candidate has a finite scale.
//
// Source: Frantar et al. 2022, arXiv:2210.17323 (groups); the candidates are our own. No backward.
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// Columns that are packed together.
constexpr int64_t kPackedColumns = 32;

struct QuantizeWeightArgs {
  const void* weight;    // rows of `cols` elements with step 1, `stride` apart
  void* integers;        // [rows, cols] int8, or [rows, cols / 2] of 4 bits
  void* scales;          // [rows, cols / group_size]
  uint8_t* zero_points;  // of 4 bits, like `scales`
  int64_t cols, stride;
  int64_t group_size;  // of 8 bits: cols
  bool symmetric;
  DType dtype, scale_dtype;
};

struct QuantizeWeightKernels {
  // Rows [begin, end).
  void (*w8)(const QuantizeWeightArgs& args, int64_t begin, int64_t end);
  void (*w4)(const QuantizeWeightArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(QuantizeWeightKernels, quantize_weight_kernels)

}  // namespace liteboost
