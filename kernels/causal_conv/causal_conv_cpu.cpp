#include "causal_conv/causal_conv.h"

#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <memory>

#include "causal_conv/causal_conv_checks.h"
#include "common/parallel.h"
#include "common/tensors.h"

namespace liteboost {
namespace {

CausalConvStrides strides_of(const at::Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// `state` may be null.
at::Tensor run(const at::Tensor& x, const at::Tensor* state, const at::Tensor& weight,
               const std::optional<at::Tensor>& bias, bool silu) {
  at::Tensor out = empty_cpu(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  CausalConvArgs args{};
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.x_strides = strides_of(x);
  args.weight_stride = weight.stride(0);
  args.tap_stride = weight.stride(1);
  if (bias.has_value()) {
    args.bias = bias->const_data_ptr();
    args.bias_stride = bias->stride(0);
  }
  if (state != nullptr && state->numel() > 0) {
    args.state = state->mutable_data_ptr();
    args.state_strides = strides_of(*state);
    args.state_length = state->size(2);
  }
  args.batch = x.size(0);
  args.channels = x.size(1);
  args.tokens = x.size(2);
  args.taps = weight.size(1);
  args.dtype = dtype_of(x);
  args.silu = silu;

  const CausalConvKernels& kernels = LB_KERNELS(causal_conv_kernels);
  const int64_t blocks = kernels.blocks(args);
  parallel_rows(blocks, out.numel() / blocks * (args.taps + 4), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[kernels.scratch_floats(args)]);
    kernels.run(args, scratch.get(), begin, end);
  });
  return out;
}

at::Tensor causal_conv1d_cpu(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, c10::string_view activation) {
  return run(x, nullptr, weight, bias, check_causal_conv1d(x, weight, bias, activation));
}

at::Tensor causal_conv1d_update_cpu(const at::Tensor& x, const at::Tensor& state, const at::Tensor& weight,
                                    const std::optional<at::Tensor>& bias, c10::string_view activation) {
  const bool silu = check_causal_conv1d_update(x, state, weight, bias, activation);
  at::assert_no_internal_overlap(state);
  // What autograd has kept of the state is no longer what it was.
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return run(x, &state, weight, bias, silu);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("causal_conv1d", &liteboost::causal_conv1d_cpu);
  m.impl("causal_conv1d_update", &liteboost::causal_conv1d_update_cpu);
}
