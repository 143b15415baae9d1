#include <torch/library.h>

#include <limits>

#include "activation/activation_checks.h"
#include "activation/activation_cpu.h"
#include "common/parallel.h"
#include "common/tensors.h"

namespace liteboost {

at::Tensor gated_activation_cpu(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                double alpha, std::optional<double> limit, double up_offset) {
  const Activation kind = check_gated_activation(gate, up, activation, alpha, limit);
  at::Tensor out = empty_cpu(gate.sizes(), gate.scalar_type());
  const int64_t count = out.numel();
  if (count == 0) return out;

  const Rows gates = rows_of(gate, /*unit_step=*/false);
  const Rows ups = rows_of(up, /*unit_step=*/false);
  // Contiguous arguments are one long row: no tail at the end of each.
  const bool flat = gates.contiguous() && ups.contiguous();
  GatedActivationArgs args;
  args.gate = gates.data;
  args.up = ups.data;
  args.out = out.mutable_data_ptr();
  args.cols = flat ? count : gates.size;
  args.gate_stride = gates.stride;
  args.gate_step = gates.step;
  args.up_stride = ups.stride;
  args.up_step = ups.step;
  args.alpha = static_cast<float>(alpha);
  args.limit = limit.has_value() ? static_cast<float>(*limit) : std::numeric_limits<float>::infinity();
  args.up_offset = static_cast<float>(up_offset);
  args.dtype = dtype_of(gate);
  args.activation = kind;

  const auto run = LB_KERNELS(activation_kernels).gated_activation;
  parallel_rows(count, 1, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

namespace {

at::Tensor activation_cpu(const at::Tensor& x, c10::string_view activation, double alpha) {
  const Activation kind = check_activation(x, activation, alpha);
  at::Tensor out = empty_cpu(x.sizes(), x.scalar_type());
  const int64_t count = out.numel();
  if (count == 0) return out;

  const at::Tensor in = x.dim() == 0 ? x.unsqueeze(0) : x;
  const Rows rows = rows_of(in, /*unit_step=*/true);
  ActivationArgs args;
  args.x = rows.data;
  args.out = out.mutable_data_ptr();
  args.cols = rows.contiguous() ? count : rows.size;
  args.stride = rows.stride;
  args.alpha = static_cast<float>(alpha);
  args.dtype = dtype_of(x);
  args.activation = kind;

  const auto run = LB_KERNELS(activation_kernels).activation;
  parallel_rows(count, 1, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return out;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("activation", &liteboost::activation_cpu);
  m.impl("gated_activation", &liteboost::gated_activation_cpu);
}
