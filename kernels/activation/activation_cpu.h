// What the CPU code of other families shares with the activations'.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>

namespace liteboost {

// gated_activation on the CPU; see activation.h.
at::Tensor gated_activation_cpu(const at::Tensor& gate, const at::Tensor& up, c10::string_view activation,
                                double alpha, std::optional<double> limit, double up_offset);

}  // namespace liteboost
