// Matrix products fused with a collective (MC2). The group is the name HcclGetCommName gave.
// Formulas: CANN operator documentation (ops-transformer, mc2/*/docs/*.md).
#include "collective.h"
#include "quantize.h"

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
// x3 is added on every rank before the reduction, as documented: allreduce(x1 @ x2 + bias + x3).
OP(aclnnMatmulAllReduceV2, T, x1, T, x2, T, bias, T, x3, CP, group, CP, reduce_op, int64_t, comm_turn,
   int64_t, stream_mode, O, out) {
  auto y = partial(*x1, values_of(x2), bias, out->scalar_type());
  put(out, all_reduce_sum(group, x3 ? y + *x3 : y));
}
OP(aclnnWeightQuantMatmulAllReduce, T, x1, T, x2, T, bias, T, scale, T, offset, T, x3, CP, group, CP,
   reduce_op, int64_t, comm_turn, int64_t, stream_mode, int64_t, group_size, O, out) {
  auto w =
      dequantized_weight(integers(values_of(x2)), *scale, offset.orundef(), group_size, x1->scalar_type());
  auto y = partial(*x1, w, bias, out->scalar_type());
  put(out, all_reduce_sum(group, x3 ? y + *x3 : y));
}

static Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  auto xf = fp32(x);
  return xf * at::rsqrt((xf * xf).mean(-1, true) + eps) * fp32(gamma);
}
static Tensor reduced_plus(const TensorHandle& residual, const Tensor& reduced) {
  return (fp32(*residual) + fp32(reduced.reshape(residual->sizes()))).to(residual->scalar_type());
}
OP(aclnnMatmulAllReduceAddRmsNorm, T, x1, T, x2, T, bias, T, residual, T, gamma, double, eps, CP, group, CP,
   reduce_op, int64_t, comm_turn, int64_t, stream_mode, O, y, O, normed) {
  auto sum =
      reduced_plus(residual, all_reduce_sum(group, partial(*x1, values_of(x2), bias, y->scalar_type())));
  put(y, sum);
  put(normed, rms_norm(sum, *gamma, eps));
}
OP(aclnnInplaceMatmulAllReduceAddRmsNorm, T, x1, T, x2, T, bias, R, residual, T, gamma, double, eps, CP,
   group, CP, reduce_op, int64_t, comm_turn, int64_t, stream_mode, O, normed) {
  auto sum = reduced_plus(residual,
                          all_reduce_sum(group, partial(*x1, values_of(x2), bias, residual->scalar_type())));
  put(residual, sum);
  put(normed, rms_norm(sum, *gamma, eps));
}

OP(aclnnAllGatherMatmul, T, x1, T, x2, T, bias, CP, group, int64_t, gather_index, int64_t, comm_turn, int64_t,
   stream_mode, O, out, O, gathered_out) {
  auto gathered = at::cat(all_gather(group, *x1));
  put(out, partial(gathered, values_of(x2), bias, out->scalar_type()));
  if (gathered_out && gathered_out->numel()) put(gathered_out, gathered);
}
OP(aclnnMatmulReduceScatter, T, x1, T, x2, T, bias, CP, group, CP, reduce_op, int64_t, comm_turn, int64_t,
   stream_mode, O, out) {
  auto sum = all_reduce_sum(group, partial(*x1, values_of(x2), bias, out->scalar_type()));
  const int64_t rows = out->size(0);
  put(out, sum.slice(0, rank_of(group) * rows, (rank_of(group) + 1) * rows));
}
