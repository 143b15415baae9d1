// The argument checks of quantize_kv and int8_attention, shared by every backend.
#pragma once

#include <optional>

#include "common/checks.h"
#include "int8_attention/int8_attention.h"

namespace liteboost {

// Raises unless `x` has rows that int8_attention.h can keep.
void check_quantize_kv(const at::Tensor& x);

// Raises on anything that int8_attention.h does not allow.
void check_int8_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& mask, double scaling, bool is_causal,
                          int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks);

}  // namespace liteboost
