// Gated activations as aclnn operators, for every op that ends in one.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "activation/activation.h"
#include "npu/aclnn.h"
#include "npu/serve.h"

namespace liteboost {

// a, b, out: their product.
extern const npu::Operator<npu::Tensor, npu::Tensor, npu::Tensor> kMul;

// What gated_activation computes; see activation.h.
struct Gating {
  Activation activation = Activation::silu;
  double alpha = 1.0;
  std::optional<double> limit;
  double up_offset = 0.0;
};

// Why no aclnn operator gates rows of so many elements; at least one row and element are there.
npu::Refusal gating_refusal(at::ScalarType dtype, int64_t cols, const Gating& how);

// dtype and what chooses the operator.
std::string gating_kind(at::ScalarType dtype, const Gating& how);

// act(gate) * up, contiguous, for what gating_refusal lets pass. In one launch where the two are halves of one
// tensor, or gate and up stand at even and odd places of it; else they are put together first.
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up, const Gating& how);

}  // namespace liteboost
