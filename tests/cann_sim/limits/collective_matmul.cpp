// What the products fused with a collective reject. Sources: ops-transformer, mc2/*/docs/*.md.
#include "../ops/collective.h"
#include "quantized.h"

using namespace sim;

static uint32_t ranks_of(CP group) {
  require(group && *group, "group is empty: pass the name HcclGetCommName gives");
  return rank_and_size(group).second;
}
static void all_reduce_group(CP group, CP reduce_op, int64_t stream_mode) {
  const uint32_t n = ranks_of(group);
  require(n == 1 || n == 2 || n == 4 || n == 8, n, " ranks: 1, 2, 4 or 8 are supported");
  require(reduce_op && std::string(reduce_op) == "sum", "reduceOp '", reduce_op ? reduce_op : "", "': sum");
  require(stream_mode == 1, "streamMode ", stream_mode, ": 1");
}
// Two-dimensional products of this rank; A2 takes 2, 4 or 8 ranks, A3 2 to 32 in powers of two.
static void gather_group(CP group, int64_t stream_mode) {
  const uint32_t n = ranks_of(group);
  const uint32_t most = soc() == Soc::ascend910c ? 32 : 8;
  require(n >= 2 && n <= most && (n & (n - 1)) == 0, n, " ranks: a power of two from 2 to ", most);
  require(stream_mode == 1, "streamMode ", stream_mode, ": 1");
}
static void operands(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& bias,
                     const TensorHandle& out, int64_t most_axes) {
  require_given(x1, "x1");
  require_given(x2, "x2");
  require_given(out, "output");
  require_dtype(x1, "x1", kSixteenBits);
  require_axes(x1, "x1", 2, most_axes);
  require_axes(x2, "x2", 2, 2);
  require_same_dtype(out, "output", x1, "x1");
  require(x1->size(-1) > 0, "k is 0");
  require(x1->stride(-1) == 1 || x1->size(-1) == 1, "x1 must not be transposed");
  if (bias && bias->numel()) {
    require_same_dtype(bias, "bias", x1, "x1");
    require_shape(bias, "bias", {out->size(-1)});
  }
}
static void unquantized(const TensorHandle& x1, const TensorHandle& x2) {
  require_same_dtype(x2, "x2", x1, "x1");
  require(x1->size(-1) == x2->size(0), "x1 has k = ", x1->size(-1), ", x2 has ", x2->size(0));
}
static void all_reduce_shape(const TensorHandle& x1, int64_t n, const TensorHandle& out) {
  auto shape = x1->sizes().vec();
  shape.back() = n;
  require_shape(out, "output", shape);
}

LIMITS(aclnnMatmulAllReduce, T, x1, T, x2, T, bias, CP, group, CP, reduce_op, int64_t, comm_turn, int64_t,
       stream_mode, O, out) {
  operands(x1, x2, bias, out, 3);
  unquantized(x1, x2);
  all_reduce_shape(x1, x2->size(1), out);
  all_reduce_group(group, reduce_op, stream_mode);
}
LIMITS(aclnnMatmulAllReduceV2, T, x1, T, x2, T, bias, T, x3, CP, group, CP, reduce_op, int64_t, comm_turn,
       int64_t, stream_mode, O, out) {
  operands(x1, x2, bias, out, 3);
  unquantized(x1, x2);
  all_reduce_shape(x1, x2->size(1), out);
  require_same_dtype(x3, "x3", x1, "x1");
  require_shape(x3, "x3", out->sizes());
  all_reduce_group(group, reduce_op, stream_mode);
}
LIMITS(aclnnWeightQuantMatmulAllReduce, T, x1, T, x2, T, bias, T, scale, T, offset, T, x3, CP, group, CP,
       reduce_op, int64_t, comm_turn, int64_t, stream_mode, int64_t, group_size, O, out) {
  operands(x1, x2, bias, out, 3);
  require_given(scale, "antiquantScale");
  require_dtype(x2, "x2", {kInt8, kInt32});
  require_same_dtype(scale, "antiquantScale", x1, "x1");
  require_same_dtype(offset, "antiquantOffset", x1, "x1");
  if (offset) require_shape(offset, "antiquantOffset", scale->sizes());
  require_same_dtype(x3, "x3", x1, "x1");
  require_shape(x3, "x3", out->sizes());
  const int64_t k = x1->size(-1), n = out->size(-1);
  require(k <= 65535 && n >= 1 && n <= 65535, "k and n must be in [1, 65535], they are ", k, " and ", n);
  require(group_size == 0 || (group_size % 32 == 0 && group_size >= 32 && group_size <= k - 1),
          "antiquantGroupSize ", group_size, ": 0 or a multiple of 32 in [32, k - 1], k is ", k);
  if (group_size) require_shape(scale, "antiquantScale", {(k + group_size - 1) / group_size, n});
  if (!group_size)
    require(scale->numel() == 1 || scale->numel() == n, "antiquantScale has ", scale->numel(), " values");
  all_reduce_shape(x1, n, out);
  all_reduce_group(group, reduce_op, stream_mode);
}

static void with_norm(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& bias,
                      const TensorHandle& residual, const TensorHandle& gamma, const TensorHandle& normed,
                      CP group, CP reduce_op, int64_t stream_mode) {
  require_given(residual, "residual");
  require_given(gamma, "gamma");
  require_given(normed, "normOut");
  operands(x1, x2, bias, normed, 3);
  unquantized(x1, x2);
  require_axes(residual, "residual", 3, 3);
  require_same_dtype(residual, "residual", x1, "x1");
  require_same_dtype(gamma, "gamma", x1, "x1");
  require_shape(gamma, "gamma", {x2->size(1)});
  require(row_count(x1) == residual->size(0) * residual->size(1) && residual->size(2) == x2->size(1),
          "residual has shape ", residual->sizes(), ", x1 @ x2 has ", row_count(x1), " rows of ",
          x2->size(1));
  require_shape(normed, "normOut", residual->sizes());
  all_reduce_group(group, reduce_op, stream_mode);
}
LIMITS(aclnnMatmulAllReduceAddRmsNorm, T, x1, T, x2, T, bias, T, residual, T, gamma, double, eps, CP, group,
       CP, reduce_op, int64_t, comm_turn, int64_t, stream_mode, O, y, O, normed) {
  require_given(y, "y");
  with_norm(x1, x2, bias, residual, gamma, normed, group, reduce_op, stream_mode);
  require_same_dtype(y, "y", x1, "x1");
  require_shape(y, "y", residual->sizes());
}
LIMITS(aclnnInplaceMatmulAllReduceAddRmsNorm, T, x1, T, x2, T, bias, R, residual, T, gamma, double, eps, CP,
       group, CP, reduce_op, int64_t, comm_turn, int64_t, stream_mode, O, normed) {
  with_norm(x1, x2, bias, residual, gamma, normed, group, reduce_op, stream_mode);
}

static void gather_shapes(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& bias,
                          const TensorHandle& out, CP group, int64_t stream_mode) {
  operands(x1, x2, bias, out, 2);
  unquantized(x1, x2);
  require(x1->size(1) >= 256 && x1->size(1) < 65535, "k is ", x1->size(1), ": 256 to 65534");
  require(!bias || bias->numel() == 0, "bias is not supported");
  gather_group(group, stream_mode);
}
LIMITS(aclnnAllGatherMatmul, T, x1, T, x2, T, bias, CP, group, int64_t, gather_index, int64_t, comm_turn,
       int64_t, stream_mode, O, out, O, gathered) {
  gather_shapes(x1, x2, bias, out, group, stream_mode);
  require(gather_index == 0, "gatherIndex ", gather_index, ": 0");
  const int64_t rows = x1->size(0) * ranks_of(group);
  require_shape(out, "output", {rows, x2->size(1)});
  if (gathered && gathered->numel()) require_shape(gathered, "gatherOut", {rows, x1->size(1)});
}
LIMITS(aclnnMatmulReduceScatter, T, x1, T, x2, T, bias, CP, group, CP, reduce_op, int64_t, comm_turn, int64_t,
       stream_mode, O, out) {
  gather_shapes(x1, x2, bias, out, group, stream_mode);
  require(reduce_op && std::string(reduce_op) == "sum", "reduceOp '", reduce_op ? reduce_op : "", "': sum");
  require(x1->size(0) % ranks_of(group) == 0, "m is ", x1->size(0), ", it must be divisible by the ",
          ranks_of(group), " ranks");
  require_shape(out, "output", {x1->size(0) / ranks_of(group), x2->size(1)});
}
