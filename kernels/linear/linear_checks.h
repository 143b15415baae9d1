// The argument checks of linear and gated_linear, shared by every backend.
#pragma once

#include <c10/util/string_view.h>

#include <optional>

#include "activation/activation.h"
#include "common/checks.h"

namespace liteboost {

// Raises on anything that linear.h does not allow.
void check_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// The same for _linears.
void check_linears(const at::Tensor& x, at::TensorList weights, const OptionalTensors& biases);

// The same for gated_linear; returns the parsed activation.
Activation check_gated_linear(const at::Tensor& x, const at::Tensor& gate_weight,
                              const std::optional<at::Tensor>& gate_bias, const at::Tensor& up_weight,
                              const std::optional<at::Tensor>& up_bias, c10::string_view activation,
                              double alpha);

}  // namespace liteboost
