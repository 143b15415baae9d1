// What the products fused with a collective reject. Sources: ops-transformer, mc2/*/docs/*.md.
#include "../ops/collective.h"
#include "quantized.h"

using namespace sim;

static uint32_t ranks_of(CP group) {
  require(group && *group, "group is empty: pass the name HcclGetCommName gives");
  return rank_and_size(group).second;
}
static void all_reduce_group(CP group, CP reduce_op, int64_t stream_mode) {
  require(reduce_op && std::string(reduce_op) == "sum", "reduceOp '", reduce_op ? reduce_op : "", "': sum");
  require(stream_mode == 1, "streamMode ", stream_mode, ": 1");
  const uint32_t n = ranks_of(group);
  require(n == 1 || n == 2 || n == 4 || n == 8, n, " ranks: 1, 2, 4 or 8 are supported");
}
static void operands(const TensorHandle& x1, const TensorHandle& x2, const TensorHandle& bias,
                     const TensorHandle& out, int64_t most_axes) {
  require_all_given({{x1, "x1"}, {x2, "x2"}, {out, "output"}});
  require_dtype(x1, "x1", kSixteenBits);
  require_axes(x1, "x1", 2, most_axes);
  require_axes(x2, "x2", 2, 2);
  require_same_dtype(out, "output", x1, "x1");
  // k may be 0 (DoEmptyTensorTiling of the tiling, 8.5.0 to 9.1.0), and what is empty is no error since 9.0.0
  // (docs/aclnnMatmulAllReduce.md); before, CheckEmptyTensor of the tiling refuses it.
  require(out->numel() > 0 || release_is("9.0.0"), "output is empty");
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
