#include <torch/library.h>

#include "quantize_weight/quantize_weight_checks.h"

#include "common/parallel.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

// What a weight costs, as parallel_rows counts: it is divided and rounded once for each candidate.
constexpr int64_t kWork = 16;

QuantizeWeightArgs args_of(const Rows& rows, const at::Tensor& weight, const at::Tensor& integers,
                           const at::Tensor& scales) {
  QuantizeWeightArgs args{};
  args.weight = rows.data;
  args.integers = integers.mutable_data_ptr();
  args.scales = scales.mutable_data_ptr();
  args.cols = rows.size;
  args.stride = rows.stride;
  args.group_size = rows.size;
  args.symmetric = true;
  args.dtype = dtype_of(weight);
  args.scale_dtype = dtype_of(scales);
  return args;
}

std::tuple<at::Tensor, at::Tensor> quantize_w8_cpu(const at::Tensor& weight, at::ScalarType scale_dtype) {
  check_quantize_w8(weight, scale_dtype);
  const Rows rows = rows_of(weight, /*unit_step=*/true);
  at::Tensor integers = empty_cpu(weight.sizes(), at::kChar);
  at::Tensor scales = empty_cpu({weight.size(0)}, scale_dtype);
  const QuantizeWeightArgs args = args_of(rows, weight, integers, scales);
  const auto run = LB_KERNELS(quantize_weight_kernels).w8;
  parallel_rows(weight.size(0), kWork * args.cols,
                [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return {integers, scales};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_w4_cpu(const at::Tensor& weight, int64_t group_size,
                                                               bool symmetric, at::ScalarType scale_dtype) {
  check_quantize_w4(weight, group_size, scale_dtype);
  const Rows rows = rows_of(weight, /*unit_step=*/true);
  const int64_t count = weight.size(0), groups = weight.size(1) / group_size;
  at::Tensor packed = empty_cpu({count, weight.size(1) / 2}, at::kByte);
  at::Tensor scales = empty_cpu({count, groups}, scale_dtype);
  at::Tensor zero_points = empty_cpu({count, groups}, at::kByte);
  QuantizeWeightArgs args = args_of(rows, weight, packed, scales);
  args.zero_points = zero_points.mutable_data_ptr<uint8_t>();
  args.group_size = group_size;
  args.symmetric = symmetric;
  const auto run = LB_KERNELS(quantize_weight_kernels).w4;
  parallel_rows(count, kWork * args.cols, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return {packed, scales, zero_points};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("quantize_w8", &liteboost::quantize_w8_cpu);
  m.impl("quantize_w4", &liteboost::quantize_w4_cpu);
}
