// How experts are multiplied by on an NPU: rows in the order of their experts, and one product for each.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "npu/aclnn.h"

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

// x [T, K] or [T, S, K] times the transposed weights [E, N, K] of the experts in index [T, S], [T, S, N]; the bias is
// [E, N]. A weight of words has K / 8. Nothing is asked of the device on the way.
inline at::Tensor expert_products(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                  const at::Tensor& index, const Antiquant& integers = {}) {
  const int64_t experts = weight.size(0), columns = weight.size(1);
  const bool is_shared = x.dim() == 2;
  const Sorted in = sorted(is_shared ? x.contiguous() : x.reshape({-1, x.size(2)}),
                           is_shared ? index : index.reshape({-1, 1}), experts);
  const auto list = [](const at::Tensor& t) {
    return t.defined() ? std::vector<at::Tensor>{t} : std::vector<at::Tensor>{};
  };
  const auto biases =
      // The operator adds the bias in fp32, and wants it so beside bf16.
      list(bias.defined() && x.scalar_type() != at::kHalf ? bias.to(at::kFloat) : bias);
  // Zeros stay where a slot has no expert.
  const auto products = list(at::zeros({index.numel(), columns}, x.options()));
  constexpr int64_t kOneOutput = 2, kByRows = 0, kGivenSums = 0, kNoActivation = 0;
  kGroupedMatmul(list(in.rows), list(weight.transpose(1, 2)), biases, {}, {}, list(integers.scales),
                 list(integers.offsets), {}, in.ends.narrow(0, 0, experts).to(at::kLong), {}, {}, {},
                 kOneOutput, kByRows, kGivenSums, kNoActivation, products, {}, {});
  return at::index_select(products[0], 0, in.places).view({index.size(0), index.size(1), columns});
}

}  // namespace liteboost::npu
