// The argument checks of the ops of quantized_linear.h, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// What ops on packed weights have in common: tiles with their scales and zero points for x. `advice` says what to do
// about the tiles, `owner` whose they are.
void check_packed(const char* op, const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                  const std::optional<at::Tensor>& zero_points, const char* advice, const char* owner);

// Raise on anything that quantized_linear.h does not allow.
void check_linear_packed(const char* op, const at::Tensor& x, const at::Tensor& tiles,
                         const at::Tensor& scales, const std::optional<at::Tensor>& zero_points,
                         const std::optional<at::Tensor>& bias, const c10::SymInt& out_features);
void check_linear_w4a8(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                       const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
                       const c10::SymInt& out_features);
void check_linears_packed(const at::Tensor& x, at::TensorList tiles, at::TensorList scales,
                          const OptionalTensors& zero_points, const OptionalTensors& biases,
                          at::IntArrayRef out_features, bool rounds_x);

}  // namespace liteboost
