// head_linear as the operator aclnnMatmul, whose batch the heads are: it reads the weight transposed, as nn.Linear stores
// it, and broadcasts it over the batch of x. Summed in fp32; fp32 stays fp32 (cubeMathType 0).
//
// A weight in FRACTAL_NZ lies in blocks, of which a part is no tensor: such a call is refused, and the caller's original
// code runs.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "head_linear/head_linear_checks.h"

#include "npu/aclnn.h"
#include "npu/serve.h"
#include "torch_npu/csrc/core/npu/NPUFormat.h"

namespace liteboost {
namespace {

using npu::kServed;
using npu::Refusal;

// self, mat2, out, cubeMathType
const npu::Operator<npu::Tensor, npu::Tensor, npu::Tensor, int8_t> kMatmul{"aclnnMatmul"};
constexpr int8_t kKeepDtype = 0;
constexpr int64_t kFractalNz = 29;

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  if (npu::soc() == npu::Soc::a310p && x.scalar_type() != at::kHalf) return "bf16 or fp32 on a 310P";
  if (!kMatmul.available()) return "not in this CANN";
  return npu::unverified("head_linear", npu::dtype_name(x.scalar_type()));
}

at::Tensor head_linear_npu(const at::Tensor& x, const at::Tensor& weight) {
  constexpr const char* op = "head_linear";
  check_head_linear(x, weight);
  LB_CHECK_VALUE(at_npu::native::get_npu_format(weight) != kFractalNz, op,
                 "weight must lie in ND, got FRACTAL_NZ; cast it with npu_format_cast");
  const c10::DeviceGuard guard(x.device());
  const Refusal refusal = refusal_of(x, weight);
  const auto reference = [&](Refusal why) {
    return npu::fall_back<decltype(head_linear_npu)>(op, why).call(x, weight);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        const at::Tensor out = at::empty({x.size(0), x.size(1), x.size(2), weight.size(1)}, x.options());
        kMatmul(x, weight.transpose(1, 2), out, kKeepDtype);
        return out;
      },
      reference);
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) { m.impl("head_linear", &liteboost::head_linear_npu); }
