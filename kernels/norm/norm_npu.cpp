// The norms as aclnn operators. All compute in fp32 and round once, to the dtype of x (CANN documents no
// rounding between the factor and the weight), so `late` and not `late` are one here.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <tuple>

#include "activation/activation_npu.h"
#include "norm/norm_checks.h"
#include "npu/kept.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

const npu::Operator<Tensor, Tensor, double, Tensor, Tensor> kRmsNorm{"aclnnRmsNorm"};
const npu::Operator<Tensor, Tensor, double, Tensor, Tensor> kGemmaRmsNorm{"aclnnGemmaRmsNorm"};
const npu::Operator<Tensor, Tensor, Tensor, double, Tensor, Tensor, Tensor> kAddRmsNorm{"aclnnAddRmsNorm"};
const npu::Operator<Tensor, npu::Integers, Tensor, Tensor, double, Tensor, Tensor, Tensor> kLayerNorm{
    "aclnnLayerNorm"};

// self, tensor1, tensor2, value, out: self + value * tensor1 * tensor2
const npu::Operator<Tensor, Tensor, Tensor, npu::Scalar, Tensor> kAddcmul{"aclnnAddcmul"};

constexpr int64_t kMaxDims = 8;

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

// A weight of ones; undefined where none can be made.
at::Tensor ones_for(const at::Tensor& x, int64_t size) {
  static auto* kept = new npu::Kept<std::tuple<int, at::ScalarType, int64_t>>;
  return kept->get({x.device().index(), x.scalar_type(), size},
                   [&] { return at::full({size}, 1, x.options()); });
}

// One factor a row, which the operators want a place for.
at::Tensor factors(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

constexpr int64_t kLeastRowOn310P = 32;  // bytes
constexpr Refusal kShortRows = "rows below 32 bytes on a 310P";

// What CANN's documents allow for x of every RMSNorm operator.
Refusal input_refusal(const at::Tensor& x) {
  if (x.numel() == 0) return "no elements";
  if (x.dim() > kMaxDims) return "more than eight dimensions";
  if (npu::soc() == npu::Soc::a310p) {
    if (x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
    if (x.size(-1) * x.element_size() < kLeastRowOn310P) return kShortRows;
  }
  return kServed;
}

constexpr Refusal kNoOnes = "no weight of ones can be made while a graph is captured";
constexpr Refusal kMissing = "not in this CANN";

// The forms of weight, each of which has other operators: none or one for each group are ones in RmsNorm, and the
// product with the weight (or with one more than it), rounded again, a launch of its own.
enum class Scale { none, plain, gemma, groups, gemma_groups };

bool has_groups(Scale scale) { return scale == Scale::groups || scale == Scale::gemma_groups; }

Scale scale_of(const OptionalTensor& weight, double weight_offset) {
  if (!given(weight)) return Scale::none;
  const bool is_gemma = weight_offset == 1.0;
  if (weight->dim() != 1) return is_gemma ? Scale::gemma_groups : Scale::groups;
  return is_gemma ? Scale::gemma : Scale::plain;
}

// `norm`: what serves one without weight or with a plain one.
Refusal rms_norm_refusal(const at::Tensor& x, const OptionalTensor& weight, double weight_offset,
                         const npu::AnyOperator& norm = kRmsNorm) {
  const Refusal refusal = input_refusal(x);
  if (refusal != kServed) return refusal;
  if (given(weight) && weight->scalar_type() != x.scalar_type()) return "a weight of another dtype than x";
  const Scale scale = scale_of(weight, weight_offset);
  const bool takes_offset = scale == Scale::none || weight_offset == 0.0 || weight_offset == 1.0;
  if (!takes_offset) return "an offset that is not 0 or 1";
  if (scale == Scale::gemma) {
    if (npu::soc() == npu::Soc::a310p) return "Gemma's norm on a 310P";
    if (npu::soc() == npu::Soc::a950) return "Gemma's norm on a 950";
    return kGemmaRmsNorm.available() ? kServed : kMissing;
  }
  if (scale != Scale::plain && !ones_for(x, x.size(-1)).defined()) return kNoOnes;
  if (has_groups(scale)) {
    const bool is_there = scale == Scale::groups ? kMul.available() : kAddcmul.available();
    return is_there && kRmsNorm.available() ? kServed : kMissing;
  }
  return norm.available() ? kServed : kMissing;
}

std::string kind(const at::Tensor& x, Scale scale) {
  const std::string dtype = npu::dtype_name(x.scalar_type());
  if (scale == Scale::gemma) return dtype + " offset";
  if (has_groups(scale)) return dtype + (scale == Scale::groups ? " groups" : " offset groups");
  return scale == Scale::none ? dtype + " weightless" : dtype;
}

at::Tensor normed(const at::Tensor& x, const OptionalTensor& weight, double eps, Scale scale) {
  at::Tensor out = like(x);
  if (scale == Scale::gemma) {
    kGemmaRmsNorm(x, *weight, eps, out, factors(x));
    return out;
  }
  kRmsNorm(x, scale == Scale::plain ? *weight : ones_for(x, x.size(-1)), eps, out, factors(x));
  if (!has_groups(scale)) return out;
  at::Tensor scaled = like(x);
  if (scale == Scale::groups) {
    kMul(out, *weight, scaled);
  } else {
    kAddcmul(out, out, *weight, at::Scalar(1), scaled);
  }
  return scaled;
}

at::Tensor rms_norm_npu(const at::Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
                        bool late) {
  constexpr const char* op = "rms_norm";
  check_rms_norm(op, x, weight, eps);
  const c10::DeviceGuard guard(x.device());
  const Scale scale = scale_of(weight, weight_offset);
  Refusal refusal = rms_norm_refusal(x, weight, weight_offset);
  if (refusal == kServed) refusal = npu::unverified(op, kind(x, scale));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(rms_norm_npu)>(op, why).call(x, weight, eps, weight_offset, late);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(op, [&]() -> at::Tensor { return normed(x, weight, eps, scale); }, reference);
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_npu(const at::Tensor& x, const at::Tensor& residual,
                                                    const OptionalTensor& weight, double eps,
                                                    double weight_offset, bool late) {
  constexpr const char* op = "add_rms_norm";
  check_rms_norm(op, x, weight, eps);
  check_residual(x, residual);
  const c10::DeviceGuard guard(x.device());
  const Scale scale = scale_of(weight, weight_offset);
  const bool is_one_launch = scale == Scale::plain || scale == Scale::none;
  Refusal refusal = rms_norm_refusal(x, weight, weight_offset, kAddRmsNorm);
  if (refusal == kServed) refusal = npu::unverified(op, kind(x, scale));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(add_rms_norm_npu)>(op, why).call(x, residual, weight, eps, weight_offset, late);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> std::tuple<at::Tensor, at::Tensor> {
        if (!is_one_launch) {
          at::Tensor sum = at::add(x, residual).contiguous();
          return {normed(sum, weight, eps, scale), sum};
        }
        at::Tensor out = like(x);
        at::Tensor sum = like(x);
        const at::Tensor scales = scale == Scale::plain ? *weight : ones_for(x, x.size(-1));
        kAddRmsNorm(x, residual, scales, eps, out, factors(x), sum);
        return {out, sum};
      },
      reference);
}

// What RmsNorm notes of each row, to the dtype of x.
at::Tensor inverse_rms_npu(const at::Tensor& x, double eps) {
  constexpr const char* op = "inverse_rms";
  check_inverse_rms(x, eps);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = rms_norm_refusal(x, std::nullopt, 0.0);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()));
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(inverse_rms_npu)>(op, why).call(x, eps);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        const at::Tensor found = factors(x);
        kRmsNorm(x, ones_for(x, x.size(-1)), eps, like(x), found);
        return found.to(x.scalar_type());
      },
      reference);
}

// RmsNorm and a gated activation, each in fp32 and rounded, in either order.
at::Tensor gated_rms_norm_npu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps, c10::string_view activation, bool gate_first, bool late,
                              int64_t group_size) {
  constexpr const char* op = "gated_rms_norm";
  const bool is_silu =
      check_gated_rms_norm(x, gate, weight, eps, activation, gate_first, group_size) == NormGate::silu;
  const c10::DeviceGuard guard(x.device());
  const bool in_groups = group_size != 0 && group_size != x.size(-1);
  Gating gating;
  gating.activation = is_silu ? Activation::silu : Activation::sigmoid;
  Refusal refusal = rms_norm_refusal(x, weight, 0.0);
  if (refusal == kServed) refusal = gating_refusal(x.scalar_type(), x.size(-1), gating);
  if (refusal == kServed && in_groups && npu::soc() == npu::Soc::a310p &&
      group_size * x.element_size() < kLeastRowOn310P) {
    refusal = kShortRows;
  }
  if (refusal == kServed && in_groups && !kMul.available()) refusal = kMissing;
  if (refusal == kServed && in_groups && !ones_for(x, group_size).defined()) refusal = kNoOnes;
  if (refusal == kServed) {
    std::string text = gating_kind(x.scalar_type(), gating);
    if (gate_first) text += in_groups ? " first groups" : " first";
    refusal = npu::unverified(op, text);
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(gated_rms_norm_npu)>(op, why).call(x, gate, weight, eps, activation, gate_first,
                                                                 late, group_size);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        if (!gate_first) return gated(gate, normed(x, weight, eps, Scale::plain), gating);
        const at::Tensor product = gated(gate, x, gating);
        if (!in_groups) return normed(product, weight, eps, Scale::plain);
        const std::vector<int64_t> groups{x.numel() / x.size(-1), x.size(-1) / group_size, group_size};
        return normed(product.view(groups), weight.reshape({groups[1], groups[2]}), eps, Scale::groups)
            .view(x.sizes());
      },
      reference);
}

Refusal layer_norm_refusal(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias) {
  if (x.numel() == 0) return "no elements";
  if (x.dim() > kMaxDims) return "more than eight dimensions";
  if (npu::soc() == npu::Soc::a310p) return "LayerNorm on a 310P";
  const auto differs = [&](const OptionalTensor& each) {
    return each.has_value() && each->defined() && each->scalar_type() != x.scalar_type();
  };
  if (differs(weight) || differs(bias)) return "a weight of another dtype than x";
  return kLayerNorm.available() ? kServed : "not in this CANN";
}

at::Tensor layer_norm_npu(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps) {
  check_layer_norm(x, weight, bias, eps);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = layer_norm_refusal(x, weight, bias);
  if (refusal == kServed) {
    std::string text = npu::dtype_name(x.scalar_type());
    if (!weight.has_value() || !weight->defined()) text += " weightless";
    if (bias.has_value() && bias->defined()) text += " bias";
    refusal = npu::unverified("layer_norm", text);
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(layer_norm_npu)>("layer_norm", why).call(x, weight, bias, eps);
  };
  if (refusal != kServed) return reference(refusal);
  const auto launch_one = [&] {
    at::Tensor out = like(x);
    const std::vector<int64_t> normalized{x.size(-1)};
    kLayerNorm(x, at::IntArrayRef(normalized), weight.value_or(at::Tensor()), bias.value_or(at::Tensor()),
               eps, out, at::Tensor(), at::Tensor());
    return out;
  };
  return npu::serve("layer_norm", launch_one, reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("rms_norm", &liteboost::rms_norm_npu);
  m.impl("add_rms_norm", &liteboost::add_rms_norm_npu);
  m.impl("inverse_rms", &liteboost::inverse_rms_npu);
  m.impl("gated_rms_norm", &liteboost::gated_rms_norm_npu);
  m.impl("layer_norm", &liteboost::layer_norm_npu);
}
