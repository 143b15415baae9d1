// torch's products of batches of matrices and its softmax, where neither the number of rows nor that of hidden keys may change
// the bits of a row: attention that is a model's own (Bloom, GPT-Neo, BERT as a decoder) multiplies and sums over all keys.
//
//   product   out[b][i][j] = round(beta * add[b][i][j] + alpha * sum_k x[b][i][k] * y[b][k][j])
//   softmax   out[i][j]    = round(exp(x[i][j] - max_j x[i][j]) / sum_j exp(x[i][j] - max_j x[i][j]))
//
// Rounding: a product of two elements is exact in double; those of one output are added up in double, and rounded once to
// fp32 and once to the dtype. They are added up in the order of k, so that zeros of x at either end change nothing, where
// outputs of y lie side by side, as values do; where y lies along k, in lanes and blocks of 256, whose order shows in a sum
// that loses more than the 29 bits between double and fp32. Exponentials are fp32; for their sum each is rounded to a
// multiple of 2^-40, and these are added up exactly, in whatever order, for fewer than 2^23 of them. A row of softmax that holds NaN or +inf, or nothing but -inf, is NaN, as torch's is.
#pragma once

#include <stdint.h>

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

// Outputs of one product that a task of product() does.
constexpr int64_t kProductColumns = 64;

// Strides in elements. x has step 1 along k; y along k or along j, as `y_row_step` and `y_column_step` say.
struct BatchedProductArgs {
  const void* x;    // [batch, rows, k]
  const void* y;    // [batch, k, columns]
  const void* add;  // or null
  void* out;        // [batch, rows, columns], contiguous
  int64_t rows, columns, k;
  int64_t x_batch_stride, x_row_stride;
  int64_t y_batch_stride, y_row_step, y_column_step;
  int64_t add_strides[3];
  double alpha, beta;
  DType dtype;
};

// Rows of `columns` elements with step 1, one behind the other.
struct SoftmaxArgs {
  const void* x;
  void* out;
  int64_t columns;
  DType dtype;
};

struct BatchInvariantKernels {
  // Tasks [begin, end): task t is columns t % n * kProductColumns and on of batch t / n, n = columns / kProductColumns,
  // rounded up.
  void (*product)(const BatchedProductArgs& args, int64_t begin, int64_t end);
  // Rows [begin, end).
  void (*softmax)(const SoftmaxArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(BatchInvariantKernels, batch_invariant_kernels)

}  // namespace liteboost
