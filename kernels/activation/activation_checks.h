// The argument checks of activation and gated_activation, shared by every backend.
#pragma once

#include <c10/util/string_view.h>

#include <optional>

#include "activation/activation.h"
#include "common/checks.h"

namespace liteboost {

// Raises on anything that activation.h does not allow; returns the parsed activation.
Activation check_gated_activation(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                  double alpha, std::optional<double> limit);

// What scripts call it.
const char* activation_name(Activation activation);

// The activation called so, for `op`; raises on an unknown one, and on an alpha for another than silu.
Activation parse_activation(const char* op, c10::string_view activation, double alpha);

// Argument checks of the op `activation`; returns the parsed activation.
Activation check_activation(const at::Tensor& x, c10::string_view activation, double alpha);

}  // namespace liteboost
