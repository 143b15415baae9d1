// Splits the outputs of head_linear over torch's threads; many rows in fp32 are torch's own product.
#include <ATen/ops/matmul.h>
#include <torch/library.h>

#include "head_linear/head_linear_checks.h"

#include "common/batch_invariant.h"
#include "common/parallel.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

// From this many rows of fp32 on, torch's product of matrices is faster than one row after the other.
constexpr int64_t kManyRows = 8;

bool steps_by_one(const at::Tensor& x, int64_t dim) { return x.size(dim) <= 1 || x.stride(dim) == 1; }

at::Tensor head_linear_cpu(const at::Tensor& x, const at::Tensor& weight) {
  check_head_linear(x, weight);
  const int64_t rows = x.size(0) * x.size(2);
  if (x.scalar_type() == at::kFloat && rows >= kManyRows && order_of(rows) == Order::fastest) {
    return at::matmul(x, weight.transpose(1, 2)).contiguous();
  }
  at::Tensor out = empty_cpu({x.size(0), x.size(1), x.size(2), weight.size(1)}, x.scalar_type());
  if (out.numel() == 0) return out;
  if (x.size(3) == 0) return out.zero_();

  const at::Tensor in = steps_by_one(x, 3) ? x : x.contiguous();
  const bool in_place = steps_by_one(weight, 1) || steps_by_one(weight, 2);
  const at::Tensor by_head = in_place ? weight : weight.contiguous();
  HeadLinearArgs args;
  args.x = in.const_data_ptr();
  args.weight = by_head.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.batch = in.size(0);
  args.heads = in.size(1);
  args.rows = in.size(2);
  args.inputs = in.size(3);
  args.outputs = by_head.size(1);
  for (int dim = 0; dim < 3; ++dim) args.x_strides[dim] = in.stride(dim);
  args.weight_stride = by_head.stride(0);
  // Of one output or input any step is right.
  args.output_step = by_head.size(1) == 1 ? 1 : by_head.stride(1);
  args.input_step = by_head.size(2) == 1 ? 1 : by_head.stride(2);
  args.dtype = dtype_of(x);

  const auto run = LB_KERNELS(head_linear_kernels).run;
  parallel_rows(args.heads * args.outputs, args.batch * args.rows * args.inputs,
                [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("head_linear", &liteboost::head_linear_cpu); }
