// attention_part as FusedInferAttentionScore, which returns the logarithms of the sums beside its output.
//
// The operator rounds its output to the dtype of the queries; it is given in fp32 as by any attention_part. A query
// that sees no key has an output of 0 and -inf, whatever the operator gives.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "attention/attention_checks.h"
#include "attention/attention_npu_launch.h"

namespace liteboost {
namespace {

using npu::kServed;
using npu::Refusal;
constexpr const char* kOp = "attention_part";

Refusal part_refusal_of(const Call& call) {
  if (!call.is_half()) return "fp32";
  if (call.hides() == Hides::shift) return "a float mask";
  const Refusal refusal = refusal_of(call);
  if (refusal != kServed) return refusal;
  const bool has_triangle = !call.is_diagonal() || triangle(call.query.device()).defined();
  return has_triangle ? kServed : "no causal mask can be made while a graph is captured";
}

Plan plan_of(const Call& call, bool within_cache) {
  // Of several queries the operator wants masks for the whole cache: more to write than there is to copy.
  return plan(call.query, call.keys, within_cache && (!call.mask.defined() || call.is_one()), false);
}

std::string kind(const Call& call, const Plan& plan) {
  std::string text = npu::dtype_name(call.query.scalar_type());
  text += call.is_one() ? " decode" : " prefill";
  if (call.mask.defined()) text += " mask";
  if (call.is_causal) text += " causal";
  if (plan.has_lengths()) text += " cache";
  if (call.has_narrow_values()) text += " narrow-values";
  return text + sizes_kind(call.keys.value.size(3), call.keys.length());
}

std::tuple<at::Tensor, at::Tensor> fused(const Call& call, const Plan& plan) {
  const at::Tensor& query = call.query;
  const at::Tensor out =
      at::empty({query.size(0), query.size(2), query.size(1), call.keys.value.size(3)}, query.options());
  const Operands on = operands(plan, query, call.keys, out);
  const Hiding how = hiding(call, on.key.size(position_axis(plan.order)));
  const bool is_masked = call.hides() == Hides::mask;
  const Precision precise = is_masked && call.can_repair() ? kPreciseAndRepaired : kPrecise;
  at::Tensor lse = infer(call, on, how, at::Tensor(), precise, true).squeeze(-1);
  at::Tensor wide = out.to(at::kFloat);
  if (is_masked) {
    const at::Tensor unseeing = how.hidden.all(-1);  // [B or 1, N or 1, q_len]
    wide.masked_fill_(unseeing.transpose(1, 2).unsqueeze(-1), 0.0);
    lse.masked_fill_(unseeing, -std::numeric_limits<float>::infinity());
  }
  return {wide, lse.transpose(1, 2).contiguous()};
}

std::tuple<at::Tensor, at::Tensor> attention_part_npu(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const OptionalTensor& mask,
                                                      double scaling, bool is_causal, double softcap) {
  check_attention(kOp, query, key, value, mask, scaling, is_causal, 0, softcap, std::nullopt);
  const c10::DeviceGuard guard(query.device());
  const Call call = call_of(query, key, value, mask, scaling, is_causal, 0, softcap, std::nullopt);
  Refusal refusal = part_refusal_of(call);
  Plan plan;
  if (refusal == kServed) {
    plan = plan_of(call, true);
    refusal = npu::unverified(kOp, kind(call, plan));
    if (refusal != kServed && plan.has_lengths()) {  // the operator may be right of copies all the same
      plan = plan_of(call, false);
      refusal = npu::unverified(kOp, kind(call, plan));
    }
  }
  const auto reference = [&](Refusal why) {
    return npu::fall_back<decltype(attention_part_npu)>(kOp, why).call(query, key, value, mask, scaling,
                                                                       is_causal, softcap);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      kOp, [&]() -> std::tuple<at::Tensor, at::Tensor> { return fused(call, plan); }, reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("attention_part", &liteboost::attention_part_npu); }
