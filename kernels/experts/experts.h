// Mixture of experts: the products of each token with the weights of its experts, and their weighted sum.
//
// experts_linear: out[t, s] = x[t, s] @ weight[e]^T + bias[e], with e = index[t, s]
//
//   x       [T, K], one row a token, or [T, S, K], one row a slot; any strides, copied if not contiguous
//   weight  [E, N, K]   any strides. Read in place where K or N is contiguous ([E, K, N], transposed, too)
//   bias    [E, N] or none
//   index   [T, S]      int64, 0 .. E. A slot with E has no expert here (it is another process's): a row of 0
//   result  [T, S, N]   contiguous; x.dtype
//
// dtypes: float32, bfloat16, float16, the same for x, weight and bias. Products summed in fp32, the bias added
// in fp32, one rounding. What the loops here compute does not depend on the number of threads; at::linear's
// results may.
//
// Only the experts named in index are read, each once, and all threads share that reading: a thread takes the
// next part of some expert's weight when it is done with its last. The rows of one expert go through linear's
// loops (linear/linear.h) where its K is contiguous, through `columns` where its N is; an expert with more
// rows than is worth it (linear_max_rows, columns_max_rows) goes to at::linear, with AVX2 alone to linear.
//
// experts_combine: out[t] = sum over s of y[t, s] * scores[t, s]
//
//   y       [T, S, N]   any strides, copied if not contiguous
//   scores  [T, S]      dtype of y, or float32
//   result  [T, N]      contiguous; y.dtype
//
// Summed in fp32 in the order of s, one rounding. The original code (transformers 5.23, integrations/moe.py)
// rounds each product too where scores has the dtype of y.
//
// No backward: an input that requires grad is an error in grad mode.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// The most rows of x that one call of ExpertsKernels::columns takes, and the most columns.
constexpr int64_t kColumnsRows = 32;
constexpr int64_t kColumns = 256;

// A weight whose columns are contiguous: element (k, n) at k * weight_stride + n.
struct ColumnsArgs {
  const float* x;      // [rows, k], contiguous
  const void* weight;  // [k, count]
  const void* bias;    // [count] or null
  void* out;           // [rows, count], contiguous
  int64_t rows, count, k;
  int64_t weight_stride;
};

struct CombineArgs {
  const void* y;        // [tokens, slots, n], contiguous
  const float* scores;  // [tokens, slots], contiguous
  void* out;            // [tokens, n], contiguous
  int64_t slots, n;
};

// Torch-free loops. `dtype` is that of everything but ColumnsArgs::x and CombineArgs::scores.
struct ExpertsKernels {
  // x [count] as floats.
  void (*to_float)(DType dtype, const void* x, int64_t count, float* out);
  void (*columns)(DType dtype, const ColumnsArgs& args);
  // Elements [begin, end) of the output, counted over all tokens.
  void (*combine)(DType dtype, const CombineArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(ExpertsKernels, experts_kernels)

}  // namespace liteboost
