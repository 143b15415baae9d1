// linear(x, weight, bias) = x @ weight^T + bias, for the few rows of decode.
//
//   x       [..., K]    any strides; made contiguous if it is not (it is small)
//   weight  [N, K]      as nn.Linear stores it; read in place when its last dim is contiguous, whatever
//                       the stride between its rows
//   bias    [N] or none
//   result  [..., N]    contiguous; x.dtype
//
// dtypes: float32, bfloat16, float16, the same for all three tensors.
//
// Rounding: products summed in fp32, the bias added in fp32, one rounding to x.dtype. The order of the sum does not
// depend on the number of threads. It depends on the number of rows of x, except in products of up to
// batch_invariant_rows() rows (common/batch_invariant.h), each of which has the bits that it has alone. Where the CPU
// has vdpbf16ps (avx512_bf16) or tiles (amx_bf16), bf16 inputs and partial sums below 2^-126 in magnitude count as
// zero, which is what these instructions do. bfdot of aarch64 (i8mm_bf16) does so, too, and rounds each sum to odd: a
// sum between two floats becomes the one whose last bit is set, with an error of up to a unit in the last place, not
// half.
//
// With few rows the product is bound by reading the weight once from memory, and everything here serves
// that: a thread walks its own contiguous part of the rows of weight, each element read is used for all rows of x
// while it is in a register or in the L1 cache, and what comes next is prefetched. Many rows are bound by arithmetic:
// they have loops of their own (linear_gemm.h, and with the bits of one row linear_gemm_one_row.h), whose order does not
// depend on the number of rows either, or are at::linear's. max_rows in linear_cpu.cpp says which of them runs where,
// with the measurements behind it.
//
// gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, activation, alpha): the two layers of a gated MLP
// and its activation, act(linear(x, gate)) * linear(x, up), with the roundings of linear and gated_activation.
//
//   gate_weight, up_weight   [N, K];  gate_bias, up_bias   [N] or none;  result [..., N], contiguous
//   activation, alpha        as of gated_activation (activation/activation.h)
//
// On the CPU it gives the bits of those ops. On an NPU (linear_npu.cpp) the products write directly into the tensor
// that the activation reads: three launches, where products in tensors of their own would need a fourth to join them.
//
// _linears is linear for each of several weights with one x, the same bits: threads share out the outputs of all as if they
// were those of one weight, and x is packed once.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"
#include "common/order.h"

namespace liteboost {

// Rows that one call of LinearKernels::run takes of every dtype.
constexpr int64_t kLinearRows = 32;

struct LinearArgs {
  void* packed_x;      // as LinearKernels::pack wrote it
  const void* weight;  // [n, k], rows weight_stride elements apart
  const void* bias;    // [n] or null
  void* out;           // [rows, n], contiguous
  int64_t rows, n, k;  // rows in 1 .. most_rows
  int64_t weight_stride;
  Order order = Order::fastest;  // pack's
};

// Of many rows: all of x as it lies.
struct GemmArgs {
  const void*
      x;  // [rows, k], contiguous; float32 where LinearKernels::gemm_widens; in the order of one row as packed
  const void* weight;  // [n, k], rows weight_stride elements apart
  const void* bias;    // [n] or null
  void* out;           // [rows, n], contiguous
  int64_t rows, n, k;
  int64_t weight_stride;
  Order order = Order::fastest;
};

// Torch-free loops. `dtype` is that of x, weight, bias and out.
struct LinearKernels {
  // The most rows that one call of run takes, kLinearRows or more.
  int64_t (*most_rows)(DType dtype, Order order);
  // Bytes that pack writes. The buffer must be aligned to 64.
  int64_t (*packed_bytes)(DType dtype, int64_t rows, int64_t k, Order order);
  // x [rows, k], contiguous, converted and interleaved as the loops of that order want it.
  void (*pack)(DType dtype, const void* x, int64_t rows, int64_t k, Order order, void* packed);
  // The same in parts [begin, end) of as many as there are, which threads may share.
  int64_t (*pack_parts)(DType dtype, int64_t rows, int64_t k, Order order);
  void (*pack_some)(DType dtype, const void* x, int64_t rows, int64_t k, Order order, int64_t begin,
                    int64_t end, void* packed);
  // out[:, begin:end].
  void (*run)(DType dtype, const LinearArgs& args, int64_t begin, int64_t end);
  // Rows of weight in a panel of gemm; 0 where such products have no loops of their own here, or n outputs leave too
  // much of a panel empty.
  int64_t (*gemm_columns)(DType dtype, int64_t n, int64_t k, Order order);
  // Floats that a row of x takes in the order of one row, and rows [0, rows) of x, contiguous, so packed.
  int64_t (*gemm_row_floats)(DType dtype, int64_t k);
  void (*gemm_pack_rows)(DType dtype, const void* x, int64_t rows, int64_t k, float* packed);
  // Floats that gemm needs as scratch for so many panels, aligned to 64 bytes.
  int64_t (*gemm_scratch)(DType dtype, int64_t k, int64_t panels, Order order);
  // out[row_begin:row_end] of the columns of panels [panel, end).
  void (*gemm)(DType dtype, const GemmArgs& args, int64_t panel, int64_t end, int64_t row_begin,
               int64_t row_end, float* scratch);
  // Whether gemm takes 16-bit x as float32.
  bool gemm_widens;
  // The sum of count floats, read as one stream; shows how fast memory can be read at all.
  double (*stream_sum)(const float* x, int64_t count);
};

LB_DECLARE_KERNELS(LinearKernels, linear_kernels)

}  // namespace liteboost
