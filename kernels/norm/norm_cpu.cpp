#include <ATen/ops/fill.h>
#include <torch/library.h>

#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "common/parallel.h"
#include "common/tensors.h"
#include "norm/norm_checks.h"

namespace liteboost {
namespace {

// A weight or bias as one run of elements; undefined stays undefined.
at::Tensor vector_of(const std::optional<at::Tensor>& parameter) {
  return parameter.has_value() && parameter->defined() ? parameter->contiguous() : at::Tensor();
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

DType dtype_or(const at::Tensor& tensor, DType otherwise) {
  return tensor.defined() ? dtype_of(tensor) : otherwise;
}

// The common part of rms_norm and add_rms_norm; `residual` and `sum` are null in the former.
void run_rms_norm(const at::Tensor& x, const at::Tensor* residual, const std::optional<at::Tensor>& weight,
                  double eps, double weight_offset, bool late, at::Tensor& out, at::Tensor* sum) {
  if (x.numel() == 0) return;
  const Rows rows = rows_of(x, /*unit_step=*/true);
  const at::Tensor w = vector_of(weight);
  Rows residual_rows{};
  if (residual != nullptr) residual_rows = rows_of(*residual, /*unit_step=*/true);
  RmsNormArgs args;
  args.x = rows.data;
  args.residual = residual_rows.data;
  args.weight = data_or_null(w);
  args.out = out.mutable_data_ptr();
  args.sum = sum == nullptr ? nullptr : sum->mutable_data_ptr();
  args.cols = rows.size;
  args.weight_rows = w.defined() && w.dim() == 2 ? w.size(0) : 1;
  args.x_stride = rows.stride;
  args.residual_stride = residual_rows.stride;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dtype = dtype_of(x);
  args.weight_dtype = dtype_or(w, args.dtype);
  args.late = late;
  const auto run = LB_KERNELS(norm_kernels).rms_norm;
  parallel_rows(rows.count, rows.size, [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

at::Tensor rms_norm_cpu(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                        double weight_offset, bool late) {
  check_rms_norm("rms_norm", x, weight, eps);
  at::Tensor out = empty_cpu(x.sizes(), late ? x.scalar_type() : promoted(x, weight));
  run_rms_norm(x, nullptr, weight, eps, weight_offset, late, out, nullptr);
  return out;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_cpu(const at::Tensor& x, const at::Tensor& residual,
                                                    const std::optional<at::Tensor>& weight, double eps,
                                                    double weight_offset, bool late) {
  check_rms_norm("add_rms_norm", x, weight, eps);
  check_residual(x, residual);
  at::Tensor out = empty_cpu(x.sizes(), late ? x.scalar_type() : promoted(x, weight));
  at::Tensor sum = empty_cpu(x.sizes(), x.scalar_type());
  run_rms_norm(x, &residual, weight, eps, weight_offset, late, out, &sum);
  return {std::move(out), std::move(sum)};
}

at::Tensor gated_rms_norm_cpu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps, c10::string_view activation, bool gate_first, bool late,
                              int64_t group_size) {
  GatedRmsNormArgs args;
  args.activation = check_gated_rms_norm(x, gate, weight, eps, activation, gate_first, group_size);
  at::Tensor out = empty_cpu(x.sizes(), gate_first && !late ? weight.scalar_type() : x.scalar_type());
  if (x.numel() == 0) return out;
  const Rows rows = rows_of(x, /*unit_step=*/true);
  const Rows gates = rows_of(gate, /*unit_step=*/true);
  const at::Tensor w = weight.contiguous();
  args.x = rows.data;
  args.gate = gates.data;
  args.weight = w.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.cols = rows.size;
  args.group_size = group_size == 0 ? rows.size : group_size;
  args.x_stride = rows.stride;
  args.gate_stride = gates.stride;
  args.eps = static_cast<float>(eps);
  args.dtype = dtype_of(x);
  args.weight_dtype = dtype_of(w);
  args.gate_first = gate_first;
  args.late = late;
  const auto run = LB_KERNELS(norm_kernels).gated_rms_norm;
  parallel_rows(rows.count, 4 * rows.size, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[args.cols]);
    run(args, scratch.get(), begin, end);
  });
  return out;
}

at::Tensor inverse_rms_cpu(const at::Tensor& x, double eps) {
  check_inverse_rms(x, eps);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  at::Tensor out = empty_cpu(sizes, x.scalar_type());
  // The mean of no elements; `out` is empty too where there are no rows.
  if (x.numel() == 0) return at::fill_(out, std::numeric_limits<double>::quiet_NaN());
  const Rows rows = rows_of(x, /*unit_step=*/true);
  InverseRmsArgs args;
  args.x = rows.data;
  args.out = out.mutable_data_ptr();
  args.cols = rows.size;
  args.x_stride = rows.stride;
  args.eps = static_cast<float>(eps);
  args.dtype = dtype_of(x);
  const auto run = LB_KERNELS(norm_kernels).inverse_rms;
  parallel_rows(rows.count, rows.size, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

at::Tensor layer_norm_cpu(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                          const std::optional<at::Tensor>& bias, double eps) {
  check_layer_norm(x, weight, bias, eps);
  at::Tensor out = empty_cpu(x.sizes(), x.scalar_type());
  if (x.numel() == 0) return out;
  const Rows rows = rows_of(x, /*unit_step=*/true);
  const at::Tensor w = vector_of(weight), b = vector_of(bias);
  LayerNormArgs args;
  args.x = rows.data;
  args.weight = data_or_null(w);
  args.bias = data_or_null(b);
  args.out = out.mutable_data_ptr();
  args.cols = rows.size;
  args.x_stride = rows.stride;
  args.eps = static_cast<float>(eps);
  args.dtype = dtype_of(x);
  args.weight_dtype = dtype_or(w, dtype_or(b, args.dtype));
  const auto run = LB_KERNELS(norm_kernels).layer_norm;
  parallel_rows(rows.count, rows.size, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("rms_norm", &liteboost::rms_norm_cpu);
  m.impl("add_rms_norm", &liteboost::add_rms_norm_cpu);
  m.impl("gated_rms_norm", &liteboost::gated_rms_norm_cpu);
  m.impl("inverse_rms", &liteboost::inverse_rms_cpu);
  m.impl("layer_norm", &liteboost::layer_norm_cpu);
}
