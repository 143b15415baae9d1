// The gated delta rule on an NPU: over prompts as an aclnn operator, over one token as ten, or as two.
//
// aclnnChunkGatedDeltaRule (CANN 9.1; A2 and A3) takes bf16 with a state in fp32, at most 64 heads of at most 128, and
// decays of -1 <= g <= 0. Made around it are the tokens of all sequences in one row, and the states as [v_dim, k_dim],
// a launch each way. The limit on g is one on values: they are looked at, which waits for the device once a prompt, and
// cannot be done while a graph is captured. Keys it takes in bf16 only: those that are to be normalized would be rounded
// once more, which shows in the state (4e-3 of it, where the reference has 2e-7), so these calls are the reference's.
//
// aclnnRecurrentGatedDeltaRule (8.5) keeps the state in bf16, from token to token. A state in bf16 that lies as it reads
// it, [v_dim, k_dim], is given to it, behind a norm that divides query and key by their lengths and rounds them. A state in
// fp32, as the models' is, takes ten launches: the inputs to fp32, the lengths of query and key, exp(g), S^T k, the
// correction and its rate, the decay, the update, S^T q, and the rounding. Query heads are not repeated: a product
// broadcasts them. Releases behind 9.1 take states in fp32 as well (op_host/recurrent_gated_delta_rule_def.cpp of master).
#include <ATen/DeviceGuard.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "delta_rule/delta_rule_checks.h"
#include "npu/aclnn.h"
#include "npu/kept.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

// query, key, value, beta, initialState, actualSeqLengths, g, scaleValue, out, finalState
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor> kChunk{
    "aclnnChunkGatedDeltaRule"};
// query, key, value, beta, stateRef, actualSeqLengths, ssmStateIndices, g, gk, numAcceptedTokens, scaleValue, out
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float,
                    Tensor>
    kRecurrent{"aclnnRecurrentGatedDeltaRule"};
// x, gamma, epsilon, out, rstd
const npu::Operator<Tensor, Tensor, double, Tensor, Tensor> kRmsNorm{"aclnnRmsNorm"};
// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kMatmul{"aclnnMatmul"};

constexpr int8_t kKeepDtype = 0;
constexpr double kEps = 1e-6;  // EPS of ops/delta_rule.py

constexpr int64_t kMostHeads = 64, kWidestHead = 128;

// What the arguments say without their values.
Refusal refusal_of(const at::Tensor& key, const at::Tensor& value, const at::Tensor& beta, bool normalize) {
  if (value.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (npu::soc() == npu::Soc::a950) return "on a 950";
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

// Numbers of sequences, 0 to rows - 1, and behind them as many ones: [2, rows] of int32.
at::Tensor rows_of(const at::Device& device, int64_t rows) {
  static auto* kept = new npu::Kept<std::pair<int, int64_t>>;
  return kept->get({device.index(), rows}, [&] {
    const auto options = at::TensorOptions().device(device).dtype(at::kInt);
    return at::stack({at::arange(rows, options), at::ones({rows}, options)});
  });
}

// A weight that makes of a norm the division by the length, times `scaling`; undefined where none can be made.
at::Tensor length_weight(const at::Tensor& key, double scaling) {
  static auto* kept = new npu::Kept<std::tuple<int, int64_t, double>>;
  const int64_t size = key.size(3);
  return kept->get({key.device().index(), size, scaling}, [&] {
    return at::full({size}, scaling / std::sqrt(static_cast<double>(size)), key.options().dtype(at::kFloat));
  });
}

constexpr int64_t kMostStepHeads = 256, kWidestStepHead = 512;

// What the operator over tokens does not take, of a state in bf16.
Refusal short_state_refusal(const at::Tensor& key, const at::Tensor& value, const at::Tensor& state,
                            bool normalize) {
  if (value.size(1) != 1) return "several tokens";
  if (!normalize) return "keys that are not normalized";
  if (value.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (value.scalar_type() != at::kBFloat16) return "a state in bf16 beside another dtype";
  if (!state.transpose(2, 3).is_contiguous()) return "a state in bf16 that does not lie as the operator's";
  if (value.size(2) > kMostStepHeads) return "more than 256 heads";
  if (key.size(3) > kWidestStepHead || value.size(3) > kWidestStepHead) return "heads of more than 512";
  if (!kRmsNorm.available() || !kRecurrent.available()) return "not in this CANN";
  const bool has_weight = length_weight(key, 1.0).defined() && rows_of(key.device(), value.size(0)).defined();
  return has_weight ? kServed : "no weight can be made while a graph is captured";
}

Refusal step_refusal(const at::Tensor& key, const at::Tensor& value, const at::Tensor& state, double scaling,
                     bool normalize) {
  if (value.size(1) != 1) return "several tokens";
  if (!normalize) return "keys that are not normalized";
  if (!(scaling > 0.0)) return "a scaling that is not above 0";  // divided by
  if (value.numel() == 0 || key.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "on a 310P";
  if (value.scalar_type() == at::kDouble || state.scalar_type() != at::kFloat) return "float64";
  if (!kRmsNorm.available() || !kMatmul.available()) return "not in this CANN";
  return length_weight(key, scaling).defined() ? kServed : "no weight can be made while a graph is captured";
}

// Query, key and value of each sequence in a row, [batch, columns]: no launch where they lie so.
at::Tensor one_row(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const int64_t keys = key.size(2) * key.size(3), values = value.size(2) * value.size(3);
  const auto is_at = [&](const at::Tensor& part, int64_t column) {
    return part.storage().is_alias_of(query.storage()) &&
           part.storage_offset() == query.storage_offset() + column &&
           (part.size(0) == 1 || part.stride(0) == query.stride(0)) && part.select(0, 0).is_contiguous();
  };
  if (is_at(query, 0) && is_at(key, keys) && is_at(value, 2 * keys)) {
    return query.as_strided({query.size(0), 2 * keys + values}, {query.stride(0), 1});
  }
  return at::cat({query.flatten(1), key.flatten(1), value.flatten(1)}, 1);
}

// One token; keys and queries are `scaling` times theirs, which the two corrections take out of the keys again.
at::Tensor stepped(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& g, const at::Tensor& beta, const at::Tensor& state, double scaling) {
  const int64_t batch = key.size(0), heads = key.size(2), k_dim = key.size(3), v_dim = value.size(3);
  const int64_t group = value.size(2) / heads;
  const at::Tensor row = one_row(query, key, value).to(at::kFloat);
  const at::Tensor raw = row.narrow(1, 0, 2 * heads * k_dim).unflatten(1, {2 * heads, k_dim});
  const at::Tensor normed = at::empty(raw.sizes(), row.options());
  const at::Tensor factors = at::empty({batch, 2 * heads, 1}, row.options());
  kRmsNorm(raw, length_weight(key, scaling), kEps / static_cast<double>(k_dim), normed, factors);
  const at::Tensor q = normed.narrow(1, 0, heads).reshape({batch, heads, 1, 1, k_dim});
  const at::Tensor k = normed.narrow(1, heads, heads).view({batch, heads, 1, 1, k_dim});
  const at::Tensor v =
      row.narrow(1, 2 * heads * k_dim, value.size(2) * v_dim).view({batch, heads, group, 1, v_dim});
  const std::vector<int64_t> by_head{batch, heads, group, 1, 1};
  const at::Tensor decay = at::exp(g.to(at::kFloat)).reshape(by_head);
  const at::Tensor memory = state.unflatten(1, {heads, group});
  const at::Tensor product = at::empty({batch, heads, group, 1, v_dim}, row.options());
  kMatmul(k, memory, product, kKeepDtype);
  at::Tensor delta = at::addcmul(v, product, decay, -1.0 / scaling);
  delta.mul_(beta.reshape(by_head));
  // Written from here on: what is refused in its first phase has been refused above.
  memory.mul_(decay).addcmul_(k.transpose(3, 4), delta, 1.0 / scaling);
  kMatmul(q, memory, product, kKeepDtype);
  return product.view(value.sizes()).to(value.scalar_type());
}

// One token, of a state in bf16. Query and key are parts of one row where they lie so, which the norm reads as it is.
at::Tensor stepped_in_bf16(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& g, const at::Tensor& beta, const at::Tensor& state,
                           double scaling) {
  const int64_t batch = key.size(0), heads = key.size(2), k_dim = key.size(3);
  const at::Tensor raw =
      one_row(query, key, value).narrow(1, 0, 2 * heads * k_dim).unflatten(1, {2 * heads, k_dim});
  const at::Tensor normed = at::empty(raw.sizes(), raw.options());
  const at::Tensor factors = at::empty({batch, 2 * heads, 1}, raw.options().dtype(at::kFloat));
  kRmsNorm(raw, length_weight(key, 1.0), kEps / static_cast<double>(k_dim), normed, factors);
  const at::Tensor rows = rows_of(key.device(), batch), out = at::empty(value.sizes(), value.options()), none;
  kRecurrent(normed.narrow(1, 0, heads), normed.narrow(1, heads, heads), value.select(1, 0),
             beta.select(1, 0).to(at::kBFloat16), state.transpose(2, 3), rows[1], rows[0],
             g.select(1, 0).to(at::kFloat), none, none, static_cast<float>(scaling), out.select(1, 0));
  return out;
}

at::Tensor recurrent_gated_delta_rule_npu(const at::Tensor& query, const at::Tensor& key,
                                          const at::Tensor& value, const at::Tensor& g,
                                          const at::Tensor& beta, const at::Tensor& state, double scaling,
                                          bool normalize) {
  constexpr const char* op = "recurrent_gated_delta_rule";
  check_recurrent_gated_delta_rule(query, key, value, g, beta, state);
  const c10::DeviceGuard guard(value.device());
  const bool is_short = state.scalar_type() == at::kBFloat16;
  Refusal refusal = is_short ? short_state_refusal(key, value, state, normalize)
                             : step_refusal(key, value, state, scaling, normalize);
  if (refusal == kServed) {
    refusal = npu::unverified(
        op, npu::dtype_name(value.scalar_type()) + std::string(is_short ? " bf16-state" : ""));
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(recurrent_gated_delta_rule_npu)>(op, why).call(query, key, value, g, beta,
                                                                             state, scaling, normalize);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        return is_short ? stepped_in_bf16(query, key, value, g, beta, state, scaling)
                        : stepped(query, key, value, g, beta, state, scaling);
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("chunk_gated_delta_rule", &liteboost::chunk_gated_delta_rule_npu);
  m.impl("recurrent_gated_delta_rule", &liteboost::recurrent_gated_delta_rule_npu);
}
