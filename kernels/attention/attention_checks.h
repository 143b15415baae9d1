// The argument checks of attention, shared by every backend.
#pragma once

#include <optional>

#include "attention/attention.h"
#include "common/checks.h"

namespace liteboost {

// Raises unless query, key and value fit each other as attention.h says.
void check_attention_states(const char* op, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value);

// Raises unless the other arguments fit query, and what there is of key.
void check_attention_options(const char* op, const at::Tensor& query, const at::Tensor& key,
                             const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                             int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks);

// Raises on anything that attention.h does not allow.
void check_attention(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                     int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks);

}  // namespace liteboost
