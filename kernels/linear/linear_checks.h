// The argument checks of linear, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raises on anything that linear.h does not allow.
void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace liteboost
