// The argument checks of the causal convolutions, shared by every backend.
#pragma once

#include <c10/util/string_view.h>

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raise on anything that causal_conv.h does not allow; return whether the activation is silu.
bool check_causal_conv1d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         c10::string_view activation);
bool check_causal_conv1d_update(const at::Tensor& x, const at::Tensor& state, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, c10::string_view activation);

}  // namespace liteboost
