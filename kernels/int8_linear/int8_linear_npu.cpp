// linear_w8a8 as aclnn operators: rows to integers (DynamicQuant), and their product (QuantMatmulV5, or V4).
//
// DynamicQuant divides a row by its scale where the CPU multiplies by 127 / largest, so an element near a tie may
// become the other neighbour; a row of zeros has the scale 0 and gives the bias. Sums of integers are exact, then in
// fp32 times the scales of outputs and rows, plus the bias, and one rounding. Scales of other dtypes are cast to fp32,
// by a launch. The weight is read as it is saved. A 310P wants another layout for scales of rows, and runs the reference.
//
// In a recorded step rows that several layers read become integers once (_npu_quantize_kv, int8_attention/), or in the
// norm that makes them (_npu_add_rms_norm_int8, AddRmsNormDynamicQuant, which does not round them before); then the
// product is a call of its own (_npu_linear_int8). RmsNormDynamicQuant, without a sum, excludes rows of zeros, which
// the embedding of padding may be.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <tuple>

#include "int8_linear/int8_linear_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;

// x, smoothScales, y, scale
const npu::Operator<Tensor, Tensor, Tensor, Tensor> kQuantize{"aclnnDynamicQuant"};
// x1, x2, scale, offset, pertokenScale, bias, transposeX1, transposeX2, out
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool, Tensor> kV4{
    "aclnnQuantMatmulV4"};
// x1, x2, x1Scale, x2Scale, yScale, x1Offset, x2Offset, yOffset, bias, transposeX1, transposeX2, groupSize, out
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool,
                    int64_t, Tensor>
    kV5{"aclnnQuantMatmulV5"};

// x1, x2, gamma, smoothScale1, smoothScale2, epsilon, y1, y2, x, scale1, scale2
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, double, Tensor, Tensor, Tensor, Tensor, Tensor>
    kNorm{"aclnnAddRmsNormDynamicQuant"};

using AddRmsNorm = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                      const OptionalTensor&, double, double, bool);
using QuantizeRows = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&);

template <class Signature>
c10::TypedOperatorHandle<Signature> op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

constexpr bool kAsItIs = false, kTransposed = true;
constexpr int64_t kNoGroups = 0;

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p) return "8-bit activations on a 310P";
  return kQuantize.available() && (kV5.available() || kV4.available()) ? kServed : "not in this CANN";
}

Refusal unverified(const at::Tensor& x, bool has_bias) {
  return npu::unverified("linear_w8a8",
                         std::string(npu::dtype_name(x.scalar_type())) + (has_bias ? " bias" : ""));
}

// Rows of integers [M, K] and their scales [M], times the weight.
at::Tensor product(const at::Tensor& integers, const at::Tensor& row_scales, const at::Tensor& weight,
                   const at::Tensor& scales, const OptionalTensor& bias, at::ScalarType dtype) {
  const at::Tensor matrix = weight.contiguous(), factors = scales.to(at::kFloat).contiguous(), none;
  const at::Tensor added = bias.has_value() ? bias->contiguous() : none;
  const at::Tensor out = at::empty({integers.size(0), weight.size(0)}, integers.options().dtype(dtype));
  if (kV5.available()) {
    kV5(integers, matrix, row_scales, factors, none, none, none, none, added, kAsItIs, kTransposed, kNoGroups,
        out);
  } else {
    kV4(integers, matrix, factors, none, row_scales, added, kAsItIs, kTransposed, out);
  }
  return out;
}

at::Tensor linear_w8a8_npu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                           const OptionalTensor& bias) {
  constexpr const char* op = "linear_w8a8";
  check_linear_w8a8(x, weight, scales, bias);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = refusal_of(x, weight);
  if (refusal == kServed) refusal = unverified(x, bias.has_value() && bias->defined());
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(linear_w8a8_npu)>(op, why).call(x, weight, scales, bias);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        const at::Tensor rows = x.reshape({-1, x.size(-1)}), none;
        const at::Tensor integers = at::empty(rows.sizes(), rows.options().dtype(at::kChar));
        const at::Tensor row_scales = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat));
        kQuantize(rows, none, integers, row_scales);
        std::vector<int64_t> sizes = x.sizes().vec();
        sizes.back() = weight.size(0);
        return product(integers, row_scales, weight, scales, bias, x.scalar_type()).view(sizes);
      },
      reference);
}

// linear_w8a8 of rows that are integers already, [..., K] with scales [..., 1].
at::Tensor linear_int8_npu(const at::Tensor& integers, const at::Tensor& row_scales, const at::Tensor& weight,
                           const at::Tensor& scales, const OptionalTensor& bias, at::ScalarType dtype) {
  TORCH_CHECK(integers.scalar_type() == at::kChar && row_scales.scalar_type() == at::kFloat &&
                  row_scales.numel() * integers.size(-1) == integers.numel() &&
                  integers.size(-1) == weight.size(1),
              "liteboost: _npu_linear_int8 takes int8 [..., K] with fp32 [..., 1] and a weight [N, K], got ",
              integers.sizes(), ", ", row_scales.sizes(), " and ", weight.sizes(),
              "; make them with _npu_quantize_kv");
  const c10::DeviceGuard guard(integers.device());
  std::vector<int64_t> sizes = integers.sizes().vec();
  sizes.back() = weight.size(0);
  const auto launch = [&] {
    return product(integers.view({-1, weight.size(1)}), row_scales.view({-1}), weight, scales, bias, dtype)
        .view(sizes);
  };
  const auto of_floats = [&](Refusal why) {
    npu::count_fallback("linear_w8a8", why);
    const at::Tensor rows = integers.view({-1, weight.size(1)}).to(at::kFloat);
    at::Tensor sums = at::linear(rows, weight.to(at::kFloat));
    sums.mul_(row_scales.view({-1, 1})).mul_(scales.to(at::kFloat));
    return (bias.has_value() ? sums.add_(*bias) : sums).to(dtype).view(sizes);
  };
  return npu::serve("linear_w8a8", launch, of_floats);
}

// add_rms_norm whose result is rounded to integers [..., K] with scales [..., 1]; beside them the sum.
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm_int8_npu(const at::Tensor& x,
                                                                     const at::Tensor& residual,
                                                                     const at::Tensor& weight, double eps) {
  TORCH_CHECK(kNorm.available(), "liteboost: this CANN has no ", kNorm.name(), "; use a release that has it");
  const c10::DeviceGuard guard(x.device());
  using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  const auto launch = [&]() -> Three {
    std::vector<int64_t> sizes = x.sizes().vec();
    const auto empty = [&](at::IntArrayRef shape, at::ScalarType dtype) {
      return at::empty(shape, x.options().dtype(dtype));
    };
    const at::Tensor integers = empty(sizes, at::kChar), sum = empty(sizes, x.scalar_type()), none;
    sizes.pop_back();
    const at::Tensor row_scales = empty(sizes, at::kFloat);
    // The second pair is for another smoothing of the same rows.
    kNorm(x, residual, weight, none, none, eps, integers, empty({1}, at::kChar), sum, row_scales,
          empty({1}, at::kFloat));
    return {integers, row_scales.unsqueeze(-1), sum};
  };
  const auto in_two = [&](Refusal why) -> Three {
    npu::count_fallback("add_rms_norm", why);
    const auto [normed, sum] =
        op_named<AddRmsNorm>("liteboost::add_rms_norm").call(x, residual, weight, eps, 0.0, false);
    const auto [integers, row_scales] = op_named<QuantizeRows>("liteboost::_npu_quantize_kv").call(normed);
    return {integers, row_scales, sum};
  };
  return npu::serve("add_rms_norm", launch, in_two);
}

// Why a norm's rows are not made integers by the operator that adds and norms; empty where they are.
std::string norm_int8_refusal(const at::Tensor& x) {
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (!kNorm.available() || !kQuantize.available() || !(kV5.available() || kV4.available())) {
    return "not in this CANN";
  }
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = unverified(x, false);
  if (refusal == kServed) refusal = unverified(x, true);  // the products that follow may have any
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_linear_int8(Tensor integers, Tensor row_scales, Tensor weight, Tensor scales, Tensor? bias, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "_npu_add_rms_norm_int8(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, "
      "Tensor)");
  m.def("_npu_norm_int8_refusal(Tensor x) -> str", &liteboost::norm_int8_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("linear_w8a8", &liteboost::linear_w8a8_npu);
  m.impl("_npu_linear_int8", &liteboost::linear_int8_npu);
  m.impl("_npu_add_rms_norm_int8", &liteboost::add_rms_norm_int8_npu);
}
