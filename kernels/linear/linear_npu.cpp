// Linear layers as aclnn operators: one launch each, with the bias (Addmm) or without (Mm).
//
// The weight is read as nn.Linear stores it, through a transposed view. Products are summed in fp32; fp32 inputs
// stay fp32 (cubeMathType 0, in which torch_npu's own default would allow HF32).
//
// A weight in FRACTAL_NZ, which the user has cast (torch_npu.npu_format_cast), is left to torch_npu's own linear: the
// layout it was cast to is a matter of the SoC, and so is the operator. None is cast here: parameters, and what is
// saved of them, stay the user's.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activation/activation_npu.h"
#include "linear/linear_checks.h"
#include "torch_npu/csrc/core/npu/NPUFormat.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Scalar;
using npu::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kMm{"aclnnMm"};
// self, mat1, mat2, beta, alpha, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, Scalar, Scalar, Tensor, int8_t> kAddmm{"aclnnAddmm"};

constexpr int8_t kKeepDtype = 0;
constexpr int64_t kFractalNz = 29;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  // torch_npu's own linear multiplies by such a weight as it lies.
  if (at_npu::native::get_npu_format(weight) == kFractalNz) return "a weight in FRACTAL_NZ";
  if (npu::soc() == npu::Soc::a310p) {
    if (x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
    if (x.scalar_type() == at::kFloat) return "fp32 on a 310P, which multiplies in fp16";
  }
  const bool is_there = given(bias) ? kAddmm.available() : kMm.available();
  return is_there ? kServed : "not in this CANN";
}

// x as rows.
at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// out [rows, N], contiguous.
void launch(const at::Tensor& rows, const at::Tensor& weight, const OptionalTensor& bias,
            const at::Tensor& out) {
  if (!given(bias)) return kMm(rows, weight.t(), out, kKeepDtype);
  kAddmm(*bias, rows, weight.t(), at::Scalar(1), at::Scalar(1), out, kKeepDtype);
}

std::vector<int64_t> result_sizes(const at::Tensor& x, const at::Tensor& weight) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return sizes;
}

at::Tensor linear_npu(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "linear";
  check_linear(x, weight, bias);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = refusal_of(x, weight, bias);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()));
  if (refusal != kServed) return fall_back<decltype(linear_npu)>(op, refusal).call(x, weight, bias);
  npu::count_served(op);
  const at::Tensor rows = rows_of(x);
  const at::Tensor out = at::empty({rows.size(0), weight.size(0)}, x.options());
  launch(rows, weight, bias, out);
  return out.view(result_sizes(x, weight));
}

at::Tensor gated_linear_npu(const at::Tensor& x, const at::Tensor& gate_weight,
                            const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                            const OptionalTensor& up_bias, c10::string_view activation, double alpha) {
  constexpr const char* op = "gated_linear";
  const Activation which =
      check_gated_linear(x, gate_weight, gate_bias, up_weight, up_bias, activation, alpha);
  const Gating how{which, alpha, std::nullopt, 0.0};
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = refusal_of(x, gate_weight, gate_bias);
  if (refusal == kServed) refusal = refusal_of(x, up_weight, up_bias);
  if (refusal == kServed) refusal = gating_refusal(x.scalar_type(), gate_weight.size(0), how);
  if (refusal == kServed) refusal = npu::unverified(op, gating_kind(x.scalar_type(), how));
  if (refusal != kServed) {
    return fall_back<decltype(gated_linear_npu)>(op, refusal)
        .call(x, gate_weight, gate_bias, up_weight, up_bias, activation, alpha);
  }
  npu::count_served(op);
  const at::Tensor rows = rows_of(x);
  const at::Tensor both = at::empty({2, rows.size(0), gate_weight.size(0)}, x.options());
  const at::Tensor gate = both.select(0, 0), up = both.select(0, 1);
  launch(rows, gate_weight, gate_bias, gate);
  launch(rows, up_weight, up_bias, up);
  return gated(gate, up, how).view(result_sizes(x, gate_weight));
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("linear", &liteboost::linear_npu);
  m.impl("gated_linear", &liteboost::gated_linear_npu);
}
