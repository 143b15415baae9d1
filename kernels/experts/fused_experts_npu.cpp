// What a recorded step calls for the experts of a layer: two ops that only an NPU has.
//
// _npu_topk_softmax: the experts of each token and their scores (MoeGatingTopKSoftmaxV2).
// _npu_fused_experts: rows in the order of their experts once for both products (MoeInitRoutingV3, which gives the
// numbers of rows as GroupedMatmulV4 takes them), gate and up, their product, down, and the sum over the experts of a
// token (MoeFinalizeRoutingV2). Slots without an expert, number E, are outside of the range of experts that have
// weights, and are left out. Nothing is asked of the device on the way.
// Shapes, dtypes, rounding: ops/fused_experts.py. Limits: tiling of these operators in ops-transformer, CANN 8.5.0 to
// 9.1.0.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>

#include "activation/activation_checks.h"
#include "activation/activation_npu.h"
#include "experts/experts_npu.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::Integers;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

// clang-format off
const npu::Operator<
    Tensor, Tensor,                          // x, finished
    int64_t, int64_t, bool,                  // k, renorm, outputSoftmaxResultFlag
    Tensor, Tensor, Tensor>                  // y, expertIdx, softmaxResult
    kTopKSoftmax{"aclnnMoeGatingTopKSoftmaxV2"};
const npu::Operator<
    Tensor, Tensor, Tensor, Tensor,          // x, expertIdx, scale, offset
    int64_t, int64_t, int64_t, int64_t,      // activeNum, expertCapacity, expertNum, dropPadMode
    int64_t, bool, int64_t,                  // expertTokensNumType, expertTokensNumFlag, quantMode
    Integers, int64_t,                       // activeExpertRange, rowIdxType
    Tensor, Tensor, Tensor, Tensor>          // expandedX, expandedRowIdx, counts, expandedScale
    kSortOnce{"aclnnMoeInitRoutingV3"};
const npu::Operator<
    Tensor, Tensor, Tensor, Tensor, Tensor,  // expandedX, expandedRowIdx, x1, x2, bias
    Tensor, Tensor, int64_t, Tensor>         // scales, expertIdx, dropPadMode, out
    kFinalize{"aclnnMoeFinalizeRoutingV2"};
// clang-format on

constexpr Refusal kMissing = "not in this CANN";
constexpr int64_t kMostChosen = 1024;

Refusal topk_refusal(const at::Tensor& logits, int64_t k) {
  if (logits.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (k > kMostChosen) return "more than 1024 experts of a token";
  return kTopKSoftmax.available() ? kServed : kMissing;
}

std::tuple<at::Tensor, at::Tensor> topk_softmax_npu(const at::Tensor& logits, int64_t k, bool renormalize) {
  constexpr const char* op = "_npu_topk_softmax";
  TORCH_CHECK(logits.dim() == 2 && k > 0 && k <= logits.size(1),
              "liteboost: _npu_topk_softmax takes logits [tokens, experts] and k from 1 to experts, got ",
              logits.sizes(), " and ", k, "; flatten batch and length");
  const c10::DeviceGuard guard(logits.device());
  Refusal refusal = topk_refusal(logits, k);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(logits.scalar_type()));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(topk_softmax_npu)>(op, why).call(logits, k, renormalize);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> std::tuple<at::Tensor, at::Tensor> {
        const at::Tensor scores = at::empty({logits.size(0), k}, logits.options());
        const at::Tensor index = at::empty({logits.size(0), k}, logits.options().dtype(at::kInt));
        kTopKSoftmax(logits, at::Tensor(), k, renormalize ? 1 : 0, false, scores, index, at::Tensor());
        return {scores, index};
      },
      reference);
}

// A call of _npu_fused_experts.
struct Experts {
  at::Tensor x, up;
  OptionalTensor up_bias;
  at::Tensor down;
  OptionalTensor down_bias;
  at::Tensor scores, index;
  Gating gating;
  bool in_turns = false;
};

void check(const Experts& on) {
  const int64_t experts = on.up.size(0), inputs = on.x.size(-1);
  TORCH_CHECK(
      on.x.dim() == 2 && on.up.dim() == 3 && on.down.dim() == 3 && on.up.size(2) == inputs &&
          on.down.size(0) == experts && on.down.size(1) == inputs && on.up.size(1) == 2 * on.down.size(2) &&
          on.index.dim() == 2 && on.index.size(0) == on.x.size(0) && on.scores.sizes() == on.index.sizes(),
      "liteboost: _npu_fused_experts takes x [T, H], up [E, 2 * I, H], down [E, H, I], scores and index "
      "[T, S], got ",
      on.x.sizes(), ", ", on.up.sizes(), ", ", on.down.sizes(), ", ", on.scores.sizes(), " and ",
      on.index.sizes(), "; call the ops of the experts one by one");
}

Refusal experts_refusal(const Experts& on) {
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (on.x.numel() == 0) return "no elements";
  for (const at::Tensor& weight : {on.up, on.down}) {
    const Refusal refusal = npu::products_refusal(on.x, weight, on.index);
    if (refusal != kServed) return refusal;
  }
  const bool is_bf16 = on.x.scalar_type() == at::kBFloat16;
  const bool takes_scores =
      on.scores.scalar_type() == on.x.scalar_type() || (is_bf16 && on.scores.scalar_type() == at::kFloat);
  if (!takes_scores) return "scores of another dtype than x";
  const Refusal refusal = gating_refusal(on.x.scalar_type(), on.down.size(2), on.gating);
  if (refusal != kServed) return refusal;
  return kSortOnce.available() && kFinalize.available() ? kServed : kMissing;
}

Refusal checked_refusal(const Experts& on) {
  const Refusal refusal = experts_refusal(on);
  return refusal == kServed
             ? npu::unverified("_npu_fused_experts", gating_kind(on.x.scalar_type(), on.gating))
             : refusal;
}

at::Tensor launched(const Experts& on) {
  const int64_t experts = on.up.size(0), size = on.down.size(2), rows = on.index.numel();
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, on.x.options().dtype(dtype));
  };
  const at::Tensor sorted = empty({rows, on.x.size(1)}, on.x.scalar_type()), none;
  const at::Tensor places = empty({rows}, at::kInt), counts = empty({experts}, at::kLong);
  constexpr int64_t kNoCapacity = 0, kDropless = 0, kCounts = 1, kNotRounded = -1, kPlaceOfSlot = 0;
  const std::array<int64_t, 2> range{0, experts};
  kSortOnce(on.x.contiguous(), on.index.to(at::kInt), none, none, rows, kNoCapacity, experts + 1, kDropless,
            kCounts, true, kNotRounded, at::IntArrayRef(range), kPlaceOfSlot, sorted, places, counts,
            empty({rows}, at::kFloat));
  const auto product = [&](const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
    return npu::grouped_product(x, weight, bias.value_or(at::Tensor()), counts, npu::kGivenCounts,
                                empty({rows, weight.size(1)}, x.scalar_type()));
  };
  const at::Tensor both = product(sorted, on.up, on.up_bias);
  const at::Tensor states =
      on.in_turns ? gated(both.slice(1, 0, c10::nullopt, 2), both.slice(1, 1, c10::nullopt, 2), on.gating)
                  : gated(both.narrow(1, 0, size), both.narrow(1, size, size), on.gating);
  const at::Tensor made = product(states, on.down, on.down_bias),
                   out = empty(on.x.sizes(), on.x.scalar_type());
  constexpr int64_t kPlacesByToken = 2;
  kFinalize(made, places, none, none, none, on.scores.contiguous(), none, kPlacesByToken, out);
  return out;
}

Experts experts_of(const at::Tensor& x, const at::Tensor& up, const OptionalTensor& up_bias,
                   const at::Tensor& down, const OptionalTensor& down_bias, const at::Tensor& scores,
                   const at::Tensor& index, c10::string_view activation, double alpha,
                   std::optional<double> limit, double up_offset, bool interleaved) {
  Gating gating{parse_activation("_npu_fused_experts", activation, alpha), alpha, limit, up_offset};
  Experts on{x, up, up_bias, down, down_bias, scores, index, gating, interleaved};
  check(on);
  return on;
}

at::Tensor fused_experts_npu(const at::Tensor& x, const at::Tensor& up, const OptionalTensor& up_bias,
                             const at::Tensor& down, const OptionalTensor& down_bias,
                             const at::Tensor& scores, const at::Tensor& index, c10::string_view activation,
                             double alpha, std::optional<double> limit, double up_offset, bool interleaved) {
  constexpr const char* op = "_npu_fused_experts";
  const Experts on = experts_of(x, up, up_bias, down, down_bias, scores, index, activation, alpha, limit,
                                up_offset, interleaved);
  const c10::DeviceGuard guard(x.device());
  const Refusal refusal = checked_refusal(on);
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(fused_experts_npu)>(op, why).call(
        x, up, up_bias, down, down_bias, scores, index, activation, alpha, limit, up_offset, interleaved);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(op, [&]() -> at::Tensor { return launched(on); }, reference);
}

// Why the two would not be the operators'; empty where they would. The arguments of _npu_fused_experts.
std::string fused_experts_refusal(const at::Tensor& x, const at::Tensor& up, const OptionalTensor& up_bias,
                                  const at::Tensor& down, const OptionalTensor& down_bias,
                                  const at::Tensor& scores, const at::Tensor& index,
                                  c10::string_view activation, double alpha, std::optional<double> limit,
                                  double up_offset, bool interleaved) {
  const Experts on = experts_of(x, up, up_bias, down, down_bias, scores, index, activation, alpha, limit,
                                up_offset, interleaved);
  const c10::DeviceGuard guard(x.device());
  const Refusal refusal = checked_refusal(on);
  return refusal == kServed ? "" : refusal;
}

std::string topk_softmax_refusal(const at::Tensor& logits, int64_t k) {
  const c10::DeviceGuard guard(logits.device());
  Refusal refusal = topk_refusal(logits, k);
  if (refusal == kServed) {
    refusal = npu::unverified("_npu_topk_softmax", npu::dtype_name(logits.scalar_type()));
  }
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_topk_softmax(Tensor logits, int k, bool renormalize) -> (Tensor, Tensor)");
  m.def("_npu_topk_softmax_refusal(Tensor logits, int k) -> str", &liteboost::topk_softmax_refusal);
  m.def(
      "_npu_fused_experts(Tensor x, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor "
      "scores, "
      "Tensor index, str activation=\"silu\", float alpha=1.0, float? limit=None, float up_offset=0.0, "
      "bool interleaved=False) -> Tensor");
  m.def(
      "_npu_fused_experts_refusal(Tensor x, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
      "Tensor scores, Tensor index, str activation=\"silu\", float alpha=1.0, float? limit=None, "
      "float up_offset=0.0, bool interleaved=False) -> str",
      &liteboost::fused_experts_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("_npu_topk_softmax", &liteboost::topk_softmax_npu);
  m.impl("_npu_fused_experts", &liteboost::fused_experts_npu);
}
