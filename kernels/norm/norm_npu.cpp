// The norms as aclnn operators. All compute in fp32 and round once, to the dtype of x (CANN documents no
// rounding between the factor and the weight), so `late` and not `late` are one here.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "norm/norm_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

const npu::Operator<Tensor, Tensor, double, Tensor, Tensor> kRmsNorm{"aclnnRmsNorm"};
const npu::Operator<Tensor, Tensor, double, Tensor, Tensor> kGemmaRmsNorm{"aclnnGemmaRmsNorm"};
const npu::Operator<Tensor, Tensor, Tensor, double, Tensor, Tensor, Tensor> kAddRmsNorm{"aclnnAddRmsNorm"};
const npu::Operator<Tensor, npu::Integers, Tensor, Tensor, double, Tensor, Tensor, Tensor> kLayerNorm{
    "aclnnLayerNorm"};

constexpr int64_t kMaxDims = 8;

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

// One factor a row, which the operators want a place for.
at::Tensor factors(const at::Tensor& x) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// What CANN's documents allow for x and weight of every RMSNorm operator.
Refusal rms_norm_refusal(const at::Tensor& x, const OptionalTensor& weight) {
  if (x.numel() == 0) return "no elements";
  if (!weight.has_value() || !weight->defined()) return "a norm without weight";
  if (weight->dim() != 1) return "a weight for each group";
  if (weight->scalar_type() != x.scalar_type()) return "a weight of another dtype than x";
  if (x.dim() > kMaxDims) return "more than eight dimensions";
  if (npu::soc() == npu::Soc::a310p) {
    if (x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
    if (x.size(-1) * x.element_size() < 32) return "rows below 32 bytes on a 310P";
  }
  return kServed;
}

std::string kind(const at::Tensor& x) { return npu::dtype_name(x.scalar_type()); }

at::Tensor rms_norm_npu(const at::Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
                        bool late) {
  check_rms_norm("rms_norm", x, weight, eps);
  const bool is_gemma = weight_offset == 1.0;
  Refusal refusal = rms_norm_refusal(x, weight);
  if (refusal == kServed && weight_offset != 0.0 && !is_gemma) refusal = "an offset that is not 0 or 1";
  if (refusal == kServed && is_gemma && npu::soc() == npu::Soc::a310p) refusal = "Gemma's norm on a 310P";
  if (refusal == kServed && !(is_gemma ? kGemmaRmsNorm : kRmsNorm).available()) refusal = "not in this CANN";
  if (refusal == kServed) refusal = npu::unverified("rms_norm", kind(x) + (is_gemma ? " offset" : ""));
  if (refusal != kServed) {
    return fall_back<decltype(rms_norm_npu)>("rms_norm", refusal).call(x, weight, eps, weight_offset, late);
  }
  at::Tensor out = like(x);
  (is_gemma ? kGemmaRmsNorm : kRmsNorm)(x, *weight, eps, out, factors(x));
  npu::count_served("rms_norm");
  return out;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_npu(const at::Tensor& x, const at::Tensor& residual,
                                                    const OptionalTensor& weight, double eps,
                                                    double weight_offset, bool late) {
  check_rms_norm("add_rms_norm", x, weight, eps);
  check_residual(x, residual);
  Refusal refusal = rms_norm_refusal(x, weight);
  if (refusal == kServed && weight_offset != 0.0) refusal = "an offset";
  if (refusal == kServed && !kAddRmsNorm.available()) refusal = "not in this CANN";
  if (refusal == kServed) refusal = npu::unverified("add_rms_norm", kind(x));
  if (refusal != kServed) {
    return fall_back<decltype(add_rms_norm_npu)>("add_rms_norm", refusal)
        .call(x, residual, weight, eps, weight_offset, late);
  }
  at::Tensor out = like(x);
  at::Tensor sum = like(x);
  kAddRmsNorm(x, residual, *weight, eps, out, factors(x), sum);
  npu::count_served("add_rms_norm");
  return {out, sum};
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
  Refusal refusal = layer_norm_refusal(x, weight, bias);
  if (refusal == kServed) refusal = npu::unverified("layer_norm", kind(x));
  if (refusal != kServed) {
    return fall_back<decltype(layer_norm_npu)>("layer_norm", refusal).call(x, weight, bias, eps);
  }
  at::Tensor out = like(x);
  const std::vector<int64_t> normalized{x.size(-1)};
  kLayerNorm(x, at::IntArrayRef(normalized), weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), eps,
             out, at::Tensor(), at::Tensor());
  npu::count_served("layer_norm");
  return out;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("rms_norm", &liteboost::rms_norm_npu);
  m.impl("add_rms_norm", &liteboost::add_rms_norm_npu);
  m.impl("layer_norm", &liteboost::layer_norm_npu);
}
