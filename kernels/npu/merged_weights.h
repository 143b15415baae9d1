// Tensors that lie one behind the other in memory, each with a storage of its own, and the one tensor they are together.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace liteboost::npu {

// All of `parts`, joined along dimension 0 without a copy; undefined unless they lie so, in this order. It owns no
// memory: for the call at hand, while the parts are held.
at::Tensor merged_view(at::TensorList parts);

// Copies of `parts` that lie so: one allocation, freed with the last of them.
std::vector<at::Tensor> merge(at::TensorList parts);

}  // namespace liteboost::npu
