// Mixture of experts as aclnn operators.
//
// experts_linear: rows in the order of their experts (MoeInitRoutingV2), one product for each expert
// (GroupedMatmulV4), and back (IndexSelect). Nothing is asked of the device on the way, so an expert that does not
// exist is not found out here, as the CPU's kernel does.
// experts_combine: the scores of a token times what its experts made of it, a matrix product for each token.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "experts/experts_checks.h"
#include "experts/experts_npu.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kBatchMatMul{"aclnnBatchMatMul"};

constexpr int8_t kKeepDtype = 0;

Refusal linear_refusal(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& index) {
  const Refusal refusal = npu::products_refusal(x, weight, index);
  if (refusal != kServed) return refusal;
  return npu::kSort.available() ? kServed : "not in this CANN";
}

at::Tensor experts_linear_npu(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                              const at::Tensor& index) {
  constexpr const char* op = "experts_linear";
  check_experts_linear(x, weight, bias, index);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = linear_refusal(x, weight, index);
  if (refusal == kServed) {
    const bool has_bias = bias.has_value() && bias->defined();
    refusal = npu::unverified(op, std::string(npu::dtype_name(x.scalar_type())) + (has_bias ? " bias" : ""));
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(experts_linear_npu)>(op, why).call(x, weight, bias, index);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op, [&]() -> at::Tensor { return npu::expert_products(x, weight, bias.value_or(at::Tensor()), index); },
      reference);
}

at::Tensor experts_combine_npu(const at::Tensor& y, const at::Tensor& scores) {
  constexpr const char* op = "experts_combine";
  check_experts_combine(y, scores);
  const c10::DeviceGuard guard(y.device());
  Refusal refusal = kServed;
  if (y.numel() == 0) refusal = "no elements";
  if (npu::soc() == npu::Soc::a310p && (y.scalar_type() != at::kHalf || scores.scalar_type() != at::kHalf)) {
    refusal = "not fp16 on a 310P";
  }
  if (refusal == kServed && !kBatchMatMul.available()) refusal = "not in this CANN";
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(y.scalar_type()));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(experts_combine_npu)>(op, why).call(y, scores);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        // fp32 scores are not rounded: the operator wants one dtype, and y is widened to theirs.
        const at::Tensor states = y.to(scores.scalar_type());
        const at::Tensor out = at::empty({y.size(0), 1, y.size(2)}, states.options());
        kBatchMatMul(scores.unsqueeze(1), states, out, kKeepDtype);
        return out.squeeze(1).to(y.scalar_type());
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("experts_linear", &liteboost::experts_linear_npu);
  m.impl("experts_combine", &liteboost::experts_combine_npu);
}
