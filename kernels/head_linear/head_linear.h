// head_linear: out[b][h][i] = weight[h] x[b][h][i], a linear layer of its own for each head.
//
//   x          [batch, num_heads, rows, in_features], float32, bfloat16 or float16, any strides; read in place where
//              the last dimension is contiguous, copied first otherwise
//   weight     [num_heads, out_features, in_features], dtype of x; read in place where its outputs or its inputs lie one
//              beside the other, so also a transposed slice of a larger weight; copied first otherwise
//   returns    [batch, num_heads, rows, out_features], dtype of x, contiguous
//
// Products and sums in fp32, rounded once. Where inputs lie side by side the sum of an output is one over lanes; where
// outputs do, its products are added one after the other. Many rows in fp32 are torch's own product. For few rows: each
// row reads the weight of its head, from the cache if the row before has.
//
// Source: nn.Linear; multi-head latent attention has one a head (DeepSeek-AI 2024, arXiv:2405.04434). No backward.
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace liteboost {

struct HeadLinearArgs {
  const void* x;       // elements of a row with step 1
  const void* weight;  // one of the two steps below is 1
  void* out;           // contiguous
  int64_t batch, heads, rows, inputs, outputs;
  int64_t x_strides[3];  // batch, head, row
  int64_t weight_stride, output_step, input_step;
  DType dtype;
};

struct HeadLinearKernels {
  // Outputs [begin, end), counted over all heads, of every row.
  void (*run)(const HeadLinearArgs& args, int64_t begin, int64_t end);
};

LB_DECLARE_KERNELS(HeadLinearKernels, head_linear_kernels)

}  // namespace liteboost
