// linear_w8 and linear_w4 as an aclnn operator: one launch, with or without bias.
//
// The operator multiplies the weight out to x's dtype before the product, so each weight is rounded once, and so is
// each scale that has more digits than x: those are cast here, by a launch of their own, unless they have been. Products
// are summed in fp32. It takes at most 65535 outputs; the head of a large vocabulary is multiplied in parts.
//
// 8 bits are read as they are saved, through a transposed view. 4 bits must lie as CANN packs them, see `words_of`:
// layers on an NPU keep them so and call _npu_linear_int4; linear_w4 packs on the way, in some twenty launches.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_left_shift.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>

#include "npu/aclnn.h"
#include "npu/serve.h"
#include "quantized_linear/quantized_linear_checks.h"
#include "quantized_linear/quantized_linear_npu.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

// x, weight, antiquantScale, antiquantOffset, quantScale, quantOffset, bias, antiquantGroupSize, y
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int32_t, Tensor> kV2{
    "aclnnWeightQuantBatchMatmulV2"};
// The same, with innerPrecise in front of y; takes a bias of bf16.
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int32_t, int32_t, Tensor> kV3{
    "aclnnWeightQuantBatchMatmulV3"};

// The most inputs, and outputs, of one product. Source: aclnnWeightQuantBatchMatmulV2.
constexpr int64_t kMost = 65535;
// Outputs of a part, whose first weight is aligned.
constexpr int64_t kPart = 65536 - 512;
constexpr int32_t kOneGroup = 0, kPrecise = 0;
// Integers of 4 bits in a word.
constexpr int64_t kInWord = 8;

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p && x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
  if (x.size(-1) > kMost) return "more than 65535 inputs";
  return kV2.available() || kV3.available() ? kServed : "not in this CANN";
}

// The bias as the operator takes it.
at::Tensor bias_for(const at::Tensor& x, const OptionalTensor& bias) {
  if (!bias.has_value() || !bias->defined()) return at::Tensor();
  return x.scalar_type() == at::kBFloat16 && !kV3.available() ? bias->to(at::kFloat) : *bias;
}

// x @ weight^T + bias for weights [N, K] of 8 bits or words [N, K / 8], with scales and offsets [N] or [groups, N].
at::Tensor product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& scales,
                   const at::Tensor& offsets, const at::Tensor& bias) {
  at::Tensor out = at::empty({rows.size(0), weight.size(0)}, rows.options());
  const int64_t groups = scales.dim() == 2 ? scales.size(0) : 1;
  const int32_t group = groups == 1 ? kOneGroup : static_cast<int32_t>(rows.size(1) / groups);
  const at::Tensor none;
  if (kV3.available()) {
    kV3(rows, weight.t(), scales, offsets, none, none, bias, group, kPrecise, out);
  } else {
    kV2(rows, weight.t(), scales, offsets, none, none, bias, group, out);
  }
  return out;
}

at::Tensor part_of(const at::Tensor& x, int64_t begin, int64_t count) {
  return x.defined() ? x.narrow(-1, begin, count).contiguous() : x;
}

// The product in parts where it has more outputs than the operator takes.
at::Tensor whole_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const at::Tensor& offsets, const OptionalTensor& bias) {
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? t.to(x.scalar_type()).contiguous() : t; };
  const at::Tensor rows = x.reshape({-1, x.size(-1)}), matrix = weight.contiguous();
  const at::Tensor factors = cast(scales), added = cast(offsets), last = bias_for(x, bias);
  const int64_t outputs = weight.size(0);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = outputs;
  if (outputs <= kMost) return product(rows, matrix, factors, added, last).view(sizes);
  std::vector<at::Tensor> parts;
  for (int64_t begin = 0; begin < outputs; begin += kPart) {
    const int64_t count = std::min(kPart, outputs - begin);
    parts.push_back(product(rows, matrix.narrow(0, begin, count), part_of(factors, begin, count),
                            part_of(added, begin, count), part_of(last, begin, count)));
  }
  return at::cat(parts, 1).view(sizes);
}

at::Tensor linear_w8_npu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const OptionalTensor& bias) {
  constexpr const char* op = "linear_w8";
  check_linear_w8(x, weight, scales, bias);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = refusal_of(x, weight);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()));
  if (refusal != kServed) {
    return fall_back<decltype(linear_w8_npu)>(op, refusal).call(x, weight, scales, bias);
  }
  npu::count_served(op);
  return whole_product(x, weight, scales, at::Tensor(), bias);
}

Refusal int4_refusal(const at::Tensor& x, const at::Tensor& weight) {
  if (const Refusal refusal = refusal_of(x, weight); refusal != kServed) return refusal;
  if (npu::soc() == npu::Soc::a310p) return "4 bits on a 310P";
  return npu::unverified("linear_w4", npu::dtype_name(x.scalar_type()));
}

}  // namespace

at::Tensor words_of(const at::Tensor& packed) {
  const int64_t rows = packed.size(0), blocks = packed.size(1) / 16;
  // Word q of a block of 32 columns holds column 8 j + 2 q at bit 4 j, and 8 j + 2 q + 1 at bit 16 + 4 j.
  const at::Tensor given = packed.contiguous().view(at::kInt).view({rows, blocks, 4});
  const at::Tensor places = at::arange(0, 32, 8, given.options());
  std::vector<at::Tensor> made;
  for (int j = 0; j < 4; ++j) {
    const auto nibble = [&](int64_t bit) {
      return at::bitwise_and(at::bitwise_right_shift(given, at::Scalar(bit)), at::Scalar(15));
    };
    const at::Tensor two =
        at::bitwise_or(nibble(4 * j), at::bitwise_left_shift(nibble(16 + 4 * j), at::Scalar(4)));
    const auto bytes = at::bitwise_left_shift(two, places).unbind(-1);
    made.push_back(at::bitwise_or(at::bitwise_or(bytes[0], bytes[1]), at::bitwise_or(bytes[2], bytes[3])));
  }
  const at::Tensor words = at::stack(made, -1).view({rows, blocks * 4});
  return at::bitwise_xor(words, at::Scalar(static_cast<int32_t>(0x88888888)));
}

namespace {

at::Tensor linear_w4_npu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                         const OptionalTensor& zero_points, const OptionalTensor& bias) {
  constexpr const char* op = "linear_w4";
  check_linear_w4(x, weight, scales, zero_points, bias);
  const c10::DeviceGuard guard(x.device());
  if (const Refusal refusal = int4_refusal(x, weight); refusal != kServed) {
    return fall_back<decltype(linear_w4_npu)>(op, refusal).call(x, weight, scales, zero_points, bias);
  }
  npu::count_served(op);
  const at::Tensor offsets =
      zero_points.has_value() ? at::rsub(zero_points->to(x.scalar_type()).t(), at::Scalar(8)) : at::Tensor();
  return whole_product(x, words_of(weight), scales.t(), offsets, bias);
}

// The weight dequantized, [N, K], in fp32.
at::Tensor dequantized(const at::Tensor& words, const at::Tensor& scales, const OptionalTensor& offsets) {
  const at::Tensor places = at::arange(0, 32, 4, words.options());
  // To two's complement: up to the sign, and down again with it.
  const at::Tensor up = at::bitwise_left_shift(
      at::bitwise_and(at::bitwise_right_shift(words.unsqueeze(-1), places), at::Scalar(15)), at::Scalar(28));
  at::Tensor weight = at::bitwise_right_shift(up, at::Scalar(28)).flatten(1).to(at::kFloat);
  const int64_t width = weight.size(1) / scales.size(0);
  const auto spread = [&](const at::Tensor& t) { return t.to(at::kFloat).t().repeat_interleave(width, 1); };
  if (offsets.has_value()) weight = at::add(weight, spread(*offsets));
  return at::mul(weight, spread(scales));
}

// linear_w4 with a weight that lies as CANN packs it. words [N, K / 8] int32; scales and offsets [groups, N]: what is
// added to an integer of -8 to 7 before the scale is applied.
at::Tensor linear_int4_npu(const at::Tensor& x, const at::Tensor& words, const at::Tensor& scales,
                           const OptionalTensor& offsets, const OptionalTensor& bias) {
  constexpr const char* op = "linear_w4";
  TORCH_CHECK(words.scalar_type() == at::kInt && words.dim() == 2 && scales.dim() == 2 &&
                  words.size(1) * kInWord == x.size(-1) && scales.size(1) == words.size(0) &&
                  scales.size(0) > 0 && x.size(-1) % scales.size(0) == 0,
              "liteboost: _npu_linear_int4 takes words [N, K / 8] of _npu_int4 and scales [groups, N], got ",
              words.sizes(), " and ", scales.sizes(), " for x ", x.sizes());
  const c10::DeviceGuard guard(x.device());
  if (const Refusal refusal = int4_refusal(x, words); refusal != kServed) {
    npu::count_fallback(op, refusal);
    const at::Tensor weight = dequantized(words, scales, offsets);
    const OptionalTensor wide = bias.has_value() ? OptionalTensor(bias->to(at::kFloat)) : bias;
    return at::linear(x.to(at::kFloat), weight, wide).to(x.scalar_type());
  }
  npu::count_served(op);
  return whole_product(x, words, scales, offsets.value_or(at::Tensor()), bias);
}

at::Tensor int4_npu(const at::Tensor& packed) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 2 && packed.size(1) % 16 == 0,
              "liteboost: _npu_int4 takes a weight of linear_w4, got ", packed.scalar_type(), " ",
              packed.sizes());
  const c10::DeviceGuard guard(packed.device());
  return words_of(packed);
}

at::Tensor linear_int4_meta(const at::Tensor& x, const at::Tensor& words, const at::Tensor&,
                            const OptionalTensor&, const OptionalTensor&) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = words.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_int4(Tensor packed) -> Tensor");
  m.def(
      "_npu_linear_int4(Tensor x, Tensor words, Tensor scales, Tensor? offsets, Tensor? bias) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("linear_w8", &liteboost::linear_w8_npu);
  m.impl("linear_w4", &liteboost::linear_w4_npu);
  m.impl("_npu_int4", &liteboost::int4_npu);
  m.impl("_npu_linear_int4", &liteboost::linear_int4_npu);
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("_npu_linear_int4", &liteboost::linear_int4_meta); }
