// linear_packed as an aclnn operator: one launch, with or without bias.
//
// The operator multiplies the weight out to x's dtype before the product, so each weight is rounded once, and so is
// each scale that has more digits than x: those are cast here, by a launch of their own, unless they have been. Products
// are summed in fp32. It takes at most 65535 outputs; the head of a large vocabulary is multiplied in parts.
//
// 8 bits are read as plain rows, through a transposed view. 4 bits must lie as CANN packs them, see `words_of`. Layers on
// an NPU keep their weights so, and call _npu_linear_packed; linear_packed, whose weights lie as a CPU reads them, lays
// them out first, in some twenty launches. It is what the comparison with the reference calls.
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

// x, weight, antiquantScale, antiquantOffset, quantScale, quantOffset, bias, antiquantGroupSize, y
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int32_t, Tensor> kV2{
    "aclnnWeightQuantBatchMatmulV2"};
// The same, with innerPrecise in front of y.
const npu::Operator<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int32_t, int32_t, Tensor> kV3{
    "aclnnWeightQuantBatchMatmulV3"};

// The most inputs, and outputs, of one product. Source: aclnnWeightQuantBatchMatmulV2.
constexpr int64_t kMost = 65535;
// Outputs of a part, whose first weight is aligned.
constexpr int64_t kPart = 65536 - 512;
constexpr int32_t kOneGroup = 0, kPrecise = 0;
// Integers of 4 bits in a word.
constexpr int64_t kInWord = 8;
constexpr const char* kOp = "linear_packed";

Refusal refusal_of(const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() == 0 || weight.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p && x.scalar_type() == at::kBFloat16) return "bf16 on a 310P";
  if (x.size(-1) > kMost) return "more than 65535 inputs";
  return kV2.available() || kV3.available() ? kServed : "not in this CANN";
}

bool is_on_950() { return npu::soc() == npu::Soc::a950; }

// The bias as the operator takes it: without gaps, and in fp32 beside bf16, but on a 950. Cast for each call: a copy kept would miss what the user
// writes to the bias.
at::Tensor bias_for(const at::Tensor& x, const OptionalTensor& bias) {
  if (!given(bias)) return at::Tensor();
  const bool is_wide = x.scalar_type() == at::kBFloat16 && !is_on_950();
  return (is_wide ? bias->to(at::kFloat) : *bias).contiguous();
}

// x @ weight^T + bias for weights [N, K] of 8 bits or words [N, K / 8], with scales and offsets [N] or [groups, N].
at::Tensor product(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& scales,
                   const at::Tensor& offsets, const at::Tensor& bias) {
  at::Tensor out = at::empty({rows.size(0), weight.size(0)}, rows.options());
  const int64_t groups = scales.dim() == 2 ? scales.size(0) : 1;
  const int32_t group = groups == 1 ? kOneGroup : static_cast<int32_t>(rows.size(1) / groups);
  const at::Tensor none;
  if (is_on_950()) {  // innerPrecise has no effect there, and scales must lie as the weight does
    const auto turned = [](const at::Tensor& t) {
      if (!t.defined() || t.dim() == 1) return t;
      return t.size(0) == 1 ? t.squeeze(0) : t.t().contiguous().t();
    };
    kV2(rows, weight.t(), turned(scales), turned(offsets), none, none, bias, group, out);
  } else if (kV3.available() && npu::soc() != npu::Soc::a310p) {  // CANN's documents name V2 alone for a 310P
    kV3(rows, weight.t(), scales, offsets, none, none, bias, group, kPrecise, out);
  } else {
    kV2(rows, weight.t(), scales, offsets, none, none, bias, group, out);
  }
  return out;
}

at::Tensor part_of(const at::Tensor& x, int64_t begin, int64_t count) {
  return x.defined() ? x.narrow(-1, begin, count).contiguous() : x;
}

// A weight as the operator reads it: int8 [N, K] with scales [N], or words [N, K / 8] with scales and offsets
// [groups, N]: what is added to an integer of -8 to 7 before the scale is applied.
struct Weight {
  at::Tensor integers, scales;
  OptionalTensor offsets;

  bool is_words() const { return integers.scalar_type() == at::kInt; }
};

// The product in parts where it has more outputs than the operator takes.
at::Tensor whole_product(const at::Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? t.to(x.scalar_type()).contiguous() : t; };
  // The operator refuses rows with gaps between them, of a slice of a wider tensor, and copies none.
  const at::Tensor rows = x.reshape({-1, x.size(-1)}).contiguous(), matrix = weight.integers.contiguous();
  const at::Tensor factors = cast(weight.scales), added = cast(weight.offsets.value_or(at::Tensor()));
  const at::Tensor last = bias_for(x, bias);
  const int64_t outputs = matrix.size(0);
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

Refusal refusal_with_kind(const at::Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  if (const Refusal refusal = refusal_of(x, weight.integers); refusal != kServed) return refusal;
  if (weight.is_words() && npu::soc() == npu::Soc::a310p) return "4 bits on a 310P";
  std::string kind = npu::dtype_name(x.scalar_type());
  kind += weight.is_words() ? " 4 bits" : " 8 bits";
  if (given(bias)) kind += " bias";
  return npu::unverified(kOp, kind);
}

// The weight dequantized, [N, K], in fp32.
at::Tensor dequantized(const Weight& weight) {
  if (!weight.is_words()) {
    return at::mul(weight.integers.to(at::kFloat), weight.scales.to(at::kFloat).unsqueeze(1));
  }
  const at::Tensor places = at::arange(0, 32, 4, weight.integers.options());
  // To two's complement: up to the sign, and down again with it.
  const at::Tensor up = at::bitwise_left_shift(
      at::bitwise_and(at::bitwise_right_shift(weight.integers.unsqueeze(-1), places), at::Scalar(15)),
      at::Scalar(28));
  at::Tensor made = at::bitwise_right_shift(up, at::Scalar(28)).flatten(1).to(at::kFloat);
  const int64_t width = made.size(1) / weight.scales.size(0);
  const auto spread = [&](const at::Tensor& t) { return t.to(at::kFloat).t().repeat_interleave(width, 1); };
  if (weight.offsets.has_value()) made = at::add(made, spread(*weight.offsets));
  return at::mul(made, spread(weight.scales));
}

at::Tensor linear_npu(const at::Tensor& x, const Weight& weight, const OptionalTensor& bias) {
  const auto of_dequantized = [&](Refusal why) {
    npu::count_fallback(kOp, why);
    const OptionalTensor wide = bias.has_value() ? OptionalTensor(bias->to(at::kFloat)) : bias;
    return at::linear(x.to(at::kFloat), dequantized(weight), wide).to(x.scalar_type());
  };
  const Refusal refusal = refusal_with_kind(x, weight, bias);
  if (refusal != kServed) return of_dequantized(refusal);
  return npu::serve(kOp, [&] { return whole_product(x, weight, bias); }, of_dequantized);
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

at::Tensor rows_of_tiles(const at::Tensor& tiles) {
  return tiles.transpose(1, 2).reshape({tiles.size(0) * tiles.size(2), tiles.size(1)});
}

at::Tensor words_of_tiles(const at::Tensor& tiles) {
  const bool is_aligned = tiles.storage_offset() % 4 == 0;
  const at::Tensor whole = is_aligned ? tiles.contiguous() : tiles.clone(at::MemoryFormat::Contiguous);
  return rows_of_tiles(whole.view(at::kInt));
}

namespace {

at::Tensor linear_packed_npu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                             const OptionalTensor& zero_points, const OptionalTensor& bias,
                             int64_t out_features) {
  check_linear_packed("linear_packed", x, tiles, scales, zero_points, bias, out_features);
  const c10::DeviceGuard guard(x.device());
  const bool is_w8 = tiles.scalar_type() == at::kChar;
  const auto refuse = [&](Refusal refusal) {
    return fall_back<decltype(linear_packed_npu)>(kOp, refusal)
        .call(x, tiles, scales, zero_points, bias, out_features);
  };
  if (x.numel() == 0 || tiles.numel() == 0) return refuse("no elements");
  if (is_w8 && scales.size(1) > 1) return refuse("8 bits in groups");
  const auto rows = [&](const at::Tensor& t) { return rows_of_tiles(t).narrow(0, 0, out_features); };
  const at::Tensor words = words_of_tiles(tiles).narrow(0, 0, out_features).contiguous();
  Weight weight;
  if (is_w8) {
    weight.integers = words.view(at::kChar).narrow(1, 0, x.size(-1)).contiguous();
    weight.scales = rows(scales).squeeze(1);
  } else {
    weight.integers = words_of(words.view(at::kByte));
    weight.scales = rows(scales).t();
    if (zero_points.has_value()) {
      weight.offsets = at::rsub(rows(*zero_points).to(x.scalar_type()).t(), at::Scalar(8));
    }
  }
  if (const Refusal refusal = refusal_with_kind(x, weight, bias); refusal != kServed) return refuse(refusal);
  return npu::serve(kOp, [&] { return whole_product(x, weight, bias); }, refuse);
}

at::Tensor npu_linear_packed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                             const OptionalTensor& offsets, const OptionalTensor& bias) {
  const bool is_words = weight.scalar_type() == at::kInt;
  TORCH_CHECK((is_words || weight.scalar_type() == at::kChar) && weight.dim() == 2 &&
                  scales.dim() == (is_words ? 2 : 1) && scales.size(-1) == weight.size(0) &&
                  weight.size(1) * (is_words ? kInWord : 1) == x.size(-1) &&
                  (!is_words || (scales.size(0) > 0 && x.size(-1) % scales.size(0) == 0)),
              "liteboost: _npu_linear_packed takes int8 [N, K] with scales [N], or words [N, K / 8] of "
              "_npu_int4 with scales [groups, N], got ",
              weight.scalar_type(), " ", weight.sizes(), " and ", scales.sizes(), " for x ", x.sizes(),
              "; let QuantizedLinear prepack them");
  const c10::DeviceGuard guard(x.device());
  return linear_npu(x, {weight, scales, offsets}, bias);
}

at::Tensor int4_npu(const at::Tensor& packed) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.dim() == 2 && packed.size(1) % 16 == 0,
              "liteboost: _npu_int4 takes 4 bits as files have them, uint8 [N, K / 2], got ",
              packed.scalar_type(), " ", packed.sizes());
  const c10::DeviceGuard guard(packed.device());
  return words_of(packed);
}

at::Tensor npu_linear_packed_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor&,
                                  const OptionalTensor&, const OptionalTensor&) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_npu_int4(Tensor packed) -> Tensor");
  m.def(
      "_npu_linear_packed(Tensor x, Tensor weight, Tensor scales, Tensor? offsets, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("linear_packed", &liteboost::linear_packed_npu);
  m.impl("_npu_int4", &liteboost::int4_npu);
  m.impl("_npu_linear_packed", &liteboost::npu_linear_packed);
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("_npu_linear_packed", &liteboost::npu_linear_packed_meta); }
