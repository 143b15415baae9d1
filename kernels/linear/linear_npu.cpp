// Linear layers as aclnn operators: one launch each, with the bias (Addmm) or without (Mm).
//
// The weight is read as nn.Linear stores it, through a transposed view. Products are summed in fp32; fp32 inputs
// stay fp32 (cubeMathType 0, in which torch_npu's own default would allow HF32).
//
// A weight in FRACTAL_NZ (cast by huggingface/weights.py, or by the user) is read as it lies, by
// operators of its own (MatmulWeightNz, AddmmWeightNz): blocks of 16 x 16, both axes padded. The transposed view has
// the same storage; that it is transposed is told by its strides. What no such operator computes (a bias added before
// the one rounding, on a 310P) is left to torch_npu's own linear, with a copy of the weight in ND: of parts of one,
// and of single rows, it makes an error.
//
// Weights that lie one behind the other (npu/merged_weights.h) are multiplied as one.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "activation/activation_npu.h"
#include "linear/linear_checks.h"
#include "npu/merged_weights.h"
#include "torch_npu/csrc/core/npu/NPUFormat.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Scalar;
using npu::Tensor;

// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kMm{"aclnnMm"};
// self, mat1, mat2, beta, alpha, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, Scalar, Scalar, Tensor, int8_t> kAddmm{"aclnnAddmm"};
// The same, with mat2 in FRACTAL_NZ.
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kMatmulWeightNz{"aclnnMatmulWeightNz"};
const npu::Operator<Tensor, Tensor, Tensor, Scalar, Scalar, Tensor, int8_t> kAddmmWeightNz{
    "aclnnAddmmWeightNz"};

constexpr int8_t kKeepDtype = 0;
constexpr int64_t kFractalNz = 29;
constexpr int64_t kBlock = 16;

bool is_nz(const at::Tensor& weight) { return at_npu::native::get_npu_format(weight) == kFractalNz; }

// Why no operator multiplies by such a weight in FRACTAL_NZ. Sources: aclnnMatmulWeightNz, aclnnAddmmWeightNz.
Refusal nz_refusal(const at::Tensor& weight, const OptionalTensor& bias) {
  const bool is_half = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf;
  if (!is_half) return "fp32 in FRACTAL_NZ";
  if (weight.size(0) == 1 || weight.size(1) == 1) return "FRACTAL_NZ with one row or column";
  if (!kMatmulWeightNz.available()) return "FRACTAL_NZ: not in this CANN";
  if (!given(bias)) return kServed;
  if (npu::soc() == npu::Soc::a310p) return "FRACTAL_NZ with a bias on a 310P";
  return kAddmmWeightNz.available() ? kServed : "FRACTAL_NZ with a bias: not in this CANN";
}

// Whether the tensor is all of its storage, in the order in which it was cast.
bool is_whole_nz(const at::Tensor& weight) {
  const auto blocks = [](int64_t size) { return (size + kBlock - 1) / kBlock; };
  const std::vector<int64_t> whole = {blocks(weight.size(1)), blocks(weight.size(0)), kBlock, kBlock};
  return weight.is_contiguous() && weight.storage_offset() == 0 &&
         at_npu::native::get_npu_storage_sizes(weight) == whole;
}

// What a kind of verdict has behind dtype and form.
std::string layout_kind(bool any_nz, bool any_bias) {
  return std::string(any_nz ? " nz" : "") + (any_bias ? " bias" : "");
}

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  const bool nz = is_nz(weight);
  if (nz && !is_whole_nz(weight)) return "a part of a weight in FRACTAL_NZ";
  if (nz) {
    if (const Refusal refusal = nz_refusal(weight, bias); refusal != kServed) return refusal;
  }
  if (npu::soc() == npu::Soc::a310p) {
    if (x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
    if (x.scalar_type() == at::kFloat) return "fp32 on a 310P, which multiplies in fp16";
  }
  if (nz) return kServed;
  const bool is_there = given(bias) ? kAddmm.available() : kMm.available();
  return is_there ? kServed : "not in this CANN";
}

// The weight as the reference can read it, whatever refused it.
at::Tensor in_nd(const at::Tensor& weight) {
  return weight.numel() != 0 && is_nz(weight) ? at_npu::native::npu_format_cast(weight, ACL_FORMAT_ND)
                                              : weight;
}

// x as rows.
at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// out [rows, N], contiguous.
void launch(const at::Tensor& rows, const at::Tensor& weight, const OptionalTensor& bias,
            const at::Tensor& out) {
  const bool nz = is_nz(weight);
  if (!given(bias)) return (nz ? kMatmulWeightNz : kMm)(rows, weight.t(), out, kKeepDtype);
  (nz ? kAddmmWeightNz : kAddmm)(*bias, rows, weight.t(), at::Scalar(1), at::Scalar(1), out, kKeepDtype);
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
  if (refusal == kServed) {
    refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()) + layout_kind(is_nz(weight), given(bias)));
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(linear_npu)>(op, why).call(x, in_nd(weight), bias);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        const at::Tensor rows = rows_of(x);
        const at::Tensor out = at::empty({rows.size(0), weight.size(0)}, x.options());
        launch(rows, weight, bias, out);
        return out.view(result_sizes(x, weight));
      },
      reference);
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
  if (refusal == kServed) {
    const std::string layout =
        layout_kind(is_nz(gate_weight) || is_nz(up_weight), given(gate_bias) || given(up_bias));
    refusal = npu::unverified(op, gating_kind(x.scalar_type(), how) + layout);
  }
  const auto reference = [&](Refusal why) {
    return fall_back<decltype(gated_linear_npu)>(op, why).call(x, in_nd(gate_weight), gate_bias,
                                                               in_nd(up_weight), up_bias, activation, alpha);
  };
  if (refusal != kServed) return reference(refusal);
  return npu::serve(
      op,
      [&]() -> at::Tensor {
        const at::Tensor rows = rows_of(x);
        const int64_t cols = gate_weight.size(0);
        if (const at::Tensor weight = npu::merged_view({gate_weight, up_weight});
            weight.defined() && up_weight.size(0) == cols) {
          const at::Tensor bias =
              given(gate_bias) && given(up_bias) ? npu::merged_view({*gate_bias, *up_bias}) : at::Tensor();
          if (bias.defined() || (!given(gate_bias) && !given(up_bias))) {
            const at::Tensor out = at::empty({rows.size(0), 2 * cols}, x.options());
            launch(rows, weight, bias, out);
            return gated(out.narrow(1, 0, cols), out.narrow(1, cols, cols), how)
                .view(result_sizes(x, gate_weight));
          }
        }
        const at::Tensor both = at::empty({2, rows.size(0), cols}, x.options());
        const at::Tensor gate = both.select(0, 0), up = both.select(0, 1);
        launch(rows, gate_weight, gate_bias, gate);
        launch(rows, up_weight, up_bias, up);
        return gated(gate, up, how).view(result_sizes(x, gate_weight));
      },
      reference);
}

// linear(x, w, b) for each of the weights, and of the biases if there are any.
std::vector<at::Tensor> linears_npu(const at::Tensor& x, std::vector<at::Tensor> weights,
                                    std::vector<at::Tensor> biases) {
  TORCH_CHECK(biases.empty() || biases.size() == weights.size(),
              "liteboost: _npu_linears takes a bias for each weight, or none");
  const c10::DeviceGuard guard(x.device());
  const at::Tensor weight = npu::merged_view(weights), bias = npu::merged_view(biases);
  if (weight.defined() && (biases.empty() || bias.defined())) {
    std::vector<int64_t> widths;
    for (const at::Tensor& each : weights) widths.push_back(each.size(0));
    const OptionalTensor one = biases.empty() ? OptionalTensor() : OptionalTensor(bias);
    return linear_npu(x, weight, one).split_with_sizes(widths, -1);
  }
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < weights.size(); ++i) {
    const OptionalTensor one = biases.empty() ? OptionalTensor() : OptionalTensor(biases[i]);
    results.push_back(linear_npu(x, weights[i], one));
  }
  return results;
}

// Why `linear` would not serve a weight like this one if it lay in FRACTAL_NZ; empty when it would.
std::string npu_nz_refusal(const at::Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(weight.dim() == 2 && weight.device().is_privateuseone(),
              "liteboost: _npu_nz_refusal takes a matrix on an NPU; pass the weight of a linear layer");
  const c10::DeviceGuard guard(weight.device());
  Refusal refusal = weight.numel() == 0 ? "no elements" : nz_refusal(weight, bias);
  if (refusal == kServed && npu::soc() == npu::Soc::a310p && weight.scalar_type() == at::kBFloat16) {
    refusal = "bf16 on a 310P";
  }
  if (refusal == kServed) {
    refusal =
        npu::unverified("linear", npu::dtype_name(weight.scalar_type()) + layout_kind(true, given(bias)));
  }
  return refusal == kServed ? "" : refusal;
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_linears(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor[]", &liteboost::linears_npu);
  m.def("_npu_nz_refusal(Tensor weight, Tensor? bias) -> str", &liteboost::npu_nz_refusal);
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("linear", &liteboost::linear_npu);
  m.impl("gated_linear", &liteboost::gated_linear_npu);
}
