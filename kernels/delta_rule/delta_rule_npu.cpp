// The gated delta rule over prompts as an aclnn operator.
//
// aclnnChunkGatedDeltaRule (CANN 9.1; A2 and A3) takes bf16 with a state in fp32, at most 64 heads of at most 128, and
// decays of -1 <= g <= 0. Made around it are the tokens of all sequences in one row, and the states as [v_dim, k_dim],
// a launch each way. The limit on g is one on values: they are looked at, which waits for the device once a prompt, and
// cannot be done while a graph is captured. Keys it takes in bf16 only: those that are to be normalized would be rounded
// once more, which shows in the state (4e-3 of it, where the reference has 2e-7), so these calls are the reference's.
//
// aclnnRecurrentGatedDeltaRule (8.5) keeps the state in bf16, from token to token. Ours is in fp32, as the models' is:
// it serves no call, and single tokens run as the reference.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "delta_rule/delta_rule_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// query, key, value, beta, initialState, actualSeqLengths, g, scaleValue, out, finalState
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor> kChunk{
    "aclnnChunkGatedDeltaRule"};

constexpr int64_t kMostHeads = 64, kWidestHead = 128;

// What the arguments say without their values.
Refusal refusal_of(const at::Tensor& key, const at::Tensor& value, const at::Tensor& beta, bool normalize) {
  if (value.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (value.scalar_type() != at::kBFloat16) return "not bf16";
  if (beta.scalar_type() != at::kBFloat16) return "beta in fp32";
  if (normalize) return "normalized keys, which would be rounded to bf16";
  if (value.size(2) > kMostHeads) return "more than 64 heads";
  if (key.size(3) > kWidestHead || value.size(3) > kWidestHead) return "heads of more than 128";
  return kChunk.available() ? kServed : "not in this CANN";
}

// Whether the operator is documented for these decays.
Refusal decays_refusal(const at::Tensor& g) {
  if (npu::is_capturing()) return "decays cannot be looked at while a graph is captured";
  const auto [least, most] = at::aminmax(g);
  const bool within = least.item<double>() >= -1.0 && most.item<double>() <= 0.0;
  return within ? kServed : "a decay beyond -1 <= g <= 0";
}

// [batch, tokens, ...] as [batch * tokens, ...].
at::Tensor in_one_row(const at::Tensor& tensor) { return tensor.contiguous().flatten(0, 1); }

std::tuple<at::Tensor, at::Tensor> chunk_gated_delta_rule_npu(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value, const at::Tensor& g,
                                                              const at::Tensor& beta,
                                                              const OptionalTensor& initial_state,
                                                              double scaling, bool normalize) {
  constexpr const char* op = "chunk_gated_delta_rule";
  check_chunk_gated_delta_rule(query, key, value, g, beta, initial_state);
  const c10::DeviceGuard guard(value.device());
  Refusal refusal = refusal_of(key, value, beta, normalize);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(value.scalar_type()));
  if (refusal == kServed) refusal = decays_refusal(g);
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(chunk_gated_delta_rule_npu)>(op, why).call(query, key, value, g, beta,
                                                                         initial_state, scaling, normalize);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> std::tuple<at::Tensor, at::Tensor> {
        const int64_t batch = value.size(0), tokens = value.size(1);
        const std::vector<int64_t> turned{batch, value.size(2), value.size(3), key.size(3)};
        const auto state_options = value.options().dtype(at::kFloat);
        const at::Tensor from = initial_state.has_value() ? initial_state->transpose(2, 3).contiguous()
                                                          : at::zeros(turned, state_options);
        const at::Tensor lengths = at::full({batch}, tokens, value.options().dtype(at::kInt));
        const at::Tensor out = at::empty(value.sizes(), value.options());
        const at::Tensor to = at::empty(turned, state_options);
        kChunk(in_one_row(query), in_one_row(key), in_one_row(value), in_one_row(beta), from, lengths,
               in_one_row(g.to(at::kFloat)), static_cast<float>(scaling), out.flatten(0, 1), to);
        return {out, to.transpose(2, 3).contiguous()};
      },
      reference);
}

at::Tensor recurrent_gated_delta_rule_npu(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const at::Tensor& g,
                                          const at::Tensor& beta, const at::Tensor& state, double scaling,
                                          bool normalize) {
  constexpr const char* op = "recurrent_gated_delta_rule";
  check_recurrent_gated_delta_rule(query, key, value, g, beta, state);
  return fall_back<decltype(recurrent_gated_delta_rule_npu)>(op, "CANN's operator keeps the state in bf16")
      .call(query, key, value, g, beta, state, scaling, normalize);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("chunk_gated_delta_rule", &liteboost::chunk_gated_delta_rule_npu);
  m.impl("recurrent_gated_delta_rule", &liteboost::recurrent_gated_delta_rule_npu);
}
