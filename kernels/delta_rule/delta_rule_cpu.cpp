#include "delta_rule/delta_rule.h"

#include <torch/library.h>

#include <memory>
#include <tuple>

#include "common/batch_invariant.h"
#include "common/parallel.h"
#include "common/tensors.h"
#include "delta_rule/delta_rule_checks.h"

namespace liteboost {
namespace {

DeltaRuleStrides strides_of(const at::Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.dim() > 3 ? tensor.stride(3) : 1};
}

// Both states contiguous; `from` may be undefined, or `state` itself.
at::Tensor run(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& g,
               const at::Tensor& beta, const at::Tensor& from, const at::Tensor& state, double scaling,
               bool normalize) {
  at::Tensor out = empty_cpu(value.sizes(), value.scalar_type());
  if (state.numel() == 0) {
    // Without k_dim nothing is remembered; without v_dim or heads there is no output.
    return out.zero_();
  }
  DeltaRuleArgs args;
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.g = g.const_data_ptr();
  args.beta = beta.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.state_from = from.defined() ? from.const_data_ptr<float>() : nullptr;
  args.state = state.mutable_data_ptr<float>();
  args.query_strides = strides_of(query);
  args.key_strides = strides_of(key);
  args.value_strides = strides_of(value);
  args.g_strides = strides_of(g);
  args.beta_strides = strides_of(beta);
  args.tokens = value.size(1);
  args.k_heads = key.size(2);
  args.v_heads = value.size(2);
  args.k_dim = key.size(3);
  args.v_dim = value.size(3);
  args.dtype = dtype_of(value);
  args.g_dtype = dtype_of(g);
  args.beta_dtype = dtype_of(beta);
  args.scaling = static_cast<float>(scaling);
  args.normalize = normalize;
  args.order = is_length_invariant() ? order_of(args.tokens) : Order::fastest;

  const DeltaRuleKernels& kernels = LB_KERNELS(delta_rule_kernels);
  const int64_t work = (args.tokens + 1) * args.k_dim * args.v_dim;
  parallel_rows(value.size(0) * args.v_heads, work, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[kernels.scratch_floats(args)]);
    kernels.run(args, scratch.get(), begin, end);
  });
  return out;
}

at::Tensor recurrent_gated_delta_rule_cpu(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const at::Tensor& g,
                                          const at::Tensor& beta, const at::Tensor& state, double scaling,
                                          bool normalize) {
  check_recurrent_gated_delta_rule(query, key, value, g, beta, state);
  if (!state.is_contiguous() || state.scalar_type() != at::kFloat) {
    const at::Tensor copy = state.to(at::kFloat).contiguous();
    at::Tensor out = run(query, key, value, g, beta, copy, copy, scaling, normalize);
    state.copy_(copy);
    return out;
  }
  // What autograd has kept of the state is no longer what it was.
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return run(query, key, value, g, beta, state, state, scaling, normalize);
}

std::tuple<at::Tensor, at::Tensor> chunk_gated_delta_rule_cpu(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value, const at::Tensor& g,
                                                              const at::Tensor& beta,
                                                              const std::optional<at::Tensor>& initial_state,
                                                              double scaling, bool normalize) {
  check_chunk_gated_delta_rule(query, key, value, g, beta, initial_state);
  at::Tensor state = empty_cpu({value.size(0), value.size(2), key.size(3), value.size(3)}, at::kFloat);
  const at::Tensor from = initial_state.has_value() ? initial_state->contiguous() : at::Tensor();
  at::Tensor out = run(query, key, value, g, beta, from, state, scaling, normalize);
  return {std::move(out), std::move(state)};
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) {
  m.impl("recurrent_gated_delta_rule", &liteboost::recurrent_gated_delta_rule_cpu);
  m.impl("chunk_gated_delta_rule", &liteboost::chunk_gated_delta_rule_cpu);
}
