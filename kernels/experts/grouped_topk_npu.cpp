// _npu_grouped_topk: the experts of each token, of its best groups, and their scores (MoeGatingTopK), for recorded steps.
//
// Shapes, dtypes, rounding: ops/fused_experts.py. Limits: moe_gating_top_k_tiling.cpp in ops-transformer, CANN 8.5.0 to
// 9.1.0.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

// clang-format off
const npu::Operator<
    Tensor, Tensor,                          // x, bias
    int64_t, int64_t, int64_t, int64_t,      // k, kGroup, groupCount, groupSelectMode
    int64_t, int64_t, bool,                  // renorm, normType, outFlag
    double, double,                          // routedScalingFactor, eps
    Tensor, Tensor, Tensor>                  // y, expertIdx, out
    kGroupedTopK{"aclnnMoeGatingTopK"};
// clang-format on

constexpr int64_t kMostExperts = 2048, kPaddedTo = 32, kBestTwo = 1, kNotRenormalized = 0, kSigmoid = 1;

Refusal refusal_of(const at::Tensor& logits, const at::Tensor& bias, int64_t k, int64_t groups,
                   int64_t topk_group) {
  const int64_t experts = logits.size(1), size = experts / groups;
  if (logits.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (bias.scalar_type() == at::kDouble) return "a bias in fp64";
  if (size < 2) return "groups of one expert";
  const int64_t padded = (size + kPaddedTo - 1) / kPaddedTo * kPaddedTo * groups;
  if (experts > kMostExperts || padded > kMostExperts)
    return "more than 2048 experts, with groups padded to 32";
  if (topk_group > groups || k > size * topk_group) return "more experts or groups than there are";
  if (!kGroupedTopK.available()) return "not in this CANN";
  return npu::unverified("_npu_grouped_topk", npu::dtype_name(logits.scalar_type()));
}

void check(const at::Tensor& logits, const at::Tensor& bias, int64_t k, int64_t groups, int64_t topk_group) {
  TORCH_CHECK(logits.dim() == 2 && bias.dim() == 1 && bias.size(0) == logits.size(1) && k > 0 && groups > 0 &&
                  topk_group > 0 && logits.size(1) % groups == 0,
              "liteboost: _npu_grouped_topk takes logits [tokens, experts], bias [experts], k, and groups "
              "that divide "
              "the experts, got ",
              logits.sizes(), ", ", bias.sizes(), ", ", k, " and ", groups, "; flatten batch and length");
}

std::tuple<at::Tensor, at::Tensor> grouped_topk_npu(const at::Tensor& logits, const at::Tensor& bias,
                                                    int64_t k, int64_t groups, int64_t topk_group,
                                                    double factor, double eps) {
  constexpr const char* op = "_npu_grouped_topk";
  check(logits, bias, k, groups, topk_group);
  const c10::DeviceGuard guard(logits.device());
  const Refusal refusal = refusal_of(logits, bias, k, groups, topk_group);
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(grouped_topk_npu)>(op, why).call(logits, bias, k, groups, topk_group, factor,
                                                               eps);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> std::tuple<at::Tensor, at::Tensor> {
        const at::Tensor scores = at::empty({logits.size(0), k}, logits.options());
        const at::Tensor index = at::empty({logits.size(0), k}, logits.options().dtype(at::kInt));
        kGroupedTopK(logits, bias, k, topk_group, groups, kBestTwo, kNotRenormalized, kSigmoid, false, factor,
                     eps, scores, index, at::Tensor());
        return {scores, index};
      },
      reference);
}

// Why the operator would not take such a call; empty where it would.
std::string grouped_topk_refusal(const at::Tensor& logits, const at::Tensor& bias, int64_t k, int64_t groups,
                                 int64_t topk_group) {
  check(logits, bias, k, groups, topk_group);
  const c10::DeviceGuard guard(logits.device());
  const Refusal refusal = refusal_of(logits, bias, k, groups, topk_group);
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_grouped_topk(Tensor logits, Tensor bias, int k, int groups, int topk_group, float factor, float "
      "eps) -> "
      "(Tensor, Tensor)");
  m.def("_npu_grouped_topk_refusal(Tensor logits, Tensor bias, int k, int groups, int topk_group) -> str",
        &liteboost::grouped_topk_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("_npu_grouped_topk", &liteboost::grouped_topk_npu); }
