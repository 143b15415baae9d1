// The argument checks of the norms, shared by every backend. All raise on what norm.h does not allow.
#pragma once

#include <c10/util/string_view.h>

#include <optional>

#include "common/checks.h"
#include "norm/norm.h"

namespace liteboost {

void check_rms_norm(const char* op, const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps);

void check_inverse_rms(const at::Tensor& x, double eps);

// What add_rms_norm asks beyond check_rms_norm.
void check_residual(const at::Tensor& x, const at::Tensor& residual);

// Returns the parsed activation.
NormGate check_gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                              double eps, c10::string_view activation, bool gate_first, int64_t group_size);

void check_layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps);

// The dtype of weight * y where y has the dtype of x, and weight that or float32.
inline at::ScalarType promoted(const at::Tensor& x, const std::optional<at::Tensor>& weight) {
  return weight.has_value() && weight->defined() ? weight->scalar_type() : x.scalar_type();
}

}  // namespace liteboost
