// The argument checks of the experts' ops, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raise on anything that experts.h does not allow, but for the values of index.
void check_experts_linear(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const at::Tensor& index);
void check_experts_combine(const at::Tensor& y, const at::Tensor& scores);

}  // namespace liteboost
