// The argument checks of experts_packed, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raise on anything that quantized_experts.h does not allow, but for what is in index.
void check_experts_packed(const at::Tensor& x, const at::Tensor& tiles, const at::Tensor& scales,
                          const std::optional<at::Tensor>& zero_points, const std::optional<at::Tensor>& bias,
                          const at::Tensor& index, const c10::SymInt& out_features);

}  // namespace liteboost
