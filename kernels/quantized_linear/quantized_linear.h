// Linear layers whose weights are integers of 8 or 4 bits, with activations of 16 or 32 bits.
//
// linear_w8(x, weight, scales, bias) = x @ (weight * scales[:, None])^T + bias
//
//   x       [..., K]    float32, bfloat16 or float16; any strides
//   weight  [N, K]      int8
//   scales  [N]         float32, bfloat16 or float16, whatever x is
//   bias    [N] or none, of x's dtype
//   result  [..., N]    contiguous; x.dtype
//
// linear_w4(x, weight, scales, zero_points, bias) = x @ ((q - zero_point) * scale)^T + bias
//
//   weight       [N, K / 2]  uint8, K a multiple of 32: packed as below
//   scales       [N, G]      one for each group of K / G columns, which is 32 or a multiple of it
//   zero_points  [N, G]      uint8, 0 to 16; none stands for 8
//
// Packing 1 of w4: 16 bytes hold 32 columns, as eight little-endian words of 16 bits; nibble j (of 4, lowest
// first) of word i is column 8 * j + i. So a shift by 4 * j makes eight neighbours of one load, whatever the
// width of the registers, and the same shift of a whole register serves all it holds.
//
// Rounding: integers times x summed in fp32 (in a group, for w4), times the scale in fp32, summed over groups in
// fp32, then bias, then one rounding to x.dtype. Above kQuantizedRows rows, tiles of the weight are rounded to
// x.dtype first and multiplied as linear does it. The number of threads changes no bit. bfloat16 x on a CPU with
// vdpbf16ps: values below 2^-126 in magnitude count as zero.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// The most rows that the loops on packed weights serve.
constexpr int64_t kQuantizedRows = 32;
// Of these, as many at once.
constexpr int64_t kQuantizedChunk = 16;
// Columns of w4 that are packed together.
constexpr int64_t kPack = 32;

// Weights with their scales, w8 or w4.
struct QuantizedWeight {
  const void* data;            // [n, k] int8, or [n, k / 2] packed; contiguous
  const void* scales;          // [n, groups], contiguous
  const uint8_t* zero_points;  // [n, groups], or null for none
  int64_t n, k, groups;        // groups is 1 for w8
  int32_t bits;
  DType scale_dtype;
};

struct QuantizedLinearArgs {
  QuantizedWeight weight;
  const void* packed_x;  // as QuantizedLinearKernels::pack wrote it
  const void* bias;      // [n] or null
  void* out;             // [rows, n], contiguous
  int64_t rows;          // 1 .. kQuantizedChunk
};

// Torch-free loops. `dtype` is that of x, bias and out.
struct QuantizedLinearKernels {
  // Bytes that pack writes. The buffer must be aligned to 64.
  int64_t (*packed_bytes)(DType dtype, int32_t bits, int64_t rows, int64_t k);
  // x [rows, k], contiguous, converted and interleaved as the loops want it.
  void (*pack)(DType dtype, int32_t bits, const void* x, int64_t rows, int64_t k, void* packed);
  // out[:, begin:end].
  void (*run)(DType dtype, const QuantizedLinearArgs& args, int64_t begin, int64_t end);
  // Rows [begin, end) of the weight, multiplied out, rounded to dtype and written to out [end - begin, k].
  void (*unpack)(DType dtype, const QuantizedWeight& weight, int64_t begin, int64_t end, void* out);
};

LB_DECLARE_KERNELS(QuantizedLinearKernels, quantized_linear_kernels)

}  // namespace liteboost
