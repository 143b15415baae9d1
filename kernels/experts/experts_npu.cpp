// Mixture of experts as aclnn operators.
//
// experts_linear: rows in the order of their experts (MoeInitRoutingV2), one product for each expert
// (GroupedMatmulV4), and back (IndexSelect). Nothing is asked of the device on the way, so an expert that does not
// exist is not found out here, as the CPU's kernel does.
// experts_combine: the scores of a token times what its experts made of it, a matrix product for each token.
#include <ATen/DeviceGuard.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "experts/experts_checks.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {
namespace {

using npu::fall_back;
using npu::kServed;
using npu::Refusal;
using npu::Tensor;
using npu::Tensors;
using OptionalTensor = std::optional<at::Tensor>;

// clang-format off
const npu::Operator<
    Tensor, Tensor,                      // x, expertIdx
    int64_t, int64_t, int64_t, int64_t,  // activeNum, expertCapacity, expertNum, dropPadMode
    int64_t, bool,                       // expertTokensCountOrCumsumFlag, expertTokensBeforeCapacityFlag
    Tensor, Tensor, Tensor, Tensor>      // expandedX, expandedRowIdx, counts or their sums, before capacity
    kSort{"aclnnMoeInitRoutingV2"};
const npu::Operator<
    Tensors, Tensors, Tensors,           // x, weight, bias
    Tensors, Tensors, Tensors, Tensors,  // scale, offset, antiquantScale, antiquantOffset
    Tensors, Tensor,                     // perTokenScale, groupList
    Tensors, Tensors, Tensors,           // activationInput, activationQuantScale, activationQuantOffset
    int64_t, int64_t, int64_t, int64_t,  // splitItem, groupType, groupListType, actType
    Tensors, Tensors, Tensors>           // out, activationFeatureOut, dynQuantScaleOut
    kGroupedMatmul{"aclnnGroupedMatmulV4"};
// clang-format on
// a, b, out, cubeMathType
const npu::Operator<Tensor, Tensor, Tensor, int8_t> kBatchMatMul{"aclnnBatchMatMul"};

constexpr int8_t kKeepDtype = 0;
constexpr int64_t kMostExperts = 1024;
constexpr int64_t kMostColumns = 65535;

bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

Refusal linear_refusal(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& index) {
  if (x.numel() == 0 || weight.numel() == 0 || index.numel() == 0) return "no elements";
  if (weight.size(0) > kMostExperts) return "more than 1024 experts";
  if (weight.size(1) > kMostColumns || weight.size(2) > kMostColumns) return "more than 65535 features";
  // Any other would be copied, all experts of it, in each call.
  const bool by_rows = weight.stride(2) == 1 && weight.stride(1) >= weight.size(2);
  const bool by_columns = weight.stride(1) == 1 && weight.stride(2) >= weight.size(1);
  if (!by_rows && !by_columns) return "a weight that is contiguous in neither dimension";
  if (npu::soc() == npu::Soc::a310p && x.scalar_type() != at::kHalf) return "not fp16 on a 310P";
  return kSort.available() && kGroupedMatmul.available() ? kServed : "not in this CANN";
}

// The rows of x, sorted by expert, where each went, and the sums of the experts' numbers of rows.
struct Sorted {
  at::Tensor rows, places, ends;
};

// x [T, K] with index [T, S], or [T * S, K] with [T * S, 1]. Slots without an expert (number E) come last.
Sorted sorted(const at::Tensor& x, const at::Tensor& index, int64_t experts) {
  const at::TensorOptions integers = x.options().dtype(at::kInt);
  Sorted out{at::empty({index.numel(), x.size(1)}, x.options()), at::empty({index.numel()}, integers),
             at::empty({experts + 1}, integers)};
  constexpr int64_t kAll = 0, kNoCapacity = 0, kDropless = 0, kSums = 1;
  kSort(x, index.to(at::kInt), kAll, kNoCapacity, experts + 1, kDropless, kSums, false, out.rows, out.places,
        out.ends, at::Tensor());
  return out;
}

at::Tensor experts_linear_npu(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                              const at::Tensor& index) {
  constexpr const char* op = "experts_linear";
  check_experts_linear(x, weight, bias, index);
  const c10::DeviceGuard guard(x.device());
  Refusal refusal = linear_refusal(x, weight, index);
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(x.scalar_type()));
  if (refusal != kServed) {
    return fall_back<decltype(experts_linear_npu)>(op, refusal).call(x, weight, bias, index);
  }
  npu::count_served(op);
  const int64_t experts = weight.size(0), columns = weight.size(1);
  const bool is_shared = x.dim() == 2;
  const Sorted in = sorted(is_shared ? x.contiguous() : x.reshape({-1, x.size(2)}),
                           is_shared ? index : index.reshape({-1, 1}), experts);
  const std::vector<at::Tensor> rows{in.rows}, weights{weight.transpose(1, 2)};
  std::vector<at::Tensor> biases;
  // The operator adds the bias in fp32, and wants it so beside bf16.
  if (given(bias)) biases.push_back(x.scalar_type() == at::kHalf ? *bias : bias->to(at::kFloat));
  // Zeros stay where a slot has no expert.
  const std::vector<at::Tensor> products{at::zeros({index.numel(), columns}, x.options())};
  constexpr int64_t kOneOutput = 2, kByRows = 0, kGivenSums = 0, kNoActivation = 0;
  kGroupedMatmul(rows, weights, biases, {}, {}, {}, {}, {}, in.ends.narrow(0, 0, experts).to(at::kLong), {},
                 {}, {}, kOneOutput, kByRows, kGivenSums, kNoActivation, products, {}, {});
  return at::index_select(products[0], 0, in.places).view({index.size(0), index.size(1), columns});
}

at::Tensor experts_combine_npu(const at::Tensor& y, const at::Tensor& scores) {
  constexpr const char* op = "experts_combine";
  check_experts_combine(y, scores);
  const c10::DeviceGuard guard(y.device());
  Refusal refusal = kServed;
  if (y.numel() == 0) refusal = "no elements";
  if (npu::soc() == npu::Soc::a310p && (y.scalar_type() != at::kHalf || scores.scalar_type() != at::kHalf)) {
    refusal = "not fp16 on a 310P";
  }
  if (refusal == kServed && !kBatchMatMul.available()) refusal = "not in this CANN";
  if (refusal == kServed) refusal = npu::unverified(op, npu::dtype_name(y.scalar_type()));
  if (refusal != kServed) return fall_back<decltype(experts_combine_npu)>(op, refusal).call(y, scores);
  npu::count_served(op);
  // fp32 scores are not rounded: the operator wants one dtype, and y is widened to theirs.
  const at::Tensor states = y.to(scores.scalar_type());
  const at::Tensor out = at::empty({y.size(0), 1, y.size(2)}, states.options());
  kBatchMatMul(scores.unsqueeze(1), states, out, kKeepDtype);
  return out.squeeze(1).to(y.scalar_type());
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, PrivateUse1, m) {
  m.impl("experts_linear", &liteboost::experts_linear_npu);
  m.impl("experts_combine", &liteboost::experts_combine_npu);
}
