// The argument checks of linear_w8a8, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raises on anything that int8_linear.h does not allow.
void check_linear_w8a8(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scales,
                       const std::optional<at::Tensor>& bias);

// The same for _linears_w8a8.
void check_linears_w8a8(const at::Tensor& x, at::TensorList weights, at::TensorList scales,
                        const OptionalTensors& biases);

}  // namespace liteboost
