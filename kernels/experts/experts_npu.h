// How experts are multiplied by on an NPU: rows in the order of their experts, and one product for each.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost::npu {

// clang-format off
inline const Operator<
    Tensor, Tensor,                      // x, expertIdx
    int64_t, int64_t, int64_t, int64_t,  // activeNum, expertCapacity, expertNum, dropPadMode
    int64_t, bool,                       // expertTokensCountOrCumsumFlag, expertTokensBeforeCapacityFlag
    Tensor, Tensor, Tensor, Tensor>      // expandedX, expandedRowIdx, counts or their sums, before capacity
    kSort{"aclnnMoeInitRoutingV2"};
inline const Operator<
    Tensors, Tensors, Tensors,           // x, weight, bias
    Tensors, Tensors, Tensors, Tensors,  // scale, offset, antiquantScale, antiquantOffset
    Tensors, Tensor,                     // perTokenScale, groupList
    Tensors, Tensors, Tensors,           // activationInput, activationQuantScale, activationQuantOffset
    int64_t, int64_t, int64_t, int64_t,  // splitItem, groupType, groupListType, actType
    Tensors, Tensors, Tensors>           // out, activationFeatureOut, dynQuantScaleOut
    kGroupedMatmul{"aclnnGroupedMatmulV4"};
// clang-format on

// The most experts, and inputs and outputs of one, of a product. Source: aclnnGroupedMatmulV4.
constexpr int64_t kMostExperts = 1024;
constexpr int64_t kMostColumns = 65535;

// Why the operator does not multiply rows of x by a weight [E, N, K]; index says whose rows they are.
inline Refusal products_refusal(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& index) {
  if (x.numel() == 0 || weight.numel() == 0 || index.numel() == 0) return "no elements";
  if (weight.size(0) > kMostExperts) return "more than 1024 experts";
  if (weight.size(1) > kMostColumns || weight.size(2) > kMostColumns) return "more than 65535 features";
  // Any other would be copied, all experts of it, in each call.
  const bool by_rows = weight.stride(2) == 1 && weight.stride(1) >= weight.size(2);
  const bool by_columns = weight.stride(1) == 1 && weight.stride(2) >= weight.size(1);
  if (!by_rows && !by_columns) return "a weight that is contiguous in neither dimension";
  if (soc() == Soc::a310p && x.scalar_type() != at::kHalf) return "not fp16 on a 310P";
  return kGroupedMatmul.available() ? kServed : "not in this CANN";
}

// The rows of x, sorted by expert, where each went, and the sums of the experts' numbers of rows.
struct Sorted {
  at::Tensor rows, places, ends;
};

// x [T, K] with index [T, S], or [T * S, K] with [T * S, 1]. Slots without an expert (number E) come last.
inline Sorted sorted(const at::Tensor& x, const at::Tensor& index, int64_t experts) {
  const at::TensorOptions integers = x.options().dtype(at::kInt);
  Sorted out{at::empty({index.numel(), x.size(1)}, x.options()), at::empty({index.numel()}, integers),
             at::empty({experts + 1}, integers)};
  constexpr int64_t kAll = 0, kNoCapacity = 0, kDropless = 0, kSums = 1;
  kSort(x, index.to(at::kInt), kAll, kNoCapacity, experts + 1, kDropless, kSums, false, out.rows, out.places,
        out.ends, at::Tensor());
  return out;
}

// Integers have scales and offsets, [E, N] or [E, groups, N], of the dtype of x: the weight is (integer + offset) * scale.
struct Antiquant {
  at::Tensor scales, offsets;
};

// What `groups` of a product tell of each expert's rows: where they end, or how many there are.
enum GroupList : int64_t { kGivenSums = 0, kGivenCounts = 1 };

// Rows of x, sorted by expert, times the transposed weight [E, N, K] of theirs, plus the bias [E, N] or undefined, into
// `out`, of which rows without an expert stay what they are.
inline at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                  const at::Tensor& groups, GroupList given, const at::Tensor& out,
                                  const Antiquant& integers = {}) {
  const auto list = [](const at::Tensor& t) {
    return t.defined() ? std::vector<at::Tensor>{t} : std::vector<at::Tensor>{};
  };
  const auto biases =
      // The operator adds the bias in fp32, and wants it so beside bf16.
      list(bias.defined() && x.scalar_type() != at::kHalf ? bias.to(at::kFloat) : bias);
  constexpr int64_t kOneOutput = 2, kByRows = 0, kNoActivation = 0;
  kGroupedMatmul(list(x), list(weight.transpose(1, 2)), biases, {}, {}, list(integers.scales),
                 list(integers.offsets), {}, groups, {}, {}, {}, kOneOutput, kByRows, given, kNoActivation,
                 list(out), {}, {});
  return out;
}

// x [T, K] or [T, S, K] times the transposed weights [E, N, K] of the experts in index [T, S], [T, S, N]; the bias is
// [E, N]. A weight of words has K / 8. Nothing is asked of the device on the way.
inline at::Tensor expert_products(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                  const at::Tensor& index, const Antiquant& integers = {}) {
  const int64_t experts = weight.size(0), columns = weight.size(1);
  const bool is_shared = x.dim() == 2;
  const Sorted in = sorted(is_shared ? x.contiguous() : x.reshape({-1, x.size(2)}),
                           is_shared ? index : index.reshape({-1, 1}), experts);
  // Zeros stay where a slot has no expert.
  const at::Tensor products =
      grouped_product(in.rows, weight, bias, in.ends.narrow(0, 0, experts).to(at::kLong), kGivenSums,
                      at::zeros({index.numel(), columns}, x.options()), integers);
  return at::index_select(products, 0, in.places).view({index.size(0), index.size(1), columns});
}

}  // namespace liteboost::npu
