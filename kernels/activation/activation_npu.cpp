// Activations as aclnn operators.
//
// silu, gelu and gelu_tanh of a gate: SwiGlu, GeGluV3 or ClippedSwiglu, in fp32 with one rounding, over gate and
// up in one tensor. relu, relu2 and sigmoid: operators of their own, then the product; so sigmoid and relu2 are
// rounded before it, as in the original code.
#include "activation/activation_npu.h"

#include <ATen/DeviceGuard.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "activation/activation_checks.h"

namespace liteboost {

const npu::Operator<npu::Tensor, npu::Tensor, npu::Tensor> kMul{"aclnnMul"};

namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Scalar;
using npu::Tensor;

const npu::Operator<Tensor, int64_t, Tensor> kSwiGlu{"aclnnSwiGlu"};
// self, dim, approximate (0 none, 1 tanh), activateLeft, out, outGelu
const npu::Operator<Tensor, int64_t, int64_t, bool, Tensor, Tensor> kGeGlu{"aclnnGeGluV3"};
// x, groupIndex, dim, alpha, limit, bias, interleaved, out
const npu::Operator<Tensor, Tensor, int64_t, double, double, double, bool, Tensor> kClippedSwiglu{
    "aclnnClippedSwiglu"};
const npu::Operator<Tensor, Tensor> kSilu{"aclnnSilu"};
const npu::Operator<Tensor, Scalar, Tensor> kSwish{"aclnnSwish"};
// approximate as above. aclnnGelu is left alone: on some SoCs it is the tanh form.
const npu::Operator<Tensor, int64_t, Tensor> kGelu{"aclnnGeluV2"};
const npu::Operator<Tensor, Tensor> kRelu{"aclnnRelu"};
const npu::Operator<Tensor, Tensor> kSigmoid{"aclnnSigmoid"};

constexpr int64_t kTanh = 1;
constexpr int64_t kExact = 0;

const npu::AnyOperator& operator_alone(Activation activation, double alpha) {
  switch (activation) {
    case Activation::silu:
      return alpha == 1.0 ? static_cast<const npu::AnyOperator&>(kSilu) : kSwish;
    case Activation::gelu:
    case Activation::gelu_tanh:
      return kGelu;
    case Activation::sigmoid:
      return kSigmoid;
    case Activation::relu:
    case Activation::relu2:
      return kRelu;
  }
  __builtin_unreachable();
}

bool is_clipped(const Gating& how) {
  return how.alpha != 1.0 || how.limit.has_value() || how.up_offset != 0.0;
}

// Whether the activation has no gated operator, so that the product is a launch of its own.
bool is_apart(Activation activation) {
  switch (activation) {
    case Activation::silu:
    case Activation::gelu:
    case Activation::gelu_tanh:
      return false;
    case Activation::relu:
    case Activation::relu2:
    case Activation::sigmoid:
      return true;
  }
  __builtin_unreachable();
}

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

void launch_alone(const at::Tensor& x, Activation activation, double alpha, const at::Tensor& out) {
  switch (activation) {
    case Activation::silu:
      return alpha == 1.0 ? kSilu(x, out) : kSwish(x, at::Scalar(alpha), out);
    case Activation::gelu:
      return kGelu(x, kExact, out);
    case Activation::gelu_tanh:
      return kGelu(x, kTanh, out);
    case Activation::sigmoid:
      return kSigmoid(x, out);
    case Activation::relu:
      return kRelu(x, out);
    case Activation::relu2: {
      const at::Tensor positive = like(x);
      kRelu(x, positive);
      return kMul(positive, positive, out);
    }
  }
}

// Gate and up in one contiguous tensor: as the halves of dimension `dim`, or in turns.
struct Together {
  at::Tensor both;
  int64_t dim = 0;
  bool in_turns = false;
};

// [..., 2N], if that is what gate and up are cut from; else undefined.
at::Tensor fused_of(const at::Tensor& gate, int64_t step) {
  std::vector<int64_t> sizes = gate.sizes().vec(), strides = gate.strides().vec();
  sizes.back() *= 2;
  strides.back() = step;
  at::Tensor fused = gate.as_strided(sizes, strides);
  return fused.is_contiguous() ? fused : at::Tensor();
}

bool are_halves(const at::Tensor& gate, const at::Tensor& up, int64_t distance, int64_t step) {
  return gate.storage().is_alias_of(up.storage()) && gate.strides() == up.strides() &&
         gate.stride(-1) == step && up.storage_offset() - gate.storage_offset() == distance;
}

Together together(const at::Tensor& gate, const at::Tensor& up, bool may_be_in_turns) {
  const int64_t cols = gate.size(-1), rows = gate.numel() / cols;
  if (are_halves(gate, up, cols, 1)) {
    const at::Tensor fused = fused_of(gate, 1);
    if (fused.defined()) return {fused.view({rows, 2 * cols}), 1};
  }
  if (may_be_in_turns && are_halves(gate, up, 1, 2)) {
    const at::Tensor fused = fused_of(gate, 1);
    if (fused.defined()) return {fused.view({rows, 2 * cols}), 1, true};
  }
  if (gate.is_contiguous() && are_halves(gate, up, gate.numel(), 1)) {
    return {gate.as_strided({2, rows, cols}, {gate.numel(), cols, 1}), 0};
  }
  return {at::cat({gate.reshape({1, rows, cols}), up.reshape({1, rows, cols})}, 0), 0};
}

void launch_gated(const Together& in, const Gating& how, const at::Tensor& out) {
  if (how.activation != Activation::silu) {
    return kGeGlu(in.both, in.dim, how.activation == Activation::gelu_tanh ? kTanh : kExact, true, out,
                  like(out));
  }
  if (!is_clipped(how)) return kSwiGlu(in.both, in.dim, out);
  kClippedSwiglu(in.both, at::Tensor(), in.dim, how.alpha,
                 how.limit.value_or(std::numeric_limits<float>::max()), how.up_offset, in.in_turns, out);
}

bool is_on_310p() { return npu::soc() == npu::Soc::a310p; }

constexpr Refusal kNoElements = "no elements";
constexpr Refusal kMissing = "not in this CANN";
constexpr Refusal kBf16On310p = "bf16 on a 310P";

}  // namespace

npu::Refusal gating_refusal(at::ScalarType dtype, int64_t cols, const Gating& how) {
  if (is_on_310p() && dtype == at::kBFloat16) return kBf16On310p;
  if (is_clipped(how) && how.activation != Activation::silu) return "a limit or an offset without silu";
  if (is_apart(how.activation)) {
    const bool is_there = kMul.available() && operator_alone(how.activation, 1.0).available();
    return is_there ? kServed : kMissing;
  }
  if (how.limit.has_value() && *how.limit <= 0.0) return "a limit of 0";
  if (is_on_310p()) {
    if (is_clipped(how)) return "a limit, slope or offset on a 310P";
    if (cols * static_cast<int64_t>(at::elementSize(dtype)) % 64 != 0) {
      return "rows of no multiple of 64 bytes on a 310P";
    }
  }
  if (how.activation != Activation::silu) return kGeGlu.available() ? kServed : kMissing;
  return (is_clipped(how) ? kClippedSwiglu.available() : kSwiGlu.available()) ? kServed : kMissing;
}

std::string gating_kind(at::ScalarType dtype, const Gating& how) {
  std::string kind = std::string(npu::dtype_name(dtype)) + " " + activation_name(how.activation);
  return is_clipped(how) ? kind + " clipped" : kind;
}

at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, const Gating& how) {
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (is_apart(how.activation)) {
    const at::Tensor activated = like(gate);
    launch_alone(gate, how.activation, 1.0, activated);
    kMul(activated, up, out);
    return out;
  }
  const Together in = together(gate, up, is_clipped(how));
  std::vector<int64_t> sizes = in.both.sizes().vec();
  sizes[in.dim] /= 2;
  launch_gated(in, how, out.view(sizes));
  return out;
}

namespace {

at::Tensor gated_activation_npu(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                double alpha, std::optional<double> limit, double up_offset) {
  constexpr const char* op = "gated_activation";
  const Gating how{check_gated_activation(gate, up, activation, alpha, limit), alpha, limit, up_offset};
  const c10::DeviceGuard guard(gate.device());
  const at::ScalarType dtype = gate.scalar_type();
  Refusal refusal = gate.numel() == 0 ? kNoElements : gating_refusal(dtype, gate.size(-1), how);
  if (refusal == kServed) refusal = npu::unverified(op, gating_kind(dtype, how));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(gated_activation_npu)>(op, why).call(gate, up, activation, alpha, limit,
                                                                   up_offset);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(op, [&]() -> at::Tensor { return gated(gate, up, how); }, reference);
}

at::Tensor activation_npu(const at::Tensor& x, c10::string_view activation, double alpha) {
  constexpr const char* op = "activation";
  const Activation which = check_activation(x, activation, alpha);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = x.numel() == 0 ? kNoElements : kServed;
  if (refusal == kServed && is_on_310p() && x.scalar_type() == at::kBFloat16) refusal = kBf16On310p;
  if (refusal == kServed && !operator_alone(which, alpha).available()) refusal = kMissing;
  if (refusal == kServed && which == Activation::relu2 && !kMul.available()) refusal = kMissing;
  if (refusal == kServed) {
    Gating how;
    how.activation = which;
    const std::string kind = gating_kind(x.scalar_type(), how);
    refusal = npu::unverified(op, alpha == 1.0 ? kind : kind + " slope");
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(activation_npu)>(op, why).call(x, activation, alpha);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        at::Tensor out = like(x);
        launch_alone(x, which, alpha, out);
        return out;
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("activation", &liteboost::activation_npu);
  m.impl("gated_activation", &liteboost::gated_activation_npu);
}
