// The argument checks of the gated delta rule, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"

namespace liteboost {

// Raise on anything that delta_rule.h does not allow.
void check_recurrent_gated_delta_rule(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      const at::Tensor& g, const at::Tensor& beta, const at::Tensor& state);
void check_chunk_gated_delta_rule(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const at::Tensor& g, const at::Tensor& beta,
                                  const std::optional<at::Tensor>& initial_state);

}  // namespace liteboost
