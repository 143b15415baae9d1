// Matrix products fused with a collective (MC2). The group is the name HcclGetCommName gave.
// Formulas: CANN operator documentation (ops-transformer, mc2/*/docs/*.md).
#include "collective.h"
#include "format.h"

using namespace sim;
using at::Tensor;

// x1 @ x2 (+ bias) accumulated in float32, rounded to the output's type before it is sent.
static Tensor partial(const Tensor& x1, const Tensor& x2, const TensorHandle& bias, at::ScalarType dtype) {
  auto y = at::matmul(fp32(x1), fp32(x2));
  if (bias && bias->numel()) y = y + fp32(*bias);
  return y.to(dtype);
}

OP(aclnnMatmulAllReduce, T, x1, T, x2, T, bias, CP, group, CP, reduce_op, int64_t, comm_turn, int64_t,
   stream_mode, O, out) {
  put(out, all_reduce_sum(group, partial(*x1, values_of(x2), bias, out->scalar_type())));
}
