// linear_w8a8 as aclnn operators: rows to integers (DynamicQuant), and their product (QuantMatmulV5, or V4).
//
// DynamicQuant divides a row by its scale where the CPU multiplies by 127 / largest, so an element near a tie may
// become the other neighbour; a row of zeros has the scale 0 and gives the bias. Sums of integers are exact, then in
// fp32 times the scales of outputs and rows, plus the bias, and one rounding. Scales of other dtypes are cast to fp32,
// by a launch. The weight is read as it is saved. A 310P wants another layout for scales of rows, and runs the reference.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "int8_linear/int8_linear_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// x, smoothScales, y, scale
const npu::Operator<Tensor, Tensor, Tensor, Tensor> kQuantize{"aclnnDynamicQuant"};
// x1, x2, scale, offset, pertokenScale, bias, transposeX1, transposeX2, out
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool, Tensor> kV4{
    "aclnnQuantMatmulV4"};
// x1, x2, x1Scale, x2Scale, yScale, x1Offset, x2Offset, yOffset, bias, transposeX1, transposeX2, groupSize, out
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, bool,
                    int64_t, Tensor>
    kV5{"aclnnQuantMatmulV5"};

constexpr bool kAsItIs = false, kTransposed = true;
constexpr int64_t kNoGroups = 0;

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p) return "8-bit activations on a 310P";
  return kQuantize.available() && (kV5.available() || kV4.available()) ? kServed : "not in this CANN";
}

at::Tensor linear_w8a8_npu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                           const OptionalTensor& bias) {
  constexpr const char* op = "linear_w8a8";
  check_linear_w8a8(x, weight, scales, bias);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = refusal_of(x, weight);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()));
  if (refusal != kServed) {
    return fall_back<decltype(linear_w8a8_npu)>(op, refusal).call(x, weight, scales, bias);
  }
  npu::count_served(op);
  const at::Tensor rows = x.reshape({-1, x.size(-1)}), none;
  const at::Tensor integers = at::empty(rows.sizes(), rows.options().dtype(at::kChar));
  const at::Tensor row_scales = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat));
  kQuantize(rows, none, integers, row_scales);
  const at::Tensor matrix = weight.contiguous(), factors = scales.to(at::kFloat).contiguous();
  const at::Tensor added = bias.has_value() ? bias->contiguous() : none;
  const at::Tensor out = at::empty({rows.size(0), weight.size(0)}, rows.options());
  if (kV5.available()) {
    kV5(integers, matrix, row_scales, factors, none, none, none, none, added, kAsItIs, kTransposed, kNoGroups,
        out);
  } else {
    kV4(integers, matrix, factors, none, row_scales, added, kAsItIs, kTransposed, out);
  }
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return out.view(sizes);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("linear_w8a8", &liteboost::linear_w8a8_npu); }
