// Experts of integers as aclnn operators: those of experts_linear, with a GroupedMatmul that multiplies the weights out
// to the dtype of the activations on the way (antiquantScale). Nothing is asked of the device.
//
// Limits of GroupedMatmul with such weights, by the document of aclnnGroupedMatmulV4: not on a 310P, on a 950 of 4 bits
// with one scale for an output only (not called there); one scale for
// each output with 8 bits, one for each group and output with 4; zero points with one group only, so experts of 4 bits
// with zero points in several groups are multiplied one after the other (WeightQuantBatchMatmul), for which the host
// waits to know them, counted. CANN up to 8.5 wants offsets where there are none, too: zeros, made once.
//
// Layers on an NPU keep their weights as _npu_experts_packed takes them; experts_packed, whose weights lie as a CPU reads
// them, lays them out first. It is what the comparison with the reference calls.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <map>

#include "experts/experts_npu.h"
#include "npu/kept.h"
#include "npu/serve.h"
#include "quantized_experts/quantized_experts_checks.h"
#include "quantized_linear/quantized_linear_npu.h"

namespace liteboost {
namespace {

using npu::kServed;
using npu::Refusal;

constexpr const char* kOp = "experts_packed";
// Integers of 4 bits in a word.
constexpr int64_t kInWord = 8;

// Weights as an NPU reads them: int8 [E, N, K] with scales [E, N], or words [E, N, K / 8] with scales and offsets
// [E, groups, N].
struct Weights {
  at::Tensor integers, scales;
  OptionalTensor offsets;

  bool is_words() const { return integers.scalar_type() == at::kInt; }
  int64_t inputs() const { return integers.size(2) * (is_words() ? kInWord : 1); }
};

Refusal refusal_of(const at::Tensor& x, const Weights& weights, const OptionalTensor& bias,
                   const at::Tensor& index) {
  if (x.numel() == 0 || weights.integers.numel() == 0 || index.numel() == 0) return "no elements";
  if (x.scalar_type() == at::kFloat) return "fp32";
  if (npu::soc() == npu::Soc::a310p) return "a 310P";
  if (npu::soc() == npu::Soc::a950) return "a 950";
  if (weights.integers.size(0) > npu::kMostExperts) return "more than 1024 experts";
  if (weights.integers.size(1) > npu::kMostColumns || weights.inputs() > npu::kMostColumns) {
    return "more than 65535 features";
  }
  if (given(weights.offsets) && weights.scales.size(1) > 1) return "zero points in groups";
  if (!npu::kSort.available() || !npu::kGroupedMatmul.available()) return "not in this CANN";
  std::string kind = npu::dtype_name(x.scalar_type());
  kind += weights.is_words() ? " 4 bits" : " 8 bits";
  if (given(weights.offsets)) kind += " with zero points";
  if (weights.is_words() && weights.scales.size(1) == 1) kind += " in one group";
  if (given(bias)) kind += " bias";
  return npu::unverified(kOp, kind);
}

// Offsets where there are none, of the shape and dtype of the scales.
at::Tensor no_offsets(const at::Tensor& scales) {
  using Key = std::tuple<int, at::ScalarType, std::vector<int64_t>>;
  static auto* kept = new npu::Kept<Key>;
  const Key key{scales.device().index(), scales.scalar_type(), scales.sizes().vec()};
  const auto make = [&] { return at::zeros(scales.sizes(), scales.options()); };
  const at::Tensor found = kept->get(key, make);
  return found.defined() ? found : make();
}

at::Tensor grouped(const at::Tensor& x, const Weights& weights, const OptionalTensor& bias,
                   const at::Tensor& index) {
  const auto cast = [&](const at::Tensor& t) {
    const at::Tensor one = t.dim() == 3 && t.size(1) == 1 ? t.squeeze(1) : t;
    return one.to(x.scalar_type()).contiguous();
  };
  const at::Tensor scales = cast(weights.scales);
  const at::Tensor offsets = given(weights.offsets) ? cast(*weights.offsets) : no_offsets(scales);
  return npu::expert_products(x, weights.integers, bias.value_or(at::Tensor()), index, {scales, offsets});
}

at::Tensor linear_of(const at::Tensor& rows, const Weights& weights, const OptionalTensor& bias,
                     int64_t expert) {
  const OptionalTensor added = given(bias) ? OptionalTensor(bias->select(0, expert)) : bias;
  const at::Tensor weight = weights.integers.select(0, expert), scales = weights.scales.select(0, expert);
  const OptionalTensor offsets =
      given(weights.offsets) ? OptionalTensor(weights.offsets->select(0, expert)) : weights.offsets;
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("liteboost::_npu_linear_packed", "")
                                 .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                   const OptionalTensor&, const OptionalTensor&)>();
  return linear.call(rows, weight, scales, offsets, added);
}

// A product for each expert that is named. The host waits to know which.
at::Tensor one_by_one(const at::Tensor& x, const Weights& weights, const OptionalTensor& bias,
                      const at::Tensor& index) {
  const int64_t slots = index.size(1), outputs = weights.integers.size(1);
  const at::Tensor named = index.cpu().contiguous();
  std::map<int64_t, std::vector<int64_t>> places;
  for (int64_t k = 0; k < named.numel(); ++k) {
    const int64_t expert = named.const_data_ptr<int64_t>()[k];
    if (expert >= 0 && expert < weights.integers.size(0)) places[expert].push_back(k);
  }
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(2)});
  at::Tensor out = at::zeros({index.numel(), outputs}, x.options());
  for (const auto& [expert, found] : places) {
    const at::Tensor here = at::tensor(found, at::kLong).to(x.device());
    const at::Tensor own = rows.index_select(0, x.dim() == 2 ? here.div(slots, "floor") : here);
    out.index_copy_(0, here, linear_of(own, weights, bias, expert));
  }
  return out.view({index.size(0), slots, outputs});
}

at::Tensor products(const at::Tensor& x, const Weights& weights, const OptionalTensor& bias,
                    const at::Tensor& index) {
  const auto apart = [&](Refusal why) {
    npu::count_fallback(kOp, why);
    return one_by_one(x, weights, bias, index);
  };
  if (const Refusal refusal = refusal_of(x, weights, bias, index); refusal != kServed) return apart(refusal);
  return npu::serve(kOp, [&] { return grouped(x, weights, bias, index); }, apart);
}

at::Tensor experts_packed_npu(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                              const OptionalTensor& zero_points, const OptionalTensor& bias,
                              const at::Tensor& index, int64_t out_features) {
  check_experts_packed(x, tiles, scales, zero_points, bias, index, out_features);
  const c10::DeviceGuard guard(x.device());
  const auto by_expert = [&](const at::Tensor& rows) {
    return rows.view({rows.size(0) / out_features, out_features, rows.size(1)});
  };
  const auto of_groups = [&](const at::Tensor& t) {
    return by_expert(rows_of_tiles(t)).transpose(1, 2).contiguous();
  };
  if (tiles.scalar_type() == at::kChar && scales.size(1) > 1) {
    return npu::fall_back<decltype(experts_packed_npu)>(kOp, "8 bits in groups")
        .call(x, tiles, scales, zero_points, bias, index, out_features);
  }
  const at::Tensor rows = words_of_tiles(tiles);
  Weights weights;
  if (tiles.scalar_type() == at::kChar) {
    weights.integers = by_expert(rows.view(at::kChar).narrow(1, 0, x.size(-1)).contiguous());
    weights.scales = by_expert(rows_of_tiles(scales)).squeeze(2);
  } else {
    weights.integers = by_expert(words_of(rows.view(at::kByte)));
    weights.scales = of_groups(scales);
    if (given(zero_points)) {
      weights.offsets = at::rsub(of_groups(zero_points->to(x.scalar_type())), at::Scalar(8));
    }
  }
  return products(x, weights, bias, index);
}

at::Tensor npu_experts_packed(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                              const OptionalTensor& offsets, const OptionalTensor& bias,
                              const at::Tensor& index) {
  const bool is_words = weight.scalar_type() == at::kInt;
  TORCH_CHECK(weight.dim() == 3 && (is_words || weight.scalar_type() == at::kChar) &&
                  weight.is_contiguous() && scales.dim() == (is_words ? 3 : 2) &&
                  scales.size(0) == weight.size(0) && scales.size(-1) == weight.size(1) && index.dim() == 2 &&
                  x.size(-1) == weight.size(2) * (is_words ? kInWord : 1),
              "liteboost: _npu_experts_packed takes int8 [E, N, K] with scales [E, N], or words "
              "[E, N, K / 8] with scales [E, groups, N], got ",
              weight.scalar_type(), " ", weight.sizes(), " and ", scales.sizes(), " for x ", x.sizes(),
              "; let QuantizedExperts prepack them");
  const c10::DeviceGuard guard(x.device());
  return products(x, {weight, scales, offsets}, bias, index);
}

at::Tensor npu_experts_packed_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor&,
                                   const OptionalTensor&, const OptionalTensor&, const at::Tensor& index) {
  return at::empty_symint({index.sym_size(0), index.sym_size(1), weight.sym_size(1)}, x.options());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def(
      "_npu_experts_packed(Tensor x, Tensor weight, Tensor scales, Tensor? offsets, Tensor? bias, "
      "Tensor index) -> Tensor");
}

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("experts_packed", &liteboost::experts_packed_npu);
  m.impl("_npu_experts_packed", &liteboost::npu_experts_packed);
}

TORCH_LIBRARY_IMPL(liteboost, Meta, m) { m.impl("_npu_experts_packed", &liteboost::npu_experts_packed_meta); }
